"""State that a training run carries from step to step."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from spmd_lm.parallel.trees import Tree, merge

OPTIONAL_FIELDS = ("loss_scale", "loss_window")
"""Fields of a state that a run may gain or lose between restarts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Arrays, canonical in checkpoints, padded on devices.
    step: int32, steps done: the position in the data.
    params: the master weights, frozen ones included.
    opt_state: optax's, of any structure, for the trained ones.
    loss_scale: see step/loss_scale.py; None for none.
    loss_window: see step/guard.py; None for none.
    group_states: of offloaded masters and moments, see step/offload.py; () for none."""

    step: Any
    params: Tree
    opt_state: Any
    loss_scale: Any = None
    loss_window: Any = None
    group_states: tuple = ()

    @property
    def updates(self) -> Any:
        """int32, steps done minus those that were skipped: the learning rate counts these."""
        return self.opt_state.count

    @property
    def on_device(self) -> "TrainState":
        """The state without what is offloaded: the step's argument."""
        return dataclasses.replace(self, group_states=())

    def map_params(self, f: Callable[[Tree], Tree], scalar: Callable[[Any], Any] = lambda x: x) -> "TrainState":
        """Applies `f` to every tree of the state, see `trees_of`, and `scalar` to every other leaf."""
        is_params = _is_params(self.params)
        return jax.tree.map(lambda x: f(x) if is_params(x) else scalar(x), self, is_leaf=is_params)

    def merge(self, other: "TrainState") -> "TrainState":
        """The state with the leaves of both states' trees."""
        both = zip(trees_of(self, self.params), trees_of(other, self.params), strict=True)
        return with_trees(self, self.params, [merge(*trees) for trees in both])


def _is_params(keys: Iterable[str]) -> Callable[[Any], bool]:
    keys = {*keys}
    return lambda x: isinstance(x, dict) and x.keys() <= keys


def trees_of(state: Any, keys: Iterable[str]) -> tuple[Tree, ...]:
    """The trees like the parameters, or like some of them, in a state or in a part of it, such as the moments in
    `opt_state`: dicts with no other keys than the parameters'."""
    is_params = _is_params(keys)
    return tuple(filter(is_params, jax.tree.leaves(state, is_leaf=is_params)))


def with_trees(state: Any, keys: Iterable[str], trees: Sequence[Tree]) -> Any:
    """A state, or a part of it, with these trees in place of its `trees_of`."""
    is_params, rest = _is_params(keys), iter(trees)
    return jax.tree.map(lambda x: next(rest) if is_params(x) else x, state, is_leaf=is_params)


def scalars_of(state: Any, keys: Iterable[str]) -> Any:
    """A state, or a part of it, with empty trees."""
    return with_trees(state, keys, [{}] * len(trees_of(state, keys)))
