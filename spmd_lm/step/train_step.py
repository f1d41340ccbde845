"""The train step: an ordinary function of (state, batch), jitted under a Plan.  One body serves every layout."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Precision
from spmd_lm.models.heads import Sums
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.models.objectives import weights
from spmd_lm.ops.dropout import Draw
from spmd_lm.parallel.pipeline.executor import gradients, summed
from spmd_lm.parallel.pipeline.schedule import Schedule
from spmd_lm.parallel.pipeline.stages import Pieces, Weights
from spmd_lm.parallel.plan import Plan, Tree
from spmd_lm.step import loss_scale
from spmd_lm.step.optimizer import Optimizer
from spmd_lm.step.state import TrainState


def state_specs(plan: Plan, precision: Precision) -> TrainState:
    scalars = jax.tree.map(lambda _: P(), loss_scale.first(precision))
    return TrainState(P(), plan.param_specs, plan.param_specs, plan.param_specs, scaling=scalars)


Part = tuple[Batch, jax.Array | None]
"""A microbatch, and the step it is of.  None: there is no dropout."""


def model_pieces(model: LanguageModel, head: Callable, seed: int = 0, group: int = 1) -> Pieces:
    """`model` as the executor runs it.  head(params, x, batch, draw): what is made of each microbatch.  group: see
    Pieces."""

    def draw(part: Part) -> Draw | None:
        batch, step = part
        return None if step is None else Draw(jnp.uint32(seed), step, batch.samples)

    @jax.named_scope("embedding")
    def embed(params, part: Part):
        return model.embed(params, part[0], draw(part))

    @jax.named_scope("blocks")
    def block(layer_params, x, part: Part, layer):
        here = draw(part)
        return model.train_block(layer_params, x, part[0], here and here.at(layer))

    @jax.named_scope("head")
    def end(params, x, part: Part):
        return head(params, x, part[0], draw(part))

    shared = model.c.layers if model.c.share_layers else 1
    return Pieces(embed, block, end, model.embedding_of, model.head_of, model.looped, shared, group)


def make_train_step(
    model: LanguageModel,
    optimizer: Optimizer,
    plan: Plan,
    schedule: Schedule,
    precision: Precision,
    seed: int,
    batch_specs: Batch,
    *,
    group: int,
) -> Callable:
    """(state, batch) -> (state, {loss, grad_norm, lr}), and loss_scale.FIGURES where the loss is scaled; the state it
    is given is donated.

    loss: the sum of the objective's losses, each a mean over the global batch, in nats; where there are several, each
    as well, as `NAME_loss`.  group: of how many layers backward finds the first one's input alone."""
    dropout = model.c.dropout > 0 or model.c.attention_dropout > 0

    def body(state: TrainState, batch: Batch):
        compute, reduce = jnp.dtype(precision.compute), jnp.dtype(precision.reduce)
        # Scaled where they are formed: what cross-entropy makes of them in float16 is scaled already.
        totals = loss_scale.unscaled(total_weights(model, plan, batch, compute), state.scaling)

        def head(params, x, part: Batch, draw: Draw | None):
            of = weights(model.objective, part)
            share = {name: of[name].astype(total.dtype) / total for name, total in totals.items()}
            return model.losses(params, x, part, share, draw)

        pieces = model_pieces(model, head, seed, group)
        # The step goes with each part: what a block closes over, jax cannot take through two kinds of remat.
        parts = batch, jnp.broadcast_to(state.step, batch.samples.shape[:1]) if dropout else None
        losses, grads = gradients(plan, pieces, schedule, state.params, parts, compute=compute, reduce=reduce)
        losses = loss_scale.unscaled(losses, state.scaling)
        state, scalars = loss_scale.update(precision, optimizer, plan, state, grads)
        return state, reported(losses) | scalars

    specs = state_specs(plan, precision)
    several = reported(dict.fromkeys(weights(model.objective, batch_specs), 0))
    figures = (*several, "grad_norm", "lr", *(loss_scale.FIGURES if specs.scaling else ()))
    outs = specs, dict.fromkeys(figures, P())
    step = plan.shard_map(body, (specs, batch_specs), outs)
    return jax.jit(step, donate_argnums=0, out_shardings=plan.sharding(outs))


def total_weights(model: LanguageModel, plan: Plan, batch: Batch, compute: jnp.dtype) -> Sums:
    """Of each loss the weight of the whole global batch, which its mean is over."""
    wide = jnp.promote_types(compute, jnp.float32)
    total = plan.psum_batch({name: w.astype(wide).sum() for name, w in weights(model.objective, batch).items()})
    return {name: jnp.where(weight > 0, weight, 1) for name, weight in total.items()}  # of nothing, the mean is 0


def reported(losses: dict) -> dict:
    """Losses as a step reports them: their sum, and each if there are several."""
    each = {f"{name}_loss": loss for name, loss in losses.items()} if len(losses) > 1 else {}
    return {"loss": functools.reduce(operator.add, losses.values())} | each


def make_eval_step(
    model: LanguageModel, plan: Plan, schedule: Schedule, precision: Precision, batch_specs: Batch, rows: int
) -> Callable:
    """(params, batch) -> what `model.scores` makes of the global batch of so many rows, without dropout."""

    def head(params, x, part: Batch, draw: None):
        return model.scores(params, x, part, rows)

    def body(params: Tree, batch: Batch):
        held = Weights.of(plan, params, jnp.dtype(precision.compute), jnp.dtype(precision.reduce))
        return summed(plan, model_pieces(model, head), schedule, held, (batch, None))

    step = plan.shard_map(body, (plan.param_specs, batch_specs), P())
    return jax.jit(step, out_shardings=plan.sharding(P()))


def make_forward(model: LanguageModel, plan: Plan, precision: Precision, batch_specs: Batch) -> Callable:
    """(params, batch) -> logits of each thing that the model predicts, [microbatches, rows, ...], on every device."""

    def body(params: Tree, batch: Batch):
        compute = jnp.dtype(precision.compute)
        low, fetch = Weights.of(plan, params, compute, compute).to_read()
        one = lambda part: model.forward(low, fetch, part)  # noqa: E731
        return jax.lax.map(one, batch)

    outs = plan.batch_spec
    forward = plan.shard_map(body, (plan.param_specs, batch_specs), outs)
    return jax.jit(forward, out_shardings=plan.sharding(P()))
