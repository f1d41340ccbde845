"""Everything compiled for one config on one set of devices: the plan, the initial state, the steps."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CompilerError
from spmd_lm.models.context import LossDict, local_batch
from spmd_lm.models.modules import modules_of_model
from spmd_lm.ops.eight_bits import EightBits
from spmd_lm.parallel.groups import Group
from spmd_lm.parallel.host_memory import DEVICE, PINNED, moved
from spmd_lm.parallel.mesh import devices_per_host, domains_of_model, is_absent, make_mesh
from spmd_lm.parallel.padding import pad_or_crop
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.parallel.sharded_model import ShardedModel
from spmd_lm.parallel.trees import Tree, exclude, from_paths, leaves_by_path, merge, read_now, subset_of
from spmd_lm.resolve import abstract_plan, make_model, require_model_within_domain
from spmd_lm.runtime.compiler_workarounds import exclusive_first_call
from spmd_lm.runtime.xla_options import options_for
from spmd_lm.step.group_store import InFiles
from spmd_lm.step.guard import init_loss_window
from spmd_lm.step.local_shards import Trees
from spmd_lm.step.loss_scale import init_loss_scale
from spmd_lm.step.offload import Offload
from spmd_lm.step.optimizer import Optimizer, PendingUpdate
from spmd_lm.step.state import TrainState, trees_of, with_trees
from spmd_lm.step.train_step import make_eval_step, make_train_step, model_fns


def _fit(tree: Tree, like: Tree) -> Tree:
    """Pads or crops leaves to the shapes of `like`, in its shardings; returns leaves of the same shape as they are."""

    def fit(x: jax.Array, to: jax.ShapeDtypeStruct) -> jax.Array:
        if x.shape == to.shape:
            return x
        return jax.jit(pad_or_crop, static_argnums=1, out_shardings=to.sharding)(x, to.shape)

    return jax.tree.map(fit, tree, like)


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sharding, tree)


def _bytes_per_device(tree: Tree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def in_compute_dtype(config: RunConfig) -> RunConfig:
    """The same without matmuls in eight bits."""
    precision = config.precision.model_copy(update={"matmul": "none", "emulate": False})
    return config.model_copy(update={"precision": precision})


class Program:
    """One config, bound to devices (default: all there are).  device: the first of the mesh; all are alike.

    model: a user's block, head or ModelModules, in place of model.module.
    trains: whether it takes steps; if not, optim.offload and precision.matmul have no effect."""

    def __init__(
        self, config: RunConfig, devices: list[jax.Device] | None = None, model: Any = None, *, trains: bool = True
    ):
        devices, modules = devices or jax.devices(), modules_of_model(config.model, config.objective, model)
        host = devices_per_host(devices)
        used = config if trains else in_compute_dtype(config)
        plan = abstract_plan(used, len(devices), devices[0].platform, devices[0].device_kind, modules, host)
        across_hosts = config.parallel.model_across_hosts
        mesh = make_mesh(plan.layout, devices, model_across_hosts=across_hosts, rings=plan.rings)
        require_model_within_domain(config, plan, domains_of_model(mesh))
        self.config, self.plan, self.device = config, dataclasses.replace(plan, mesh=mesh), mesh.devices.flat[0]
        self.model = make_model(config, plan.platform, plan, modules)
        optim = config.optim if trains else config.optim.model_copy(update={"offload": "none"})
        self.optimizer = Optimizer(optim, config.train.steps)
        self.offload = None if optim.offload == "none" else Offload(config, self.plan, self.optimizer)
        p = config.parallel
        self.schedule = make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
        self.tokens_per_step = config.train.batch * config.model.context
        kind, absent = self.device.device_kind, is_absent(self.device)
        setting, deterministic = config.run.compiler_options, config.run.deterministic
        self.xla_options = options_for(setting, plan.platform, kind, absent=absent, deterministic=deterministic)

    def close(self) -> None:
        """Ends the use of optim.offload_dir; states of this program are then lost."""
        if self.offload:
            self.offload.store.close()

    def init(self) -> TrainState:
        """The initial state, created sharded.  The weights are the same under every layout."""

        def init(part: Callable[[Tree], Tree]) -> TrainState:
            def init_params() -> Tree:
                return part(self.plan.from_canonical(self.model.init(self.config.train.seed)))

            # In two programs, so that moments are made when what drawing the weights takes, three times as much, is
            # gone.
            shardings = _shardings(self._abstract_padded(part))
            params = jax.jit(init_params, out_shardings=shardings.params)()
            return jax.jit(self._initial_state, donate_argnums=0, out_shardings=shardings)(params)

        return self._in_parts(init)

    def initial_params(self, paths: Collection[str]) -> dict[str, jax.Array]:
        """The canonical parameters at these paths before the first step."""
        leaves = leaves_by_path(self.abstract_canonical().params)
        wanted = {path: leaf for path, leaf in leaves.items() if path in paths}

        def init() -> dict[str, jax.Array]:
            params = leaves_by_path(self.model.init(self.config.train.seed))
            return {path: params[path].astype(leaf.dtype) for path, leaf in wanted.items()}

        return jax.jit(init, out_shardings=_shardings(wanted))()

    def saved_part(self, canonical: TrainState) -> TrainState:
        """The part of a canonical state, or of its shapes, that checkpoints hold: with adapters, nothing frozen."""
        if self.config.adapter.kind == "none":
            return canonical
        return dataclasses.replace(canonical, params=self.plan.trained(canonical.params))

    def initial_canonical(self, params: Tree) -> TrainState:
        """The canonical state before the first step, with these canonical parameters; without the moments of offloaded
        ones, which `from_canonical` makes."""
        part = params if self.offload is None else exclude(params, self.offload.paths)
        like = self._abstract(subset_of(self.plan.shapes, part), self.plan.canonical_specs)
        state = jax.jit(self._initial_state, out_shardings=_shardings(like))(part)
        return dataclasses.replace(state, params=params)

    def _in_parts(self, make: Callable[[Callable[[Tree], Tree]], TrainState]) -> TrainState:
        """The state on devices, from parts of it.  make(part): the part with `part` of each tree, masters included."""
        if (offload := self.offload) is None:
            return make(lambda tree: tree)
        state, group_states = make(lambda tree: exclude(tree, offload.paths)), []
        offload.store.begin(state.step, anew=True)
        for groups in offload.groups:
            part = functools.partial(subset_of, like=groups[0].tree)
            # Without a name, so that one stack's trees are gone before the next one's are made.
            weights, states = offload.hold(groups, trees_of(make(part), self.plan.names))
            state = dataclasses.replace(state, params=merge(state.params, weights))
            group_states.append(states)
        offload.store.commit()
        return dataclasses.replace(state, group_states=tuple(group_states))

    def _initial_state(self, params: Tree) -> TrainState:
        scalars = jax.tree.map(jnp.asarray, init_loss_scale(self.config.precision))
        window = init_loss_window(self.config.train.guard)
        opt_state = self.optimizer.rule.init(self.plan.trained(params))
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, scalars, window)

    def _abstract(self, shapes: Tree, specs: Tree) -> TrainState:
        """Shapes, dtypes and shardings of a state, given its parameters'; leaves of other shapes are replicated."""
        state = jax.eval_shape(self._initial_state, shapes)
        shardings = self.plan.sharding(state.map_params(functools.partial(subset_of, specs), lambda _: P()))
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), state, shardings)

    def _abstract_padded(self, part: Callable[[Tree], Tree]) -> TrainState:
        """Shapes, dtypes and shardings of a part of the state, masters included, on devices."""
        return self._abstract(part(self.plan.padded_shapes), self.plan.param_specs)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state as devices hold it."""
        if (offload := self.offload) is None:
            return self._abstract_padded(lambda tree: tree)
        state = self._abstract_padded(lambda tree: exclude(tree, offload.paths))
        masters = self._abstract_padded(functools.partial(subset_of, like=offload.paths)).params
        weights = jax.tree.map(lambda x: x.update(dtype=offload.dtype), masters)
        return dataclasses.replace(state, params=merge(state.params, weights))

    def abstract_canonical(self) -> TrainState:
        """Shapes, dtypes and shardings of the canonical state, as checkpoints hold it."""
        state = self._abstract(self.plan.shapes, self.plan.canonical_specs)
        if self.offload is None:
            return state

        def on_host(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return x.update(sharding=x.sharding.with_memory_kind(PINNED))

        paths = self.offload.paths
        return state.map_params(lambda tree: merge(tree, jax.tree.map(on_host, subset_of(tree, paths))))

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """Shardings of the state on devices."""
        return _shardings(self.abstract_state())

    def canonical(self, state: TrainState) -> TrainState:
        """`state` unpadded and in model order, as checkpoints hold it.  With one chunk it shares unpadded leaves.

        Offloaded leaves are in pinned host memory."""
        if self.offload is None:
            return self._canonical(state)
        offload, names = self.offload, self.plan.names
        canonical = self._canonical(state.on_device.map_params(lambda tree: exclude(tree, offload.paths)))
        trees = [*trees_of(canonical, names)]

        def on_host(tree: Tree) -> Tree:
            """Moves a tree to the host, and waits: a stack's may be most of what devices have left."""
            like = self._abstract(subset_of(self.plan.shapes, tree), self.plan.canonical_specs).params
            return jax.block_until_ready(moved(_fit(self._reorder(tree, self.plan.to_model_order), like), PINNED))

        for groups, states in zip(offload.groups, state.group_states, strict=True):
            weights = subset_of(state.params, groups[0].tree)
            for number, others in enumerate(trees):
                trees[number] = merge(others, on_host(offload.whole(number, weights, groups, states)))
        return with_trees(canonical, names, trees)

    def to_save(self, state: TrainState) -> TrainState:
        """`canonical`, with a StoredLeaf for each array that rests in files."""
        if self.offload is None or not isinstance(self.offload.store, InFiles):
            return self.canonical(state)
        paths, store = self.offload.paths, self.offload.store
        state_of_vectors = state.on_device.map_params(lambda tree: exclude(tree, paths))
        saved, weights = self._canonical(state_of_vectors), subset_of(state.params, paths)
        like = self._abstract(subset_of(self.plan.shapes, weights), self.plan.canonical_specs)
        masters, *moments = store.leaves([*itertools.chain(*state.group_states)], trees_of(like, self.plan.names))
        if not masters:
            masters = _fit(self._reorder(weights, self.plan.to_model_order), like.params)
        return saved.merge(with_trees(state.on_device, self.plan.names, [masters, *moments]))

    def _canonical(self, part: TrainState) -> TrainState:
        """`canonical` of a part of the state on devices."""
        in_order = self._reorder(part, lambda part: part.map_params(self.plan.to_model_order))
        like = self._abstract(subset_of(self.plan.shapes, part.params), self.plan.canonical_specs)
        return _fit(in_order, like)

    def from_canonical(self, canonical: TrainState) -> TrainState:
        """A canonical state, padded and in stage order; what is offloaded may be LaterLeafs.  Missing OPTIONAL_FIELDS
        and moments start anew."""
        new: dict[str, Any] = {
            "loss_scale": init_loss_scale(self.config.precision),
            "loss_window": init_loss_window(self.config.train.guard),
        }
        missing = {name: value for name, value in new.items() if getattr(canonical, name) is None}
        placed = {name: jax.device_put(value, getattr(self.state_shardings, name)) for name, value in missing.items()}
        canonical = dataclasses.replace(canonical, **placed)

        def padded(part: Callable[[Tree], Tree]) -> TrainState:
            of_part = moved(read_now(canonical.map_params(part)), DEVICE) if self.offload else canonical
            of_part = dataclasses.replace(of_part, opt_state=self._with_all_moments(of_part))
            in_model_order = _fit(of_part, self._abstract_padded(part))
            return self._reorder(in_model_order, lambda state: state.map_params(self.plan.to_stage_order))

        return self._in_parts(padded)

    def _with_all_moments(self, canonical: TrainState) -> Any:
        """The optimizer's canonical state, where parameters that have no moments get new ones."""
        shapes = subset_of(self.plan.shapes, canonical.params)
        saved, wanted = leaves_by_path(canonical.opt_state), self._abstract(shapes, self.plan.canonical_specs).opt_state
        missing = {path: leaf.sharding for path, leaf in leaves_by_path(wanted).items() if path not in saved}
        if not missing:
            return canonical.opt_state

        def init(params: Tree) -> dict[str, jax.Array]:
            new = leaves_by_path(self.optimizer.rule.init(self.plan.trained(params)))
            return {path: new[path] for path in missing}

        leaves = saved | jax.jit(init, out_shardings=missing)(canonical.params)
        return from_paths(leaves, wanted)

    def params_from_canonical(self, canonical: Tree) -> Tree:
        """Canonical parameters, padded and in stage order."""
        return self._reorder(_fit(canonical, self.abstract_state().params), self.plan.to_stage_order)

    def _reorder(self, tree: Tree, reorder: Callable[[Tree], Tree]) -> Tree:
        """Applies `reorder`, jitted, if stages hold the layers in another order than the model's."""
        return tree if self.plan.chunks == 1 else jax.jit(reorder, out_shardings=_shardings(tree))(tree)

    def abstract_batch(self) -> Batch:
        """Shapes, dtypes and shardings of one step's batch."""
        shardings = self.plan.sharding(self.plan.batch_specs)
        return jax.tree.map(lambda to, x: x and x.update(sharding=to), shardings, abstract_batch(self.config))

    @functools.cached_property
    def batch_shardings(self) -> Batch:
        return _shardings(self.abstract_batch())

    def repeated_row(self, tokens: np.ndarray, segments: np.ndarray) -> Batch:
        """A microbatch [1, shards, time] on devices: this row, [time], once for each shard of the batch."""
        rows = {"tokens": tokens, "positions": np.arange(len(tokens), dtype=np.int32), "segments": segments}
        rows["token_type_ids"] = np.zeros_like(tokens)
        used, shape = abstract_batch(self.config), (1, self.plan.layout.batch_shards, len(tokens))
        fields = dict.fromkeys(field.name for field in dataclasses.fields(Batch))
        fields |= {name: np.broadcast_to(row, shape) for name, row in rows.items() if getattr(used, name) is not None}
        return jax.device_put(Batch(**fields), self.plan.sharding(self.plan.batch_specs))

    @functools.cached_property
    def train_step(self):
        specs = jax.tree.map(lambda sharding: sharding.spec, self.state_shardings)
        model, kind = self.model, self.config.precision.matmul
        if kind != "none":  # evaluation and generation multiply in the compute dtype
            model = dataclasses.replace(model, eight_bits=EightBits(kind))
        return make_train_step(self.config, model, self.optimizer, self.plan, self.schedule, specs)

    @functools.cached_property
    def evaluate(self):
        """(params, batch) -> LanguageModel.eval_sums of the batch."""
        return self._make_eval_step(self.model.eval_sums)

    @functools.cached_property
    def score(self):
        """(params, batch) -> LanguageModel.target_scores of the batch: of every target of every row."""
        return self._make_eval_step(self.model.target_scores)

    def _make_eval_step(self, head: Callable[..., LossDict]) -> Callable:
        options = self.xla_options.deterministic
        return exclusive_first_call(make_eval_step(self.config, self.model, self.plan, self.schedule, head, options))

    @functools.cached_property
    def forward(self):
        """(params, batch) -> logits by what they predict, [microbatches, rows, ...], on every device."""
        plan, model = self.plan, self.model

        def forward(params: Tree, batch: Batch) -> dict[str, jax.Array]:
            inference, gather = self.inference_params(params)
            return lax.map(lambda microbatch: model.forward(inference, microbatch, gather), local_batch(batch))

        step = plan.shard_map(forward, (plan.param_specs, plan.batch_specs), plan.row_spec)
        return jax.jit(step, out_shardings=plan.sharding(P()))

    def inference_params(self, params: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        """(parameters, gather) inside `plan.shard_map`: see ShardedModel.inference_params."""
        fns = model_fns(self.model, lambda params, x, microbatch: {}, scan=True)
        compute = jnp.dtype(self.config.precision.compute)
        return ShardedModel.from_params(fns, self.plan, params, compute, compute).inference_params()

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The train step, compiled ahead of time.  Raises CompilerError if the compiler rejects it, or an option."""
        lowered = self.train_step.lower(self.abstract_state(), self.abstract_batch())
        options = self.xla_options.values
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            setting = self.config.run.compiler_options
            advice = f" run.compiler_options sets {', '.join(options)}." if options else ""
            if any(name in reason for name in self.xla_options.deterministic):
                advice += " Use run.deterministic=false."
            elif setting == "auto" and any(name in reason for name in options):
                advice += " Use run.compiler_options=none."
            problem = f"the compiler for {self.device.device_kind} refuses this step: {reason}.{advice}"
            out_of_memory = reason.startswith("RESOURCE_EXHAUSTED") and "HBM" in reason.upper()
            raise CompilerError(problem, reason, out_of_memory) from error

    def lowered_updates(self) -> dict[Group, jax.stages.Lowered]:
        """The devices' programs that update offloaded state, for one group of each shape."""
        if self.offload is None:
            return {}
        weights, pending, lowered = self.abstract_state().params, self._abstract_pending(), {}
        for groups, trees in zip(self.offload.groups, self._abstract_offloaded(), strict=True):
            for group in {group.layers and group.layers[1]: group for group in groups}.values():
                of_group = subset_of(weights, group.tree), trees, subset_of(pending.grads, group.tree)
                if program := self.offload.place.lower(group, *of_group, pending.shared):
                    lowered[group] = program
        return lowered

    def copied_by_updates(self) -> dict[str, int]:
        """Bytes that a device, its host and the host's disk send each other in one step's update of offloaded state, by
        name."""
        if self.offload is None:
            return {}
        size, disk = _bytes_per_device([*self._abstract_offloaded()]), {}
        if isinstance(self.offload.store, InFiles):
            disk = {"masters and moments from disk": size, "masters and moments to disk": size}
        weights = subset_of(self.abstract_state().params, self.offload.paths)
        grads = self._abstract_pending().grads
        return disk | self.offload.place.copied(_bytes_per_device(weights), size, _bytes_per_device(grads))

    def _abstract_offloaded(self) -> Iterator[Trees]:
        """Shapes, dtypes and shardings, on devices, of the masters and moments of each entry of `offload.groups`."""
        assert self.offload is not None
        for groups in self.offload.groups:
            part = self._abstract_padded(functools.partial(subset_of, like=groups[0].tree))
            masters, *moments = trees_of(part, self.plan.names)
            yield masters if self.offload.place.keeps_masters else {}, *moments

    def _abstract_pending(self) -> PendingUpdate:
        pending = jax.eval_shape(self.train_step, self.abstract_state(), self.abstract_batch())[2]
        specs = subset_of(self.plan.param_specs, pending.grads)
        shardings = self.plan.sharding(PendingUpdate(specs, jax.tree.map(lambda _: P(), pending.shared)))
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), pending, shardings)

    def compile(self) -> float:
        """Compiles the train step, once; returns the seconds it took."""
        start = time.perf_counter()
        _ = self.compiled
        return time.perf_counter() - start

    @functools.cached_property
    def _execute(self) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array], PendingUpdate | None]]:
        return exclusive_first_call(self.compiled)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update.  `state` is donated."""
        new, metrics, pending = self._execute(state.on_device, batch)
        if self.offload is None or pending is None:
            return new, metrics
        return self.offload.update(dataclasses.replace(new, group_states=state.group_states), pending), metrics
