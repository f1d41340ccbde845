"""The names of mesh axes and of array dimensions, and what the axes divide.

A new kind of parallelism is an axis here, rows of the tables in parallel/rules.py, and what docs/extending.md lists.
Imports no jax: configurations are checked without it."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

# pipe: pipeline stages.  data: shards of the batch; replica: copies of such a group (HSDP).  expert: further shards of
# the batch, with different experts.  context: shards of each row's tokens.  model: shards of a layer.
PIPE, REPLICA, DATA, EXPERT, CONTEXT, MODEL = MESH_AXES = ("pipe", "replica", "data", "expert", "context", "model")
OPTIONAL_AXES = (EXPERT, CONTEXT)
"""Axes that are on a mesh only if they have several devices."""
BATCH_AXES = (REPLICA, DATA, EXPERT)
"""Axes that divide the rows of a batch."""
TOKEN_AXES = (*BATCH_AXES, CONTEXT)
"""Axes that divide the tokens of a batch: losses, loss weights and gradients are summed over them."""
ZERO_AXES = (DATA, EXPERT, CONTEXT)
"""Axes over which ZeRO shards parameters and moments between steps; within a step each device uses whole parameters.
Experts, which `expert` shards already, are sharded over the others alone."""
OUTERMOST_FIRST = (REPLICA, DATA, EXPERT, PIPE, CONTEXT, MODEL)
"""The order in which a mesh numbers its devices.  Links between neighbours are fastest: `model` is innermost, because
every layer waits for its collectives."""

DimNames = tuple[str | None, ...]
"""The names of one array's dimensions, outermost first; None is a dimension that is never sharded."""

SEQUENCE, TIME = "sequence", "time"
"""Dimension 1 of the residual stream, [batch, sequence, width]; between the two linears of a branch it is `time`, with
all of a device's tokens of the row: the whole row, unless `context` divides it.  `sequence` is a shard of these."""

SHARDED_DIM, ZERO_WIDTH = "width", "zero_width"
"""The dimension that ZeRO shards, and its name where it is sharded."""
ZERO_DIMS = {SHARDED_DIM: ZERO_WIDTH, "width_bytes": "zero_width_bytes", "width_blocks": "zero_width_blocks"}
"""Sharded names of all such dimensions: quantized matrices have widths in bytes (of two entries) and in blocks."""
EXPERTS, EXPERT_ZERO_DIMS = "experts", {SHARDED_DIM: "expert_zero_width"}
"""The dimension of a stack of experts, and the sharded name of their `width`."""


def is_dim_names(x: Any) -> bool:
    """True for an array's dimension names, a leaf of a tree, rather than a container of more nodes."""
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


@functools.cache
def sharded_names(names: DimNames) -> DimNames:
    """The dimension names of a parameter as ZeRO shards it.  A vector's are unchanged."""
    sharded = EXPERT_ZERO_DIMS if EXPERTS in names else ZERO_DIMS
    return tuple(sharded.get(name or "", name) for name in names) if is_matrix(names) else names


def is_matrix(names: DimNames) -> bool:
    """True for a matrix or a table, or a stack of them; false for biases and norms."""
    return len([name for name in names if name not in ("layers", EXPERTS)]) > 1


def axis_of(name: str) -> str:
    """The entry of MESH_AXES that a mesh axis belongs to: `data` for data, data0 and data1."""
    return name.rstrip("0123456789")


def mesh_axes_of(axis: str, mesh_axes: Iterable[str]) -> tuple[str, ...]:
    """The mesh axes that make up `axis`: itself, or on a TPU's torus several, such as data0 and data1."""
    return tuple(name for name in mesh_axes if axis_of(name) == axis)


def as_tuple(partition: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    return () if partition is None else (partition,) if isinstance(partition, str) else partition


def devices_along(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Number of devices along these axes together.  sizes: those of all axes of the mesh."""
    return math.prod(sizes.get(axis, 1) for axis in axes)
