"""The rules under which a model is traced: which mesh axes shard each named dimension of its activations.

A model names the dimensions of its arrays, `heads` or `vocab`, and never mentions devices.  The code that traces it
sets the rules once, with `use_axis_rules`.  Without rules nothing is sharded, and the same code runs on one device
without a mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from spmd_lm.errors import LayoutError


def is_spec(x: Any) -> bool:
    """True for a PartitionSpec, a leaf of a tree, rather than a container of more nodes."""
    return isinstance(x, P)


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """The mesh axes that shard each named dimension of activations.

    rules: all names that a model may use; another name is a mistake, not an unsharded dimension.
    sizes: number of devices along each mesh axis.
    ring: whether keys and values travel where `time` is sharded; else each device attends with some heads.
    zigzag: whether a device has two chunks of a row, one from each end, where `time` is sharded.
    with_gathered: gathers, for a function of the model, parameters sharded further between uses
      (parallel/own_mesh.py)."""

    rules: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    ring: bool = False
    zigzag: bool = False
    with_gathered: Callable[..., Callable] | None = None

    def axes(self, name: str | None) -> tuple[str, ...]:
        if name is not None and name not in self.rules:
            way = f"rules = {{'{name}': None}}, or in a loop of your own spmd_lm.axis_rules({name}=None, ...)"
            raise LayoutError(f"no rule places the dimension '{name}'. Give its module {way}.")
        return () if name is None else tuple(self.rules[name])

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((frozenset(self.rules.items()), frozenset(self.sizes.items())))


use_axis_rules = jax.make_user_context()
"""A context of AxisRules, or None: `with use_axis_rules(rules):` traces under them.  jax.jit retraces for others."""


def axis_rules() -> AxisRules | None:
    """The rules of this context.  Raises LayoutError where arrays are global and there are none."""
    rules: AxisRules | None = use_axis_rules.value
    if rules is None and jax.sharding.get_abstract_mesh().explicit_axes:
        raise LayoutError(
            "there are no rules: trace the model, and what differentiates it, inside of `with spmd_lm.axis_rules(...)`."
        )
    return rules


def active_axes(name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that shard `name`: a single device needs no collective."""
    rules = axis_rules()
    return () if rules is None else tuple(a for a in rules.axes(name) if rules.sizes[a] > 1)


def num_shards(name: str) -> int:
    """Number of shards of the dimension `name`."""
    rules = axis_rules()
    return math.prod(rules.sizes[a] for a in active_axes(name)) if rules else 1


def partition_spec(*names: str | None, unreduced: Sequence[str] = ()) -> P:
    """PartitionSpec of an array with these dimensions.  unreduced: names over whose shards it is a partial sum."""
    addends = {axis for name in unreduced for axis in active_axes(name)}
    return P(*(active_axes(name) if name else None for name in names), unreduced=addends)
