"""State that a training run carries from step to step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spmd_lm.parallel.trees import Tree

OPTIONAL_FIELDS = ("loss_scale", "loss_window")
"""Fields of a state that a run may gain or lose between restarts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: int32, steps done: the position in the data.  params: the master weights, frozen ones included.  opt_state:
    optax's, of any shape, for those that are trained.  loss_scale: of step/loss_scale.py, or None.  loss_window: of
    step/guard.py, or None.  Canonical in checkpoints, padded on devices."""

    step: Any
    params: Tree
    opt_state: Any
    loss_scale: Any = None
    loss_window: Any = None

    @property
    def updates(self) -> Any:
        """int32, steps done less those that were skipped: what the learning rate counts."""
        return self.opt_state.count

    def map_params(self, f: Callable[[Tree], Tree], scalar: Callable[[Any], Any] = lambda x: x) -> "TrainState":
        """`f` applied to every tree like the parameters, or like those that are trained: a dict with keys of
        theirs, as moments in `opt_state` are; `scalar` to every other leaf."""

        def is_params(x: Any) -> bool:
            return isinstance(x, dict) and x.keys() <= self.params.keys()

        return jax.tree.map(lambda x: f(x) if is_params(x) else scalar(x), self, is_leaf=is_params)
