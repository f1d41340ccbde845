"""The rules under which a model is traced: which mesh axes shard each named dimension of its activations.

A model names the dimensions of its arrays, `heads` or `vocab`, and never speaks of devices.  Whoever traces it sets the
rules once, with `use_axis_rules`.  Without rules every array is whole, and the same code runs on one device without a
mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from spmd_lm.errors import LayoutError


def is_spec(x: Any) -> bool:
    """Whether a node of a tree is a PartitionSpec (a leaf) rather than a container of more nodes."""
    return isinstance(x, P)


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which mesh axes shard each name of an activation's dimension, and how many devices lie along each axis.

    `rules` lists every name that a model may use; a name that is not in it is a mistake, not a whole dimension.
    with_gathered: where parameters are sharded over more axes between their uses, what gathers them for a function of
    the model, as parallel/own_mesh.py has it."""

    rules: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
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
"""A context of AxisRules, or None: `with use_axis_rules(rules):` traces under them.  jax.jit traces again what it has
traced under other rules."""


def axis_rules() -> AxisRules | None:
    """The rules of this context.  Raises LayoutError where arrays are global and there are none."""
    rules: AxisRules | None = use_axis_rules.value
    if rules is None and jax.sharding.get_abstract_mesh().explicit_axes:
        raise LayoutError(
            "there are no rules: trace the model, and what differentiates it, inside of `with spmd_lm.axis_rules(...)`."
        )
    return rules


def nontrivial_axes(name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that shard `name`: a collective over one device is none."""
    rules = axis_rules()
    return () if rules is None else tuple(a for a in rules.axes(name) if rules.sizes[a] > 1)


def num_shards(name: str) -> int:
    """How many shards the dimension `name` has."""
    rules = axis_rules()
    return math.prod(rules.sizes[a] for a in nontrivial_axes(name)) if rules else 1


def partition_spec(*names: str | None, unreduced: Sequence[str] = ()) -> P:
    """How an array of these dimensions is sharded.  unreduced: names over whose shards addends of it lie."""
    addends = {axis for name in unreduced for axis in nontrivial_axes(name)}
    return P(*(nontrivial_axes(name) if name else None for name in names), unreduced=addends)
