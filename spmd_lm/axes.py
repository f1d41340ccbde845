"""The names of mesh axes and of array dimensions, and the rules from one to the other.

A model names the dimensions of its arrays, `heads` or `vocab`, and never speaks of devices.  `AxisRules` say which mesh
axes shard each name; whoever traces a model sets them once, with `use_axis_rules`.  Without rules every array is whole,
and the same code runs on one device without a mesh."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

# pipe: stages of layers.  data: parts of the batch, over which ZeRO shards; replica: copies of such a group (HSDP).
PIPE, REPLICA, DATA, MODEL = MESH_AXES = ("pipe", "replica", "data", "model")
BATCH_AXES = (REPLICA, DATA)

DimNames = tuple[str | None, ...]
"""The names of one array's dimensions, outermost first; None is a dimension that is never sharded."""

SEQUENCE = "sequence"
"""Dimension 1 of the residual stream, [batch, sequence, width]; in shapes `time` is all of it, on every device."""


def is_dim_names(x: Any) -> bool:
    """Whether a node of a tree is an array's dimension names (a leaf) rather than a container of more nodes."""
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which mesh axes shard each name of an activation's dimension, and how many devices lie along each axis.

    `rules` lists every name that a model may use; a name that is not in it is a mistake, not a whole dimension."""

    rules: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def axes(self, name: str | None) -> tuple[str, ...]:
        return () if name is None else tuple(self.rules[name])


_axis_rules: contextvars.ContextVar[AxisRules | None] = contextvars.ContextVar("axis_rules", default=None)


@contextlib.contextmanager
def use_axis_rules(rules: AxisRules | None) -> Iterator[None]:
    """Trace the body under `rules`."""
    token = _axis_rules.set(rules)
    try:
        yield
    finally:
        _axis_rules.reset(token)


def has_axis_rules() -> bool:
    return _axis_rules.get() is not None


def nontrivial_axes(name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that shard `name`: a collective over one device is none."""
    rules = _axis_rules.get()
    return () if rules is None else tuple(a for a in rules.axes(name) if rules.sizes[a] > 1)


def num_shards(name: str) -> int:
    """How many shards the dimension `name` has."""
    rules = _axis_rules.get()
    return math.prod(rules.sizes[a] for a in nontrivial_axes(name)) if rules else 1
