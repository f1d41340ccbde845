"""Loss and gradients of one step: microbatches through the stages of a pipeline, as a schedule says.

One stage is a pipeline whose microbatches are gradient accumulation."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.parallel.pipeline.breadth_first import BreadthFirst
from spmd_lm.parallel.pipeline.schedule import Schedule
from spmd_lm.parallel.pipeline.stages import Losses, Pieces, Tree, Weights, plus
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
) -> tuple[Losses, Tree]:
    """Mean losses of the global batch, and the gradients of their sum, reduced over data in dtype `reduce`, laid out as
    `params` are.

    batch: leaves [microbatches, rows here, ...].  compute: the dtype of the model's arithmetic.  Gradients of
    microbatches are added up in the parameters' own dtype."""
    weights = Weights.of(plan, params, compute, reduce)
    wide = jnp.promote_types(compute, jnp.float32)
    own = jnp.result_type(wide, *jax.tree.leaves(params))
    zero = (
        weights.stage(pieces, weights.source).none(batch),
        jax.tree.map(lambda w: jnp.zeros(w.shape, own), weights.source),
    )
    if schedule.stages > 1:
        losses, grads = pipeline(plan, pieces, schedule, weights, batch).gradients(*zero)
    else:
        losses, grads = _accumulated(pieces, weights, batch, zero)
    return plan.psum_batch(plan.psum_stages(losses)), weights.reduced(grads)


def _accumulated(pieces: Pieces, weights: Weights, batch: Tree, zero: Tree) -> tuple[Losses, Tree]:
    def one(source: Tree, part: Tree) -> tuple[Losses, Tree]:
        def total(source: Tree) -> tuple[jax.Array, Losses]:
            losses = weights.stage(pieces, source).losses(part)
            return functools.reduce(operator.add, losses.values()), losses

        grads, losses = jax.grad(total, has_aux=True)(source)
        return losses, grads

    if jax.tree.leaves(batch)[0].shape[0] == 1:
        return one(weights.source, jax.tree.map(lambda x: x[0], batch))
    add = lambda total, part: (plus(total, one(weights.source, part)), None)  # noqa: E731
    return lax.scan(add, zero, batch)[0]


def pipeline(plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree) -> Pipeline:
    kind = BreadthFirst if schedule.kind == "breadth_first" else Pipeline
    return kind(plan, pieces, schedule, weights, batch)


def summed(plan: Plan, pieces: Pieces, schedule: Schedule, weights: Weights, batch: Tree) -> Tree:
    """What the head makes of all microbatches of a batch, summed over them and over all shards, without gradients."""
    stage = weights.stage(pieces, weights.source)
    none = stage.none(batch)
    if schedule.stages > 1:
        made = pipeline(plan, pieces, schedule, weights, batch).sums(none)
    else:
        made = lax.scan(lambda total, part: (plus(total, stage.losses(part)), None), none, batch)[0]
    return plan.psum_batch(plan.psum_stages(made))
