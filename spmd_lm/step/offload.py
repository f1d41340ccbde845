"""The optimizer's state of matrices outside of the devices' memory, and its update, group by group, after the step.

The devices keep a copy of the weights in the compute dtype.  `DeviceUpdate` updates a group on the devices, while the
next one is on its way to them.  `HostUpdate` brings gradients to the host, whose processor updates masters and moments,
and sends weights back (ZeRO-Offload, arXiv:2101.06840)."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.groups import Group, groups_of, offloaded_parameters, weight_dtype
from spmd_lm.parallel.host_memory import DEVICE, PINNED, moved
from spmd_lm.parallel.plan import Plan, interleave, remembered
from spmd_lm.parallel.trees import Tree, cast_like, leaves_by_path, merge, subset_of
from spmd_lm.step.group_store import InFiles, InMemory, Store, StoredArrays
from spmd_lm.step.local_shards import LocalShards, Trees, copied
from spmd_lm.step.optimizer import Optimizer, PendingUpdate, Shared, trained_layers
from spmd_lm.step.state import TrainState, trees_of, with_trees


class Place(Protocol):
    """A place where groups are updated.  `local`: a group's `Trees`, in a form of the place's own.
    in_memory: between `local` and its form between steps, for a store in memory."""

    splits_stacks: bool
    keeps_masters: bool

    def in_memory(self) -> InMemory: ...

    def put(self, group: Group, trees: Trees) -> Any:
        """`local`, from arrays on devices."""

    def fetch(self, group: Group, local: Any) -> Trees:
        """Arrays on devices, from `local`."""

    def split(self, group: Group, local: Any) -> list[Trees]:
        """The distinct shards of `local`, see LocalShards."""

    def join(self, group: Group, shards: list[Trees]) -> Any:
        """`local`, from copies of these shards."""

    def share(self, shared: Shared) -> Shared:
        """The arguments, where `update` reads them."""

    def update(self, group: Group, weights: Tree, local: Any, grads: Tree, shared: Shared) -> tuple[Tree, Any]:
        """(weights on devices, `local`) after the update.  All arguments but `grads` and `shared` are donated."""

    def lower(
        self, group: Group, weights: Tree, trees: Trees, grads: Tree, shared: Shared
    ) -> jax.stages.Lowered | None:
        """The devices' program that updates a group; None if they have none.  Arguments: shapes, dtypes and shardings;
        `trees`: of whole parameters."""

    def copied(self, weights: int, state: int, grads: int) -> dict[str, int]:
        """Bytes of each copy between a device and its host in one step, from the bytes on a device."""


class Offload:
    """The offloaded part of a program's state.

    paths: of offloaded parameters, in nested dicts for `subset_of`.
    groups: a tuple for each stack that is split, and one for each other group; `TrainState.group_states` has the state
    of each group, likewise."""

    def __init__(self, config: RunConfig, plan: Plan, optimizer: Optimizer):
        self.plan, p = plan, config.precision
        self.dtype = jnp.dtype(weight_dtype(p.compute, p.params))
        self.paths = optimizer.offloaded_paths(plan)
        place, shards = HostUpdate if config.optim.offload_update == "host" else DeviceUpdate, LocalShards(plan)
        self.place: Place = place(plan, optimizer, self.dtype, shards)
        self.groups = groups_of(offloaded_parameters(plan), plan.layout.pipe, split=self.place.splits_stacks)
        self.store: Store = self.place.in_memory()
        if config.optim.offload == "disk":
            directory = offload_directory(config) / f"process-{jax.process_index()}"
            groups, arrays = [*itertools.chain(*self.groups)], self._stored_arrays(optimizer)
            self.store = InFiles(directory, groups, arrays, shards, self.place.split, self.place.join)

    def _stored_arrays(self, optimizer: Optimizer) -> StoredArrays:
        """The arrays of each parameter in files."""
        trained = self.plan.trained(self.plan.padded_shapes)
        state = TrainState(0, trained, jax.eval_shape(optimizer.rule.init, trained))
        trees = trees_of(state, self.plan.names)
        numbered = jax.tree_util.tree_leaves_with_path(
            with_trees(state, self.plan.names, [f"{number}" for number in range(len(trees))])
        )
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, x in numbered if isinstance(x, str)]
        dtypes = [{path: np.dtype(leaf.dtype) for path, leaf in leaves_by_path(tree).items()} for tree in trees]
        if not self.place.keeps_masters:
            dtypes[0] = {}
        return [*zip(names, dtypes, strict=True)]

    def hold(self, groups: tuple[Group, ...], trees: Trees) -> tuple[Tree, tuple]:
        """(weights, states) of whole parameters.  trees: masters and moments on devices."""
        masters, *moments = trees
        weights = jax.tree.map(lambda x: x.astype(self.dtype), masters)
        kept = (masters if self.place.keeps_masters else {}, *moments)
        states = []
        for group in groups:
            local = self.place.put(group, self._layers(kept, group))
            states.append(jax.block_until_ready(self.store.put(group, local)))
        return weights, tuple(states)

    def whole(self, number: int, weights: Tree, groups: tuple[Group, ...], states: tuple) -> Tree:
        """Masters, or the moments of this number, of whole parameters, on devices; see `hold`."""
        if number == 0 and not self.place.keeps_masters:
            return weights
        parts = []
        for group, state in zip(groups, states, strict=True):
            trees = self.place.fetch(group, self.store.fetch(state))
            parts.append(jax.block_until_ready(trees[number]))  # so that the rest of the group is gone before the next
        return parts[0] if len(parts) == 1 else jax.tree.map(self._concatenated, *parts)

    def _layers(self, trees: Trees, group: Group) -> Trees:
        if group.layers is None:
            return trees
        start, number = group.layers
        return jax.tree.map(lambda x: self._take_layers(_spec(x), number)(x, jnp.int32(start)), trees)

    def _concatenated(self, *parts: jax.Array) -> jax.Array:
        """The layers of each device's own parts of a stack, one part after the other."""
        return self._concatenate(_spec(parts[0]), len(parts))(*parts)

    @remembered
    def _take_layers(self, spec: P, number: int) -> Callable[..., jax.Array]:
        return self._jitted(lambda x, start: take_layers(x, (start, number)), (spec, P()), spec)

    @remembered
    def _concatenate(self, spec: P, parts: int) -> Callable[..., jax.Array]:
        return self._jitted(lambda *parts: jnp.concatenate(parts), (spec,) * parts, spec)

    def _jitted(self, body: Callable[..., jax.Array], in_specs: tuple[P, ...], spec: P) -> Callable[..., jax.Array]:
        return jax.jit(self.plan.partition(body, in_specs, spec), out_shardings=self.plan.sharding(spec))

    def update(self, state: TrainState, pending: PendingUpdate) -> TrainState:
        """The state after the update that the step left.  `state` is donated.

        Waits for each group before it starts on the one after the next, so that devices hold two at a time."""
        shared, params, grads = self.place.share(pending.shared), state.params, pending.grads
        done: list[Any] = []
        following = [*itertools.chain(*state.group_states)][1:]
        self.store.begin(state.step)
        for groups, states in zip(self.groups, state.group_states, strict=True):
            tree = groups[0].tree
            weights, of_groups = subset_of(params, tree), subset_of(grads, tree)
            for group, each in zip(groups, states, strict=True):
                jax.block_until_ready(done[-2:-1])
                local = self.store.fetch(each)
                self.store.read_ahead(*following[len(done) : len(done) + 1])
                weights, local = self.place.update(group, weights, local, of_groups, shared)
                done.append(self.store.put(group, local))
            params = merge(params, weights)
        self.store.commit()
        self.store.read_ahead(*done[:1])
        rest = iter(done)
        new = tuple(tuple(next(rest) for _ in groups) for groups in self.groups)
        return dataclasses.replace(state, params=params, group_states=new)


