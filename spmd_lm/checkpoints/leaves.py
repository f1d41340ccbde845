"""Shapes and dtypes of a checkpoint's arrays, by path, and how those of two states differ."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import SingleDeviceSharding

from spmd_lm.checkpoints.record import CheckpointRecord
from spmd_lm.errors import CheckpointError
from spmd_lm.files import memory_bytes
from spmd_lm.parallel.trees import Tree
from spmd_lm.runtime.formatting import abbreviate, format_bytes, pluralize

Shapes = dict[str, jax.ShapeDtypeStruct]  # by path, as in 'blocks.attention.query'

MAX_LINES = 50  # about differences between states


def present_fields(state: Tree) -> dict[str, Tree]:
    """A state's fields without the Nones, which orbax would also write, and require on restore."""
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
    """Restore target for one leaf; CheckpointError if it exceeds this host's memory."""
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


def moment_of(path: str) -> str:
    """The parameter of an optimizer moment: head.norm.scale for opt_state.mu.head.norm.scale; '' for other paths."""
    field, *rest = path.split(".", 2)
    return rest[1] if field == "opt_state" and len(rest) == 2 else ""


def changed_moments(saved: Shapes, expected: Shapes) -> tuple[list[str], list[str]]:
    """(new, unread): parameters unfrozen since `saved`, with moments only in `expected`; and parameters frozen since,
    only in `saved`.  Both empty if the optimizers keep different moments, or a state has only some of a parameter's."""
    parameters = {path.removeprefix("params.") for path in saved.keys() & expected.keys() if path.startswith("params.")}
    then, now = ([path for path in shapes if moment_of(path) in parameters] for shapes in (saved, expected))
    trees, others = ({path.removesuffix(moment_of(path)) for path in each} for each in (then, now))
    new, unread = ([path for path in each if path not in other] for each, other in ((now, then), (then, now)))
    names = [[*dict.fromkeys(map(moment_of, each))] for each in (new, unread)]
    is_whole = len(new + unread) == len(trees) * len(names[0] + names[1])
    return (names[0], names[1]) if trees == others and is_whole else ([], [])


def describe_moments(new: list[str], unread: list[str]) -> Iterator[str]:
    """Sentences about the result of `changed_moments`."""
    if new:
        what = f"the moments of {pluralize(len(new), 'newly trained parameter')}"
        yield f"{what} start at zero, while the step count for bias correction goes on: {abbreviate(new)}"
    if unread:
        what = f"the moments of {pluralize(len(unread), 'frozen parameter')}"
        yield f"{what} are neither read nor kept: {abbreviate(unread)}"
