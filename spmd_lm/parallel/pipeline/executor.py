"""Loss and gradients of one step: microbatches through the stages of a pipeline, as a schedule says.

One stage is a pipeline whose microbatches are gradient accumulation."""

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.parallel.pipeline.breadth_first import BreadthFirst
from spmd_lm.parallel.pipeline.schedule import Schedule
from spmd_lm.parallel.pipeline.stages import Pieces, Tree, Weights, plus
from spmd_lm.parallel.pipeline.ticks import Pipeline
from spmd_lm.parallel.plan import Plan


def gradients(
    plan: Plan,
    pieces: Pieces,
    schedule: Schedule,
    params: Tree,
    batch: Tree,
    *,
    compute: jnp.dtype,
    reduce: jnp.dtype,
    once: bool,
) -> tuple[jax.Array, Tree]:
    """Mean loss of the global batch, and its gradients, reduced over data in dtype `reduce`, laid out as `params` are.

    batch: leaves [microbatches, rows here, ...].  compute: the dtype of the model's arithmetic.  Gradients of
    microbatches are added up in the parameters' own dtype."""
    weights = Weights.of(plan, params, compute, reduce, once)
    wide = jnp.promote_types(compute, jnp.float32)
    own = jnp.result_type(wide, *jax.tree.leaves(params))
    zero = jnp.zeros((), wide), jax.tree.map(lambda w: jnp.zeros(w.shape, own), weights.source)
    if schedule.stages > 1:
        loss, grads = pipeline(plan, pieces, schedule, weights, batch).gradients(*zero)
    else:
        loss, grads = _accumulated(pieces, weights, batch, zero)
    return plan.batch_sum(plan.stage_sum(loss)), weights.reduced(grads)


def _accumulated(pieces: Pieces, weights: Weights, batch: Tree, zero: Tree) -> tuple[jax.Array, Tree]:
    one = jax.value_and_grad(lambda source, part: weights.stage(pieces, source).loss(part))
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        return one(weights.source, jax.tree.map(lambda x: x[0], batch))
    add = lambda total, part: (plus(total, one(weights.source, part)), None)  # noqa: E731
    return lax.scan(add, zero, batch)[0]


def pipeline(plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree) -> Pipeline:
    kind = BreadthFirst if schedule.kind == "breadth_first" else Pipeline
    return kind(plan, pieces, schedule, weights, batch)


def summed_loss(plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree) -> jax.Array:
    """Of all microbatches of a batch, over all its shards, without gradients."""
    if schedule.stages > 1:
        loss = pipeline(plan, pieces, schedule, weights, batch).loss()
    else:
        loss = lax.map(weights.stage(pieces, weights.source).loss, batch).sum()
    return plan.batch_sum(plan.stage_sum(loss))