def offload_directory(config: RunConfig) -> Path:
    """optim.offload_dir, or its default."""
    given = config.optim.offload_dir
    return Path(given).expanduser().absolute() if given else config.run.directory.absolute() / "offload"


def _spec(x: jax.Array) -> P:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


def take_layers(tree: Tree, layers: tuple[Any, int]) -> Tree:
    """Entries of stacks.  layers: the first one, and their number."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, *layers), tree)


class DeviceUpdate:
    """Fetches a group's state from pinned host memory, updates it on the devices, and puts it back."""

    splits_stacks = True

    def __init__(self, plan: Plan, optimizer: Optimizer, dtype: jnp.dtype, shards: LocalShards):
        self.plan, self.optimizer, self.dtype, self.shards = plan, optimizer, dtype, shards
        masters = {leaf.dtype for leaf in jax.tree.leaves(plan.trained(plan.shapes))}
        self.keeps_masters = masters != {dtype}
        self._programs: dict[tuple, jax.stages.Wrapped] = {}

    def in_memory(self) -> InMemory:
        return InMemory(lambda local: moved(local, PINNED), lambda state: moved(state, DEVICE))

    def put(self, group: Group, trees: Trees) -> Trees:
        return trees

    def fetch(self, group: Group, local: Trees) -> Trees:
        return local

    def split(self, group: Group, local: Trees) -> list[Trees]:
        return self.shards.split(local, group)

    def join(self, group: Group, shards: list[Trees]) -> Trees:
        return self.shards.join(shards, group)

    def share(self, shared: Shared) -> Shared:
        return shared

    def update(self, group: Group, weights: Tree, local: Trees, grads: Tree, shared: Shared) -> tuple[Tree, Trees]:
        start, number = group.layers or (0, None)
        program = self.program(group.paths, number, len(local))
        return program(weights, local, grads, shared, jnp.int32(start))

    def program(self, paths: tuple[tuple[str, ...], ...], number: int | None, num_trees: int) -> jax.stages.Wrapped:
        """(weights, trees, gradients, shared, start) -> (weights, trees), compiled once for groups of one shape."""
        if (key := (paths, number)) not in self._programs:
            specs = subset_of(self.plan.param_specs, Group(paths, 0).tree)
            of_trees = (specs if self.keeps_masters else {}, *[specs] * (num_trees - 1))
            body = functools.partial(self._update, number=number)
            step = self.plan.partition(body, (specs, of_trees, specs, P(), P()), (specs, of_trees))
            shardings = self.plan.sharding((specs, of_trees))
            self._programs[key] = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings, keep_unused=True)
        return self._programs[key]

    def lower(self, group: Group, weights: Tree, trees: Trees, grads: Tree, shared: Shared) -> jax.stages.Lowered:
        number = group.layers and group.layers[1]
        if number is not None:
            layers = self.plan.layout.pipe * number
            trees = jax.tree.map(lambda x: x.update(shape=(layers, *x.shape[1:])), trees)
        first = jax.ShapeDtypeStruct((), jnp.int32)
        return self.program(group.paths, number, len(trees)).lower(weights, trees, grads, shared, first)

    def copied(self, weights: int, state: int, grads: int) -> dict[str, int]:
        return {"masters and moments to devices": state, "masters and moments to hosts": state}

    def _update(
        self, weights: Tree, trees: Trees, grads: Tree, shared: Shared, start: jax.Array, *, number: int | None
    ) -> tuple[Tree, Trees]:
        masks, part = trained_layers(self.plan, weights), weights
        if number is not None:
            masks, part, grads = take_layers((masks, weights, grads), (start, number))
        part, trees = updated(self.optimizer, self.plan, masks, part, trees, grads, shared, self.dtype)
        if number is None:
            return part, trees
        write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(write, weights, part), trees


