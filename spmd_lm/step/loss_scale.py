"""Training in float16: the loss is multiplied by a scale, that small gradients may not vanish, and a step whose
gradients overflow all the same is skipped.

The scale moves as Megatron's DynamicGradScaler moves it: an overflow halves it once `hysteresis` of them have come, and
`scale_window` clean steps in a row double it.  Overflows count however far apart they are: a clean step forgives none,
a full window all.  Nothing here waits for the host."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_lm.axes import MESH_AXES
from spmd_lm.config.schema import Precision
from spmd_lm.parallel.plan import Plan, Tree
from spmd_lm.step.optimizer import Optimizer
from spmd_lm.step.state import TrainState

LARGEST = 2.0**64
"""Gradients that are all zero would double the scale for ever; a loss times this one is still far from infinity."""

FIGURES = ("loss_scale", "skipped", "skipped_steps")
"""What `update` tells besides, where there is a scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaling:
    """Scalars of a run, whole on every device.

    scale: float32, of the next step's loss.  growth_tracker: int32, clean steps since the last overflow or doubling.
    hysteresis_tracker: int32, overflows to come up to the first that halves; 0 and less: each one does.  skipped:
    int32, steps without an update, of all so far."""

    scale: Any
    growth_tracker: Any
    hysteresis_tracker: Any
    skipped: Any


def first(p: Precision) -> Scaling | None:
    """Before the first step, on the host; None for a run whose loss is not scaled."""
    if p.loss_scale == "none":
        return None
    return Scaling(np.float32(p.initial_scale), np.int32(0), np.int32(p.hysteresis), np.int32(0))


def following(p: Precision, s: Scaling, clean: jax.Array) -> Scaling:
    """After a step.  clean: bool, whether all its gradients were finite."""
    grown, left = s.growth_tracker + 1, s.hysteresis_tracker - 1
    full = grown == p.scale_window
    doubled = jnp.where(full, jnp.minimum(2 * s.scale, LARGEST), s.scale)
    halved = jnp.where(left <= 0, jnp.maximum(s.scale / 2, p.min_scale), s.scale)
    return Scaling(
        scale=jnp.where(clean, doubled, halved),
        growth_tracker=jnp.where(clean & ~full, grown, 0),
        hysteresis_tracker=jnp.where(clean, jnp.where(full, p.hysteresis, s.hysteresis_tracker), left),
        skipped=s.skipped + ~clean,
    )


def unscaled(tree: Tree, s: Scaling | None) -> Tree:
    """Leaves divided by the scale, in their own dtypes; as they are, where there is none."""
    return tree if s is None else jax.tree.map(lambda x: x / s.scale.astype(x.dtype), tree)


@jax.named_scope("scalars")
def finite(plan: Plan, grads: Tree) -> jax.Array:
    """Inside `plan.shard_map`: whether every entry of every device's gradients is a number, the same bool everywhere.

    Not whether their norm is one: squares overflow float32 where numbers do not."""
    ours = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    live = plan.nontrivial_axes(*MESH_AXES)
    return (lax.psum((~ours).astype(jnp.int32), live) if live else ~ours) == 0


def update(
    p: Precision, optimizer: Optimizer, plan: Plan, state: TrainState, grads: Tree
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`optimizer.update` with the gradients of a scaled loss, reduced over data; without a scale just that.

    Where they are not finite parameters and moments stay as they are, bit for bit, and of the state only `step` and
    `scaling` move.  Also FIGURES: loss_scale, float32, of this step; skipped, bool, whether it was; skipped_steps,
    int32, of all so far, it included."""
    if (s := state.scaling) is None:
        return optimizer.update(plan, state, grads)
    grads = unscaled(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, state.params), s)
    clean = finite(plan, grads)
    after = following(p, s, clean)
    new, figures = optimizer.update(plan, state, grads)
    # A choice, which is one with the update's arithmetic; a condition would be a copy of the state on a GPU.
    kept = jax.tree.map(lambda new, old: jnp.where(clean, new, old), new, state)
    figures |= dict(zip(FIGURES, (s.scale, ~clean, after.skipped), strict=True))
    return dataclasses.replace(kept, step=new.step, scaling=after), figures
