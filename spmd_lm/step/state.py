"""What a training run carries from step to step."""

import dataclasses
from typing import Any

import jax

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: int32 array, steps done: the place in the data.  params: the master weights.  mu, nu: Adam's moments, the
    same tree.  scaling: of the loss, see step/loss_scale.py; None in runs without.  Canonical in checkpoints, placed on
    devices."""

    step: Any
    params: Tree
    mu: Tree
    nu: Tree
    scaling: Any = None

    @property
    def updates(self) -> Any:
        """int32 array, steps done less those that were skipped: what Adam and the learning rate count."""
        return self.step if self.scaling is None else self.step - self.scaling.skipped

    def map_params(self, f) -> "TrainState":
        """`f` applied to each of the trees that are laid out as the parameters."""
        return dataclasses.replace(self, params=f(self.params), mu=f(self.mu), nu=f(self.nu))
