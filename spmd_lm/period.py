"""Layers that repeat in periods of several kinds.

A stack of layers is a tree of arrays [layers, ...].  Where a period has several layers it is a dict of such trees, one
for each place in the period, with one entry per layer at that place.  A loop runs it as a stack of periods; the layers
of a truncated last period run after it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

BlockFn = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""block(*layer, x, microbatch, index) -> (x, auxiliary losses).  *layer: this layer's or period's entry of each
stack that a loop runs over."""


@dataclasses.dataclass(frozen=True)
class Period:
    """A repeated sequence of layers.  keys: one per layer of a period, in order; empty for a single layer.  count:
    whole periods.  rest: layers of a truncated last period."""

    keys: tuple[str, ...] = ()
    count: int = 1
    rest: int = 0

    @property
    def layers(self) -> int:
        return len(self.keys) or 1

    @property
    def cut_short(self) -> "Period":
        """The truncated last period, if there is one."""
        return Period(self.keys[: self.rest])

    def trees(self, tree: Any) -> tuple[Any, ...]:
        """One tree per layer, in order; {} for a layer without leaves in this tree.  None gives a None for each."""
        return tuple(tree if tree is None else tree.get(key, {}) for key in self.keys) if self.keys else (tree,)

    def join(self, trees: Iterable[Any]) -> Any:
        """The inverse of `trees`."""
        return dict(zip(self.keys, trees, strict=True)) if self.keys else next(iter(trees))

    def full(self, stack: Any) -> Any:
        """The stack without a truncated last period."""
        if stack is None or not self.rest:
            return stack
        cut = self.cut_short.keys
        return {key: _map(lambda x: x[:-1], tree) if key in cut else tree for key, tree in stack.items()}

    def last(self, stack: Any) -> Any:
        """The stack's entries for the layers of `cut_short`."""
        cut = self.cut_short.keys
        return stack and {key: _map(lambda x: x[-1], tree) for key, tree in stack.items() if key in cut}

    def in_order(self, blocks: tuple[BlockFn, ...]) -> BlockFn:
        """block(*trees, x, microbatch, index) -> (x, losses) for a period, from its layers' blocks.  index: the
        period's in the stack."""
        if not self.keys:
            return blocks[0]

        def run(*inputs):
            *trees, x, microbatch, index = inputs
            losses: dict[str, jax.Array] = {}
            for block, *layer in zip(blocks, *map(self.trees, trees), strict=True):
                x, of_layer = block(*layer, x, microbatch, index)
                losses = sum_by_name(losses, of_layer)
            return x, losses

        return run


def sum_by_name(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return a | {name: a[name] + loss if name in a else loss for name, loss in b.items()}


def _map(f: Callable, tree: Any) -> Any:
    """Maps f over arrays, and over lists of unrolled layers' matrices."""
    return jax.tree.map(f, tree, is_leaf=lambda x: isinstance(x, list))
