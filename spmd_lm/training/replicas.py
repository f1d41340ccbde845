"""Checks that copies of replicated arrays are equal, bit for bit: a faulty device changes its own copies, which may
show neither in the loss nor in a norm."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from spmd_lm.errors import ReplicaError
from spmd_lm.parallel.fingerprint import fingerprint
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.runtime.processes import allgather_objects
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState


class ReplicaCheck:
    """Compares the copies of every leaf of a program's state."""

    def __init__(self, program: Program):
        self._mesh, self._specs = program.plan.mesh, jax.tree.map(lambda s: s.spec, program.state_shardings)
        self._plan = program.plan
        self._shapes = {path: leaf.shape for path, leaf in leaves_by_path(program.abstract_state()).items()}
        self._axes = {path: _axes_of(spec) for path, spec in leaves_by_path(self._specs).items()}

    def has_copies(self) -> bool:
        """True if a leaf that is not a scalar has copies on several devices."""
        sizes = self._mesh.shape
        sharded = [axes for path, axes in self._axes.items() if self._shapes[path]]
        return any(math.prod(sizes[axis] for axis in sizes if axis not in axes) > 1 for axes in sharded)

    @functools.cached_property
    def _fingerprints(self) -> Callable[[TrainState], jax.Array]:
        """uint32 [*mesh, leaves, 2], fingerprints of each device's own shards."""
        names = self._mesh.axis_names

        def own(state: TrainState) -> jax.Array:
            prints = jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(state)])
            return prints.reshape((1,) * len(names) + prints.shape)

        return jax.jit(self._plan.shard_map(own, (self._specs,), P(*names)))

    def check(self, state: TrainState, step: int) -> None:
        """Raises ReplicaError, in all processes of the job, naming leaves and devices."""
        found = self._fingerprints(state.on_device)
        own = [([axis.start or 0 for axis in shard.index], shard.data.tolist()) for shard in found.addressable_shards]
        prints = np.zeros(found.shape, np.uint32)
        for shards in allgather_objects(f"replicas {step}", own):
            for start, values in shards:
                prints[tuple(start[: self._mesh.devices.ndim])] = np.squeeze(values)
        if problems := [*self._differences(prints)]:
            raise ReplicaError(
                f"step {step}: copies differ: {abbreviate(problems)}. A device computed or remembered wrongly. Train "
                "again: it resumes from the last checkpoint."
            )

    def _differences(self, prints: np.ndarray) -> Iterator[str]:
        """'LEAF on DEVICES' for devices that differ from the majority; for all if there is no majority."""
        dims = {axis: dim for dim, axis in enumerate(self._mesh.axis_names)}
        for number, (path, axes) in enumerate(self._axes.items()):
            sharded = [dims[axis] for axis in axes]
            copies = [dim for dim in dims.values() if dim not in sharded]
            order = (*sharded, *copies)
            count = math.prod(self._mesh.devices.shape[dim] for dim in copies)
            values = prints[..., number, :].transpose(*order, prints.ndim - 2).reshape(-1, count, 2)
            devices = self._mesh.devices.transpose(order).reshape(-1, count)
            for row, owners in zip(values, devices, strict=True):
                copies_of = [tuple(value) for value in row.tolist()]
                (most, times), *others = Counter(copies_of).most_common()
                if others:
                    suspects = owners if 2 * times <= count else owners[[value != most for value in copies_of]]
                    yield f"{path} on {', '.join(map(str, suspects))}"


def _axes_of(spec: P) -> set[str]:
    """Mesh axes that shard an array."""
    return {axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)}
