"""Training in float16: the loss is multiplied by a scale, so that small gradients do not underflow.  A step whose
gradients overflow all the same is skipped (step/guard.py).

The scale begins at precision.initial_scale, and changes as in Megatron's DynamicGradScaler: the `hysteresis`-th
overflow halves it, as does each further one, and `scale_window` clean steps in a row double it.  Overflows count
however far apart they are: a clean step does not reset the count, a full window does.  Nothing here waits for the
host."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.axes import MESH_AXES
from spmd_lm.config.schema import Precision
from spmd_lm.ops.collectives import psum_axes
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree, cast_like
from spmd_lm.step.state import TrainState

LARGEST = 2.0**64  # all-zero gradients would double the scale for ever; a loss times this is still far from infinity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale's state: scalars, replicated."""

    scale: Any  # float32, of the next step's loss
    growth_tracker: Any  # int32, clean steps since the last overflow or doubling
    hysteresis_tracker: Any  # int32, overflows until one halves the scale, that one included; then each does
    skipped: Any  # int32, steps skipped for an overflow so far


def init_loss_scale(p: Precision) -> LossScale | None:
    """The scale before the first step, on the host; None for a run without loss scaling."""
    if p.loss_scale == "none":
        return None
    return LossScale(np.float32(p.initial_scale), np.int32(0), np.int32(p.hysteresis), np.int32(0))


def next_loss_scale(p: Precision, s: LossScale, finite: jax.Array) -> LossScale:
    """The scale after a step.  finite: bool, whether all its gradients were."""
    growth, hysteresis = s.growth_tracker + 1, s.hysteresis_tracker - 1
    full = growth == p.scale_window
    doubled = jnp.where(full, jnp.minimum(2 * s.scale, LARGEST), s.scale)
    halved = jnp.where(hysteresis <= 0, jnp.maximum(s.scale / 2, p.min_scale), s.scale)
    scale, growth = jnp.where(finite, doubled, halved), jnp.where(finite & ~full, growth, 0)
    hysteresis = jnp.where(finite, jnp.where(full, p.hysteresis, s.hysteresis_tracker), hysteresis)
    return LossScale(scale, growth, hysteresis, s.skipped + ~finite)


def unscale(tree: Tree, s: LossScale | None) -> Tree:
    """Leaves divided by the scale, in their own dtypes; unchanged without one."""
    return tree if s is None else jax.tree.map(lambda x: x / s.scale.astype(x.dtype), tree)


@jax.named_scope("scalars")
def all_finite(plan: Plan, grads: Tree) -> jax.Array:
    """True on all devices if every entry of all their gradients is finite; for use inside `plan.partition`.

    Their norm may still not be: the squares of finite numbers may overflow."""
    local = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    axes = plan.active_axes(*MESH_AXES)
    return psum_axes((~local).astype(jnp.int32), axes) == 0


def unscale_gradients(
    p: Precision, plan: Plan, state: TrainState, grads: Tree
) -> tuple[Tree, LossScale | None, dict[str, jax.Array]]:
    """(gradients without the scale, the next scale, metrics), inside `plan.partition`; without a scale nothing changes.

    grads: those of a scaled loss, reduced.  Metrics: loss_scale, float32, of this step; skipped, bool,
    whether the gradients are not finite; skipped_steps, int32, the number so far, this one included."""
    if (s := state.loss_scale) is None:
        return grads, None, {}
    grads = unscale(cast_like(grads, plan.trained(plan.shapes)), s)
    finite = all_finite(plan, grads)
    scale = next_loss_scale(p, s, finite)
    return grads, scale, {"loss_scale": s.scale, "skipped": ~finite, "skipped_steps": scale.skipped}
