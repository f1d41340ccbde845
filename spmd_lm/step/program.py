"""Everything compiled for one config on one set of devices: the plan, the first state, the step, the evaluation."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from spmd_lm.analysis import flops, hardware
from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import AdamW, RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.parallel.mesh import Layout, abstract_mesh, make_mesh, resolve
from spmd_lm.parallel.pipeline.schedule import Schedule, schedule
from spmd_lm.parallel.plan import Plan, Tree, pad_or_crop
from spmd_lm.parallel.zero import ZeroPolicy
from spmd_lm.step import loss_scale
from spmd_lm.step.freeze import frozen
from spmd_lm.step.optimizer import Optimizer
from spmd_lm.step.state import TrainState
from spmd_lm.step.train_step import make_eval_step, make_forward, make_train_step, state_specs


def make_model(config: RunConfig, platform: str) -> LanguageModel:
    kernel, _ = choose_kernel(config, platform)
    m, p = config.model, config.precision
    return LanguageModel(
        m, config.objective, p.params, kernel, config.remat_policy.policy, p.reduce, config.scan_layers
    )


def make_plan(config: RunConfig, devices: list[jax.Device]) -> Plan:
    """The plan of `config` on these devices.  LayoutError if it has none."""
    layout = resolve(config, len(devices))
    return _plan(config, layout, make_mesh(layout, devices), devices[0].platform)


def abstract_plan(config: RunConfig, devices: int, platform: str) -> Plan:
    """The plan of `config` on a number of devices that need not exist.  LayoutError if it has none."""
    layout = resolve(config, devices)
    return _plan(config, layout, abstract_mesh(layout), platform)


def _plan(config: RunConfig, layout: Layout, mesh: Mesh | AbstractMesh, platform: str) -> Plan:
    enable_wide_types(config)
    model = make_model(config, platform)
    p = config.parallel
    policy = ZeroPolicy.of_stage(
        p.zero,
        reduce_once=p.reduce_once,
        layers=config.model.layers_kept,
        breadth_first=p.schedule == "breadth_first" and layout.pipe > 1,
    )
    names, shapes = model.names, model.shapes
    return Plan(layout, mesh, platform, names, shapes, policy, p.sequence, config.chunks, p.run_idle_stages)


def enable_wide_types(config: RunConfig) -> None:
    """float64 exists in jax only where it is switched on, for the whole process."""
    if "float64" in (config.precision.params, config.precision.compute, config.precision.reduce):
        jax.config.update("jax_enable_x64", True)


@functools.cache
def _refitted(shape: tuple[int, ...], sharding: NamedSharding):
    return jax.jit(lambda x: pad_or_crop(x, shape), out_shardings=sharding)


def _refit(tree: Tree, to: Tree) -> Tree:
    """`tree` in the shapes and shardings of `to`."""
    return jax.tree.map(lambda x, t: x if x.shape == t.shape else _refitted(t.shape, t.sharding)(x), tree, to)


def _lying(tree: Tree, shardings: Tree) -> Tree:
    """Shapes and dtypes with where they lie."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


