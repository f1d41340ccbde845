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
    """Arrays, canonical in checkpoints, padded on devices.
    step: int32, steps done: the position in the data.
    params: the master weights, frozen ones included.
    opt_state: optax's, of any structure, for the trained ones.
    loss_scale: see step/loss_scale.py; None for none.
    loss_window: see step/guard.py; None for none."""

    step: Any
    params: Tree
    opt_state: Any
    loss_scale: Any = None
    loss_window: Any = None

    @property
    def updates(self) -> Any:
        """int32, steps done minus those that were skipped: the learning rate counts these."""
        return self.opt_state.count

    def map_params(self, f: Callable[[Tree], Tree], scalar: Callable[[Any], Any] = lambda x: x) -> "TrainState":
        """Applies `f` to every tree like the parameters, or some of them (a dict whose keys are theirs, such as
        moments in `opt_state`), and `scalar` to every other leaf."""

        def is_params(x: Any) -> bool:
            return isinstance(x, dict) and x.keys() <= self.params.keys()

        return jax.tree.map(lambda x: f(x) if is_params(x) else scalar(x), self, is_leaf=is_params)
