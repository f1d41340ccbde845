"""Skipped steps: those whose loss or gradients are not finite, those of train.guard.exclude and, with
train.guard.spikes, spikes of the loss.

Parameters and optimizer state, its count included, stay as they are, bit for bit; the step number, the data and a
dynamic loss scale advance.  A step whose gradients overflow under such a scale is skipped in the same way, with
skip_reason 0: step/loss_scale.py counts it.

A spike is a loss whose robust z-score among the last WINDOW losses, (loss - median) / (1.4826 * MAD) with the median
absolute deviation MAD, is above SPIKE (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spmd_lm.config.schema import Guard, RunConfig
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree, cast_like, exclude, merge, subset_of
from spmd_lm.step import loss_scale
from spmd_lm.step.optimizer import (
    Optimizer,
    PendingUpdate,
    Shared,
    global_norm,
    trained_layers,
    without_frozen_layers,
)
from spmd_lm.step.state import TrainState, scalars_of

SKIP_REASONS = ("", "loss or gradients are not finite", "loss spike", "train.guard.exclude")
"""Reasons, indexed by the metric skip_reason; '' for a step that was not skipped."""

NON_FINITE, LOSS_SPIKE, EXCLUDED = 1, 2, 3

WINDOW, FEWEST, SPIKE = 128, 16, 6.0
MAD_TO_SIGMA = 1.4826  # for a normal distribution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossWindow:
    """The losses of the last steps that were not skipped, replicated; saved with the state."""

    losses: Any  # float32 [WINDOW], the newest last
    count: Any  # int32: number of entries, the last ones, that are losses

    def known(self) -> jax.Array:
        """The losses, NaN where there are none yet; `losses` has zeros there, because what is saved must be finite."""
        return jnp.where(jnp.arange(WINDOW) < WINDOW - self.count, jnp.nan, self.losses)

    def push(self, loss: jax.Array) -> "LossWindow":
        return LossWindow(jnp.append(self.losses[1:], loss), jnp.minimum(self.count + 1, WINDOW))


def init_loss_window(guard: Guard) -> LossWindow | None:
    """The window before the first step; None for a run that does not watch for spikes."""
    return LossWindow(jnp.zeros(WINDOW, jnp.float32), jnp.int32(0)) if guard.spikes else None


def is_spike(window: LossWindow, loss: jax.Array) -> jax.Array:
    """True for a spike; False while there are fewer than FEWEST losses to compare with."""
    losses = window.known()
    median = jnp.nanmedian(losses)
    deviation = MAD_TO_SIGMA * jnp.nanmedian(jnp.abs(losses - median))
    return (window.count >= FEWEST) & (loss - median > SPIKE * jnp.maximum(deviation, jnp.finfo(jnp.float32).tiny))


def update(
    config: RunConfig, optimizer: Optimizer, plan: Plan, state: TrainState, grads: Tree, loss: jax.Array
) -> tuple[TrainState, dict[str, jax.Array], PendingUpdate | None]:
    """(state, metrics, pending) after this step, inside `plan.partition`.

    loss: the global batch's, unscaled.
    grads: the trained parameters', reduced, times the loss scale if there is one.
    pending: the update that is left for parameters whose optimizer state is offloaded; None for none.

    Metrics: grad_norm, before clipping; lr; skip_reason, int32, of SKIP_REASONS; and those of unscale_gradients."""
    guard, window = config.train.guard, state.loss_window
    grads, scale, metrics = loss_scale.unscale_gradients(config.precision, plan, state, grads)
    summed, grads = grads, cast_like(grads, plan.trained(plan.shapes))  # to the dtypes of the masters
    masks = trained_layers(plan, grads)
    norm = global_norm(plan, without_frozen_layers(masks, grads))
    is_excluded = (state.step + 1 == jnp.array(guard.exclude or [0])).any()
    overflowed = metrics.get("skipped", jnp.bool_(False))
    is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    reason = jnp.where(is_excluded, EXCLUDED, jnp.where(is_finite | overflowed, 0, NON_FINITE))
    if window is not None:
        loss = loss.astype(jnp.float32)
        reason = jnp.where((reason == 0) & ~overflowed & is_spike(window, loss), LOSS_SPIKE, reason)
    is_applied = (reason == 0) & ~overflowed
    if window is not None:
        window = jax.tree.map(lambda new, old: jnp.where(is_applied, new, old), window.push(loss), window)
    scalars = optimizer.scalars(state, norm, is_applied)
    offloaded = optimizer.offloaded_paths(plan)
    params, resident = (exclude(tree, offloaded) for tree in (plan.trained(state.params), grads))
    params, opt_state = optimizer.update(plan.names, masks, scalars, params, state.opt_state, resident)
    new = TrainState(state.step + 1, merge(state.params, params), opt_state, scale, window)
    metrics |= {"grad_norm": norm, "lr": scalars.lr, "skip_reason": reason.astype(jnp.int32)}
    shared = Shared(scalars, scalars_of(state.opt_state, state.params))
    return new, metrics, PendingUpdate(subset_of(summed, offloaded), shared) if offloaded else None