class Program:
    """One config, bound to devices (default: all there are)."""

    def __init__(self, config: RunConfig, devices: list[jax.Device] | None = None):
        self.config = config
        self.plan = make_plan(config, devices or jax.devices())
        self.model = make_model(config, self.plan.platform)
        freeze = config.optim.freeze.split()
        self.frozen = frozen(freeze, self.model.names, self.model.shapes) if freeze else None

    @property
    def device(self) -> jax.Device:
        """One of the devices; all are alike."""
        assert isinstance(self.plan.mesh, Mesh)
        return self.plan.mesh.devices.flat[0]

    # ---- figures

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.batch * self.config.model.context

    @functools.cached_property
    def flops_per_step(self) -> float:
        """Model FLOPs of one step of the whole job: recomputation is not counted."""
        return flops.train_step(self.config)

    @functools.cached_property
    def peak(self) -> hardware.Peak | None:
        """Of one device; None where nobody publishes one."""
        return hardware.peak(self.device, self.config.precision.compute, self.plan.layout.devices)

    @property
    def peak_flops(self) -> float | None:
        """Of the whole job, per second, in the compute dtype."""
        return self.peak.flops * self.plan.layout.devices if self.peak else None

    # ---- state

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        return self.plan.sharding(self._state_specs)

    @property
    def _state_specs(self) -> TrainState:
        return state_specs(self.plan, self.config.precision)

    @functools.cached_property
    def batch_shardings(self) -> Batch:
        return self.plan.sharding(self._batch_specs)

    @functools.cached_property
    def _batch_specs(self) -> Batch:
        return jax.tree.map(lambda _: self.plan.batch_spec, abstract_batch(self.config))

    def init(self) -> TrainState:
        """The first state, born sharded.  The same weights under every layout."""

        def make() -> TrainState:
            params = self.plan.place(self.model.init(self.config.train.seed))
            zeros = jax.tree.map(jnp.zeros_like, params)
            scalars = jax.tree.map(jnp.asarray, loss_scale.first(self.config.precision))
            moments = zeros, jax.tree.map(jnp.zeros_like, params)
            return TrainState(jnp.zeros((), jnp.int32), params, *moments, scaling=scalars)

        return jax.jit(make, out_shardings=self.state_shardings)()

    @functools.cached_property
    def _canonical_shardings(self) -> TrainState:
        return self.plan.sharding(self._state_specs.map_params(lambda _: self.plan.canonical_specs))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state as devices hold it."""
        return self._abstract(self.plan.placed_shapes, self.state_shardings)

    def abstract_canonical(self) -> TrainState:
        """The same of the canonical state, as checkpoints hold it."""
        return self._abstract(self.plan.shapes, self._canonical_shardings)

    def _abstract(self, shapes: Tree, shardings: TrainState) -> TrainState:
        scalars = loss_scale.first(self.config.precision)
        return _lying(
            TrainState(jax.ShapeDtypeStruct((), jnp.int32), shapes, shapes, shapes, scaling=scalars), shardings
        )

    def canonical(self, state: TrainState) -> TrainState:
        """`state` without padding, its layers in order, as checkpoints hold it.  What is so stays the same array,
        uncopied."""
        return _refit(self._reordered(state, self.plan.to_model_order), self.abstract_canonical())

    def place(self, canonical: TrainState) -> TrainState:
        """A canonical state, padded and laid out for the step.  A scale that it lacks begins anew."""
        if canonical.scaling is None:
            anew = jax.device_put(loss_scale.first(self.config.precision), self.state_shardings.scaling)
            canonical = dataclasses.replace(canonical, scaling=anew)
        return self._reordered(_refit(canonical, self.abstract_state()), self.plan.to_stage_order)

    def place_params(self, canonical: Tree) -> Tree:
        """The same of the parameters alone."""
        return self._reordered(_refit(canonical, self.abstract_state().params), self.plan.to_stage_order)

    def _reordered(self, tree: Tree, reorder: Callable[[Tree], Tree]) -> Tree:
        """A state or parameters with the layers in stage order, or back in model order."""
        if not self.plan.interleaved:
            return tree

        def reorder_state(x: Tree) -> Tree:
            return x.map_params(reorder) if isinstance(x, TrainState) else reorder(x)

        return jax.jit(reorder_state, out_shardings=jax.tree.map(lambda x: x.sharding, tree))(tree)

    # ---- steps

    @functools.cached_property
    def schedule(self) -> Schedule:
        c = self.config
        return schedule(c.parallel.schedule, self.plan.layout.pipe, c.parallel.microbatches, c.chunks)

    @functools.cached_property
    def train_step(self):
        c = self.config
        if not isinstance(c.optim, AdamW):
            raise ConfigError(f"optim.kind={c.optim.kind}: this optimizer has no update yet. Use optim.kind=adamw.")
        optimizer = Optimizer(c.optim, c.train.steps, self.frozen)
        of = self.model, optimizer, self.plan, self.schedule, c.precision, c.train.seed, self._batch_specs
        group = c.remat_policy.layers_per_block
        return make_train_step(*of, group=group)

    @functools.cached_property
    def evaluate(self):
        """(params, batch) -> what a validation is made of, as LanguageModel.scores says."""
        c = self.config
        return make_eval_step(self.model, self.plan, self.schedule, c.precision, self._batch_specs, c.train.batch)

    @functools.cached_property
    def forward(self):
        """(params, batch) -> logits, by what they predict."""
        return make_forward(self.model, self.plan, self.config.precision, self._batch_specs)

    def abstract_batch(self) -> Batch:
        return _lying(abstract_batch(self.config), self.batch_shardings)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The train step, ahead of time."""
        return self.train_step.lower(self.abstract_state(), self.abstract_batch()).compile()

    def compile(self) -> float:
        """Compile the train step, once; seconds it took."""
        start = time.perf_counter()
        _ = self.compiled
        return time.perf_counter() - start

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update.  `state` is donated."""
        return self.compiled(state, batch)
