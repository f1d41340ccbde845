"""The train step: an ordinary function of (state, batch), jitted under a Plan.  One body serves every layout."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spmd_lm.config.schema import Precision
from spmd_lm.data.batch import Batch
from spmd_lm.models.gpt import GPT
from spmd_lm.ops.dropout import Draw
from spmd_lm.parallel.pipeline.executor import gradients, summed_loss
from spmd_lm.parallel.pipeline.schedule import Schedule
from spmd_lm.parallel.pipeline.stages import Pieces, Weights
from spmd_lm.parallel.plan import Plan, Tree
from spmd_lm.train import precision as scaling
from spmd_lm.train.optim import Optimizer
from spmd_lm.train.state import TrainState


def state_specs(plan: Plan, precision: Precision) -> TrainState:
    scalars = jax.tree.map(lambda _: P(), scaling.first(precision))
    return TrainState(P(), plan.specs, plan.specs, plan.specs, scaling=scalars)


def model_pieces(model: GPT, weight: jax.Array, draw: Callable[[Batch], Draw | None]) -> Pieces:
    """`model` as the executor runs it, each loss a share of the mean over a global batch of total `weight`."""

    @jax.named_scope("embedding")
    def embed(params, part: Batch):
        return model.embed(params, part.tokens, part.positions, draw(part))

    @jax.named_scope("blocks")
    def block(layer_params, x, part: Batch, layer):
        here = draw(part)
        return model.train_block(layer_params, x, here and here.at(layer), part.segments)

    @jax.named_scope("head")
    def head(params, x, part: Batch):
        return model.head(params, x, part.targets, part.weights.astype(weight.dtype) / weight)

    return Pieces(embed, block, head, model.embedding_of, model.head_of, model.looped)


def make_train_step(
    model: GPT,
    optimizer: Optimizer,
    plan: Plan,
    schedule: Schedule,
    precision: Precision,
    seed: int,
    batch_specs: Batch,
    *,
    reduce_once: bool,
) -> Callable:
    """(state, batch) -> (state, {loss, grad_norm, lr}), and precision.FIGURES where the loss is scaled; the state it is
    given is donated.

    loss: mean negative log-likelihood per target token of the global batch, in nats."""
    dropout = model.c.dropout > 0 or model.c.attention_dropout > 0

    def body(state: TrainState, batch: Batch):
        draw = lambda part: Draw(jnp.uint32(seed), state.step, part.samples) if dropout else None  # noqa: E731
        compute, reduce = jnp.dtype(precision.compute), jnp.dtype(precision.reduce)
        wide = jnp.promote_types(compute, jnp.float32)
        # Scaled where it is formed: what cross-entropy makes of it in float16 is scaled already.
        weight = scaling.unscaled(plan.batch_sum(batch.weights.astype(wide).sum()), state.scaling)
        pieces = model_pieces(model, weight, draw)
        loss, grads = gradients(
            plan, pieces, schedule, state.params, batch, compute=compute, reduce=reduce, once=reduce_once
        )
        loss = scaling.unscaled(loss, state.scaling)
        state, scalars = scaling.update(precision, optimizer, plan, state, grads)
        return state, {"loss": loss} | scalars

    specs = state_specs(plan, precision)
    figures = ("loss", "grad_norm", "lr", *(scaling.FIGURES if specs.scaling else ()))
    outs = specs, dict.fromkeys(figures, P())
    step = plan.manual(body, (specs, batch_specs), outs)
    return jax.jit(step, donate_argnums=0, out_shardings=plan.sharding(outs))


def make_eval_step(model: GPT, plan: Plan, schedule: Schedule, precision: Precision, batch_specs: Batch) -> Callable:
    """(params, batch) -> (sum of weight x negative log-likelihood, sum of weights) of the global batch, without
    dropout."""

    def body(params: Tree, batch: Batch):
        weights = Weights.of(plan, params, jnp.dtype(precision.compute), jnp.dtype(precision.reduce))
        wide = jnp.promote_types(precision.compute, jnp.float32)
        pieces = model_pieces(model, jnp.ones((), wide), lambda part: None)
        loss = summed_loss(plan, pieces, schedule, weights, batch)
        return loss, plan.batch_sum(batch.weights.astype(wide).sum())

    outs = (P(), P())
    step = plan.manual(body, (plan.specs, batch_specs), outs)
    return jax.jit(step, out_shardings=plan.sharding(outs))