def updated(
    optimizer: Optimizer,
    plan: Plan,
    masks: Tree,
    weights: Tree,
    trees: Trees,
    grads: Tree,
    shared: Shared,
    dtype: jnp.dtype,
) -> tuple[Tree, Trees]:
    """(weights in `dtype`, masters and moments) after the update of any shards of parameters.  weights: read only if
    there are no masters."""
    masters, *moments = trees
    params, keys = masters or weights, plan.names
    opt_state = with_trees(shared.opt_scalars, keys, moments)
    params, opt_state = optimizer.update(plan.names, masks, shared.scalars, params, opt_state, cast_like(grads, params))
    weights = jax.tree.map(lambda p: p.astype(dtype), params)
    return weights, (params if masters else {}, *trees_of(opt_state, keys))


class HostUpdate:
    """Keeps masters and moments in arrays of the host's processor, which updates them there.

    `local`: for each distinct shard that this process holds, the trees of that shard."""

    splits_stacks = False
    keeps_masters = True

    def __init__(self, plan: Plan, optimizer: Optimizer, dtype: jnp.dtype, shards: LocalShards):
        self.plan, self.dtype, self.shards = plan, dtype, shards
        try:
            self.cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            raise ConfigError(
                "optim.offload_update=host: jax has no CPU backend here. Add cpu to JAX_PLATFORMS, or use "
                "optim.offload_update=device."
            ) from None

        def update(masks: Tree, trees: Trees, grads: Tree, shared: Shared) -> tuple[Tree, Trees]:
            return updated(optimizer, plan, masks, {}, trees, grads, shared, dtype)

        self._update = jax.jit(update, donate_argnums=1)

    def in_memory(self) -> InMemory:
        return InMemory(lambda local: local, lambda state: state)

    def put(self, group: Group, trees: Trees) -> list[Trees]:
        return self.shards.split(trees, group, self._copied)

    def fetch(self, group: Group, local: list[Trees]) -> Trees:
        return self.shards.join(local, group)

    def split(self, group: Group, local: list[Trees]) -> list[Trees]:
        return local

    def join(self, group: Group, shards: list[Trees]) -> list[Trees]:
        return jax.tree.map(self._copied, shards)

    def share(self, shared: Shared) -> Shared:
        return jax.tree.map(lambda x: self._copied(x.addressable_shards[0].data), shared)

    def update(
        self, group: Group, weights: Tree, local: list[Trees], grads: Tree, shared: Shared
    ) -> tuple[Tree, list[Trees]]:
        of_shards = self.shards.split((grads,), group, self._copied)
        new = [
            self._update(self._masks(group, number, of_shard), trees, of_shard, shared)
            for number, (trees, (of_shard,)) in enumerate(zip(local, of_shards, strict=True))
        ]
        (weights,) = self.shards.join([(weights,) for weights, _ in new], group)
        return weights, [trees for _, trees in new]

    def lower(self, group: Group, weights: Tree, trees: Trees, grads: Tree, shared: Shared) -> None:
        return None

    def copied(self, weights: int, state: int, grads: int) -> dict[str, int]:
        return {"gradients to hosts": grads, "weights to devices": weights}

    def _masks(self, group: Group, number: int, tree: Tree) -> Tree:
        """Masks as from `trained_layers`, for the n-th distinct shards."""
        masks = {}
        for path, frozen in leaves_by_path(subset_of(self.plan.frozen, tree)).items():
            if frozen.any():
                bounds = self.shards.distinct(path, group)[number]
                in_order = interleave(~frozen, 0, self.plan.chunks, self.plan.layout.pipe)[slice(*bounds[0])]
                masks[path] = in_order.reshape(-1, *(1,) * (len(bounds) - 1))
        return unflatten_dict(masks, sep=".")

    def _copied(self, x: jax.Array) -> jax.Array:
        return copied(x, self.cpu)
