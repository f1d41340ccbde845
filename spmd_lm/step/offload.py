"""The optimizer's state of matrices outside of the devices' memory, and its update, group by group, after the step.

The devices keep a copy of the weights in the compute dtype.  `DeviceUpdate` updates a group on the devices, while the
next one is on its way to them.  `HostUpdate` brings gradients to the host, whose processor updates masters and moments,
and sends weights back (ZeRO-Offload, arXiv:2101.06840)."""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.groups import Group, groups_of, offloaded, weight_dtype
from spmd_lm.parallel.host_memory import DEVICE, PINNED, moved
from spmd_lm.parallel.plan import Plan, interleave
from spmd_lm.parallel.shards import Bounds, local_bounds
from spmd_lm.parallel.trees import Tree, cast_like, leaves_by_path, merge, subset_of
from spmd_lm.step.optimizer import Optimizer, PendingUpdate, Shared, trained_layers
from spmd_lm.step.state import TrainState, trees_of, with_trees

Trees = tuple[Tree, ...]
"""Trees like some of the parameters: their masters, {} if the devices' weights are the masters, and their moments."""


class Place(Protocol):
    """Where groups are updated.  `state`: a group's `Trees` between steps, in a form of the place's own."""

    splits_stacks: bool
    keeps_masters: bool

    def put(self, trees: Trees) -> Any:
        """The state, from arrays on devices."""

    def fetch(self, state: Any) -> Trees:
        """Arrays on devices, from the state."""

    def share(self, shared: Shared) -> Shared:
        """The arguments, where `update` reads them."""

    def update(self, group: Group, weights: Tree, state: Any, grads: Tree, shared: Shared) -> tuple[Tree, Any]:
        """(weights on devices, state) after the update.  All arguments but `grads` and `shared` are donated."""


class Offload:
    """The offloaded part of a program's state.

    A state's field `offloaded` has a tuple for each entry of `groups`, with the state of each of its groups."""

    def __init__(self, config: RunConfig, plan: Plan, optimizer: Optimizer):
        self.plan, p = plan, config.precision
        self.dtype = jnp.dtype(weight_dtype(p.compute, p.params))
        self.tree = optimizer.offloaded(plan)
        place = HostUpdate if config.optim.offload_update == "host" else DeviceUpdate
        self.place: Place = place(plan, optimizer, self.dtype)
        self.groups = groups_of(offloaded(plan), plan.layout.pipe, split=self.place.splits_stacks)

    def trees(self) -> list[Tree]:
        """The parameters of each entry of `groups`, as nested dicts for `subset_of`."""
        return [groups[0].tree for groups in self.groups]

    def hold(self, groups: tuple[Group, ...], trees: Trees) -> tuple[Tree, tuple]:
        """(weights, states) of whole parameters.  trees: masters and moments on devices."""
        masters, *moments = trees
        weights = jax.tree.map(lambda x: x.astype(self.dtype), masters)
        kept = (masters if self.place.keeps_masters else {}, *moments)
        return weights, tuple(self.place.put(self._layers(kept, group)) for group in groups)

    def whole(self, weights: Tree, states: tuple) -> Trees:
        """The inverse of `hold`: masters and moments of whole parameters, on devices."""
        parts = [self.place.fetch(state) for state in states]
        masters, *moments = parts[0] if len(parts) == 1 else self._joined(parts)
        return masters or weights, *moments

    def _layers(self, trees: Trees, group: Group) -> Trees:
        if group.layers is None:
            return trees
        specs = jax.tree.map(lambda x: x.sharding.spec, trees)
        body = functools.partial(take_layers, layers=group.layers)
        return jax.jit(self.plan.partition(body, (specs,), specs), out_shardings=self.plan.sharding(specs))(trees)

    def _joined(self, parts: list[Trees]) -> Trees:
        specs = jax.tree.map(lambda x: x.sharding.spec, parts[0])

        def join(*parts: Trees) -> Trees:
            return jax.tree.map(lambda *each: jnp.concatenate(each), *parts)

        body = self.plan.partition(join, (specs,) * len(parts), specs)
        return jax.jit(body, out_shardings=self.plan.sharding(specs))(*parts)

    def update(self, state: TrainState, pending: PendingUpdate) -> TrainState:
        """The state after the update that the step left.  `state` is donated.

        Waits for each group before it starts on the one after the next, so that devices hold two at a time."""
        shared, params, grads = self.place.share(pending.shared), state.params, pending.grads
        done: list[Any] = []
        for groups, states in zip(self.groups, state.offloaded, strict=True):
            tree = groups[0].tree
            weights, of_groups = subset_of(params, tree), subset_of(grads, tree)
            for group, each in zip(groups, states, strict=True):
                jax.block_until_ready(done[-2:-1])
                weights, new = self.place.update(group, weights, each, of_groups, shared)
                done.append(new)
            params = merge(params, weights)
        rest = iter(done)
        offloaded = tuple(tuple(next(rest) for _ in groups) for groups in self.groups)
        return dataclasses.replace(state, params=params, offloaded=offloaded)


