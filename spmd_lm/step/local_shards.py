"""The distinct shards that this process's devices hold of parameters, or of layers of a stack, and where each lies in
the canonical arrays."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from spmd_lm.parallel.array_parts import Bounds, local_bounds
from spmd_lm.parallel.groups import Group
from spmd_lm.parallel.plan import Plan, interleave
from spmd_lm.parallel.trees import Tree, leaves_by_path

Trees = tuple[Tree, ...]
"""Trees like some of the parameters: their masters, {} if the devices' weights are the masters, and their moments."""


class LocalShards:
    """Shards of groups' arrays.  Each device's part of a stack has the group's layers alone."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._shapes = {path: leaf.shape for path, leaf in leaves_by_path(plan.padded_shapes).items()}
        self._canonical_shapes = {path: leaf.shape for path, leaf in leaves_by_path(plan.shapes).items()}
        self._shardings = leaves_by_path(plan.sharding(plan.param_specs))
        self.of_devices = functools.cache(self._of_devices)

    def shape(self, path: str, group: Group) -> tuple[int, ...]:
        """The array's shape: padded, of the group's layers alone."""
        whole = self._shapes[path]
        return whole if group.layers is None else (self.plan.layout.pipe * group.layers[1], *whole[1:])

    def _of_devices(self, path: str, group: Group) -> dict[jax.Device, Bounds]:
        """The part of an array that each device of this process holds."""
        return local_bounds(self.shape(path, group), self._shardings[path])

    def distinct(self, path: str, group: Group) -> tuple[Bounds, ...]:
        return tuple(dict.fromkeys(self.of_devices(path, group).values()))

    def split(
        self, trees: Trees, group: Group, copy: Callable[[jax.Array], jax.Array] = lambda x: x
    ) -> list[tuple[Tree, ...]]:
        """The n-th entry has trees of the n-th distinct shard of each array, on one device each."""
        of_trees = (self._split(tree, group, copy) for tree in trees)
        return [*itertools.zip_longest(*of_trees, fillvalue={})]

    def _split(self, tree: Tree, group: Group, copy: Callable[[jax.Array], jax.Array]) -> list[Tree]:
        found: list[dict[str, jax.Array]] = []
        for path, x in leaves_by_path(tree).items():
            numbers = {bounds: number for number, bounds in enumerate(self.distinct(path, group))}
            found += [{} for _ in range(len(found), len(numbers))]
            for shard in x.addressable_shards:
                number = numbers[self.of_devices(path, group)[shard.device]]
                if path not in found[number]:
                    found[number][path] = copy(shard.data)
        return [unflatten_dict(each, sep=".") for each in found]

    def join(self, shards: Sequence[Trees], group: Group) -> Trees:
        """The inverse of `split`, from copies of these arrays."""
        return tuple(self._join(each, group) for each in zip(*shards, strict=True))

    def _join(self, shards: Sequence[Tree], group: Group) -> Tree:
        by_path: dict[str, list] = defaultdict(list)
        for tree in shards:
            for path, x in leaves_by_path(tree).items():
                by_path[path].append(x)
        arrays = {}
        for path, each in by_path.items():
            of_bounds = dict(zip(self.distinct(path, group), each, strict=True))
            of_devices = self.of_devices(path, group).items()
            local = [copied(of_bounds[bounds], device) for device, bounds in of_devices]
            shape, sharding = self.shape(path, group), self._shardings[path]
            arrays[path] = jax.make_array_from_single_device_arrays(shape, sharding, local)
        return unflatten_dict(arrays, sep=".")

    def canonical_shape(self, path: str) -> tuple[int, ...]:
        return self._canonical_shapes[path]

    def canonical_parts(self, path: str, group: Group, bounds: Bounds) -> Iterator[tuple[tuple[slice, ...], Bounds]]:
        """Parts of a shard: where they are in it, and in the canonical array.  Padding is in none of them."""
        shape, (outer, *inner) = self._canonical_shapes[path], bounds
        kept = [(start, min(stop, size)) for (start, stop), size in zip(inner, shape[1:], strict=True)]
        if any(start >= stop for start, stop in kept):
            return
        rest = tuple(slice(stop - start) for start, stop in kept)
        for first, entries in self._runs(path, group, outer, shape[0]):
            yield (slice(first, first + len(entries)), *rest), ((entries[0], entries[-1] + 1), *kept)

    def _runs(self, path: str, group: Group, outer: tuple[int, int], size: int) -> Iterator[tuple[int, list[int]]]:
        """Runs of consecutive canonical entries in a shard's first dimension, each with its place in the shard."""
        places = np.arange(*outer)
        if path in self._stacks:
            stages, layers = self.plan.layout.pipe, self._shapes[path][0]
            in_order = interleave(np.arange(layers), 0, self.plan.chunks, stages)
            start, number = group.layers or (0, layers // stages)
            places = in_order[places // number * (layers // stages) + start + places % number]
        places = places[places < size]
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        for first, run in zip([0, *breaks.tolist()], np.split(places, breaks), strict=True):
            if len(run):
                yield first, run.tolist()

    @functools.cached_property
    def _stacks(self) -> set[str]:
        return {".".join(each.path) for each in self.plan.parameters if each.names[0] == "layers"}


def copied(x: jax.Array | np.ndarray, device: jax.Device) -> jax.Array:
    """A copy: what is given away later must not be an alias where devices are the host's processor."""
    return jax.device_put(x, device, may_alias=False)
