"""What a training run carries from step to step."""

import dataclasses
from typing import Any

import jax

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: int32 array, updates done.  params: the master weights, trainable.  mu, nu: Adam's moments, the same tree.
    frozen: parameters that no gradient reaches.  Canonical in checkpoints, placed on devices."""

    step: Any
    params: Tree
    mu: Tree
    nu: Tree
    frozen: Tree = dataclasses.field(default_factory=dict)

    def map_params(self, f) -> "TrainState":
        """`f` applied to each of the trees that are laid out as the parameters."""
        return dataclasses.replace(self, params=f(self.params), mu=f(self.mu), nu=f(self.nu))