def take_layers(tree: Tree, layers: tuple[Any, int]) -> Tree:
    """Entries of stacks.  layers: the first one, and their number."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, *layers), tree)


class DeviceUpdate:
    """Fetches a group's state from pinned host memory, updates it on the devices, and puts it back."""

    splits_stacks = True

    def __init__(self, plan: Plan, optimizer: Optimizer, dtype: jnp.dtype):
        self.plan, self.optimizer, self.dtype = plan, optimizer, dtype
        masters = {leaf.dtype for leaf in jax.tree.leaves(plan.trained(plan.shapes))}
        self.keeps_masters = masters != {dtype}
        self._programs: dict[tuple, jax.stages.Wrapped] = {}

    def put(self, trees: Trees) -> Trees:
        return moved(trees, PINNED)

    def fetch(self, state: Trees) -> Trees:
        return moved(state, DEVICE)

    def share(self, shared: Shared) -> Shared:
        return shared

    def update(self, group: Group, weights: Tree, state: Trees, grads: Tree, shared: Shared) -> tuple[Tree, Trees]:
        start, number = group.layers or (0, None)
        program = self.program(group.paths, number, len(state))
        weights, trees = program(weights, self.fetch(state), grads, shared, jnp.int32(start))
        return weights, self.put(trees)

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
        """The program of a group.  Arguments: shapes, dtypes and shardings; `trees`: of whole parameters."""
        number = group.layers and group.layers[1]
        if number is not None:
            layers = self.plan.layout.pipe * number
            trees = jax.tree.map(lambda x: x.update(shape=(layers, *x.shape[1:])), trees)
        first = jax.ShapeDtypeStruct((), jnp.int32)
        return self.program(group.paths, number, len(trees)).lower(weights, trees, grads, shared, first)

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

    A state is a list of trees: the n-th has the n-th distinct shard of each array that this process holds."""

    splits_stacks = False
    keeps_masters = True

    def __init__(self, plan: Plan, optimizer: Optimizer, dtype: jnp.dtype):
        self.plan, self.dtype = plan, dtype
        try:
            self.cpu = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            raise ConfigError(
                "optim.offload_update=host: jax has no CPU backend here. Add cpu to JAX_PLATFORMS, or use "
                "optim.offload_update=device."
            ) from None
        shardings = leaves_by_path(plan.sharding(plan.param_specs))
        shapes = {path: leaf.shape for path, leaf in leaves_by_path(plan.padded_shapes).items()}
        self._like = {path: (shapes[path], sharding) for path, sharding in shardings.items()}

        def update(masks: Tree, trees: Trees, grads: Tree, shared: Shared) -> tuple[Tree, Trees]:
            return updated(optimizer, plan, masks, {}, trees, grads, shared, dtype)

        self._update = jax.jit(update, donate_argnums=1)

    def put(self, trees: Trees) -> list[Trees]:
        return [*zip(*map(self._shards, trees), strict=True)]

    def fetch(self, state: list[Trees]) -> Trees:
        return tuple(map(self._arrays, zip(*state, strict=True)))

    def share(self, shared: Shared) -> Shared:
        return jax.tree.map(lambda x: self._copy(x.addressable_shards[0].data, self.cpu), shared)

    def update(
        self, group: Group, weights: Tree, state: list[Trees], grads: Tree, shared: Shared
    ) -> tuple[Tree, list[Trees]]:
        new = [
            self._update(self._masks(number, of_shard), trees, of_shard, shared)
            for number, (trees, of_shard) in enumerate(zip(state, self._shards(grads), strict=True))
        ]
        return self._arrays([weights for weights, _ in new]), [trees for _, trees in new]

    def _shards(self, tree: Tree) -> list[Tree]:
        """The distinct shards of arrays on devices, on the host."""
        found: list[dict[str, jax.Array]] = []
        for path, x in leaves_by_path(tree).items():
            numbers = {bounds: number for number, bounds in enumerate(self._distinct(path))}
            found += [{} for _ in range(len(found), len(numbers))]
            for shard in x.addressable_shards:
                number = numbers[self._bounds[path][shard.device]]
                if path not in found[number]:
                    found[number][path] = self._copy(shard.data, self.cpu)
        return [unflatten_dict(each, sep=".") for each in found]

    def _arrays(self, shards: Sequence[Tree]) -> Tree:
        """The inverse of `_shards`."""
        by_path: dict[str, list[jax.Array]] = defaultdict(list)
        for tree in shards:
            for path, x in leaves_by_path(tree).items():
                by_path[path].append(x)
        arrays = {}
        for path, distinct in by_path.items():
            shape, sharding = self._like[path]
            of_bounds = dict(zip(self._distinct(path), distinct, strict=True))
            local = [self._copy(of_bounds[bounds], device) for device, bounds in self._bounds[path].items()]
            arrays[path] = jax.make_array_from_single_device_arrays(shape, sharding, local)
        return unflatten_dict(arrays, sep=".")

    def _masks(self, number: int, tree: Tree) -> Tree:
        """Masks as from `trained_layers`, for the n-th distinct shards."""
        masks = {}
        for path, frozen in leaves_by_path(subset_of(self.plan.frozen, tree)).items():
            if frozen.any():
                bounds = self._distinct(path)[number]
                in_order = interleave(~frozen, 0, self.plan.chunks, self.plan.layout.pipe)[slice(*bounds[0])]
                masks[path] = in_order.reshape(-1, *(1,) * (len(bounds) - 1))
        return unflatten_dict(masks, sep=".")

    @functools.cached_property
    def _bounds(self) -> dict[str, dict[jax.Device, Bounds]]:
        """By path: the shard of the parameter that each device of this process holds."""
        return {path: local_bounds(shape, sharding) for path, (shape, sharding) in self._like.items()}

    def _distinct(self, path: str) -> list[Bounds]:
        """The distinct shards of a parameter, in the order of a state's trees."""
        return [*dict.fromkeys(self._bounds[path].values())]

    @staticmethod
    def _copy(x: jax.Array, device: jax.Device) -> jax.Array:
        """A copy, never an alias, even if the devices are the host's processor: it may be donated."""
        return jax.device_put(x, device, may_alias=False)
