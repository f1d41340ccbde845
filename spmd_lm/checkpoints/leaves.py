"""The arrays of a state, as a checkpoint has them: by path, in canonical shapes; and how two such states differ."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import SingleDeviceSharding

from spmd_lm.checkpoints.record import CheckpointRecord
from spmd_lm.errors import CheckpointError
from spmd_lm.files import memory_bytes
from spmd_lm.parallel.trees import Tree
from spmd_lm.runtime.formatting import format_bytes

Shapes = dict[str, jax.ShapeDtypeStruct]  # by path, as in 'blocks.attention.query'

MAX_LINES = 50  # of differences between states


def present_fields(state: Tree) -> dict[str, Tree]:
    """A state's fields without those that are None: orbax would write these too, and require them on restore."""
    if isinstance(state, dict):
        return state
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return {name: value for name, value in fields.items() if value is not None}


def abstract_array(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def canonical_array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))


def saved_shapes(record: CheckpointRecord) -> Shapes:
    return {path: canonical_array(tuple(leaf.shape), leaf.dtype) for path, leaf in record.leaves.items()}


def one_leaf(record: CheckpointRecord, path: str) -> dict[str, Tree]:
    """CheckpointError if it is larger than this host's memory."""
    memory = memory_bytes()
    if (size := record.leaves[path].size) > memory:
        what = f"{format_bytes(size)}, more than the {format_bytes(memory)} of memory here"
        raise CheckpointError(f"step {record.step}: {path} has {what}. Read it on a larger host.")
    leaf, device = record.leaves[path], SingleDeviceSharding(jax.devices()[0])
    return unflatten_dict({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)}, sep=".")


def compare_shapes(saved: Shapes, expected: Shapes) -> list[str]:
    def show(leaf: jax.ShapeDtypeStruct | None) -> str:
        return "nothing" if leaf is None else f"{leaf.dtype}{[*leaf.shape]}"

    names = sorted({name for name, _ in saved.items() ^ expected.items()})
    lines = [f"  {name}: saved {show(saved.get(name))}, expected {show(expected.get(name))}" for name in names]
    return lines[:MAX_LINES] + [f"  and {len(lines) - MAX_LINES} more"] * (len(lines) > MAX_LINES)
