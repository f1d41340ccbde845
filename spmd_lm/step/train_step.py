"""The train step: an ordinary function of (state, batch), jitted under a Plan; and evaluation, its forward half.

Each microbatch runs forward, loss and backward, in which ZeRO-2 and 3 may scatter gradients; then, once, come the rest
of the gradients' reduction and the optimizer's update of each device's own shards.  One body serves every layout."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.models.context import STATISTICS, LossDict, local_batch, sum_losses
from spmd_lm.models.heads import nonzero_totals
from spmd_lm.models.language_model import LanguageModel, ModelInput
from spmd_lm.ops.collectives import partial_sum, zeros_like_gradient
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.parallel.layers_loop import LayersLoop
from spmd_lm.parallel.pipeline.interpreter import Pipeline
from spmd_lm.parallel.pipeline.schedule import Schedule
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.sharded_model import ModelFns, ShardedModel, SplitParams
from spmd_lm.parallel.trees import Tree, subset_of, tree_add
from spmd_lm.period import BlockFn
from spmd_lm.step import guard, loss_scale
from spmd_lm.step.optimizer import Optimizer, PendingUpdate
from spmd_lm.step.state import TrainState

LossesAndGrads = tuple[LossDict, SplitParams]


def make_train_step(
    config: RunConfig, model: LanguageModel, optimizer: Optimizer, plan: Plan, schedule: Schedule, specs: TrainState
) -> Callable:
    """(state, batch) -> (state, metrics, pending); the state it is given is donated.

    specs: PartitionSpecs of the state.
    metrics: loss, grad_norm, lr, skip_reason, and those of unscale_gradients where the loss is scaled.
    pending: see guard.update.
    loss: the sum of the objective's losses, in nats, and of the blocks' auxiliary ones, each a mean over the global
      batch; where there are several, each is a metric too, `NAME_loss`.
    STATISTICS of blocks with experts are metrics too."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array], PendingUpdate | None]:
        batch, compute, reduce = (
            local_batch(batch),
            jnp.dtype(config.precision.compute),
            jnp.dtype(config.precision.reduce),
        )
        # The loss scale is in the divisors, so that losses are scaled where they are formed: cross-entropy computes
        # gradients in its forward, and in float16 they must not underflow there.
        loss_divisors = loss_scale.unscale(psum_loss_weights(model, plan, batch, compute), state.loss_scale)

        def mean_losses(params: Tree, x: jax.Array, microbatch: ModelInput) -> LossDict:
            """A microbatch's share of the mean losses of the global batch, times the loss scale."""
            weights = model.loss_weights(microbatch.batch)
            shares = {name: weights[name].astype(total.dtype) / total for name, total in loss_divisors.items()}
            return model.losses(params, x, microbatch, shares)

        fns = model_fns(model, mean_losses, scan=plan.scan, allocated=plan.platform == "gpu")
        rounding_key = (jnp.uint32(config.train.seed), state.step.astype(jnp.uint32)) if plan.rounds_at_random else None
        sharded = ShardedModel.from_params(fns, plan, state.params, compute, reduce, rounding_key)
        keys = dropout_keys(model, config.train.seed, state.step, batch)
        microbatches = ModelInput(batch, keys, row_weights(model, config, state, batch))

        # forward, loss and backward of every microbatch
        zeros = sharded.zero_losses(microbatches), zero_gradients(sharded, state.params)
        if schedule.stages == 1:
            losses, grads = accumulate(sharded, microbatches, zeros)
        else:
            losses, grads = Pipeline(sharded, schedule, microbatches).gradients(*zeros)
        # reduce
        losses = plan.psum_batch(plan.psum_stages(losses))
        statistics = {name: losses.pop(name) for name in STATISTICS if name in losses}
        losses = loss_scale.unscale(losses, state.loss_scale)
        reduced = sharded.reduce_gradients(grads)
        # update
        state, metrics, pending = guard.update(config, optimizer, plan, state, reduced, sum_losses(losses))
        each_loss = {f"{name}_loss": loss for name, loss in losses.items()} if len(losses) > 1 else {}
        return state, {"loss": sum_losses(losses)} | each_loss | statistics | metrics, pending

    offloaded = subset_of(plan.param_specs, optimizer.offloaded_paths(plan))
    replicated: Any = P()
    out_specs = specs, replicated, PendingUpdate(offloaded, replicated) if offloaded else None
    step = plan.partition(train_step, (specs, plan.batch_specs), out_specs)
    return jax.jit(step, donate_argnums=0, out_shardings=plan.sharding(out_specs))


def make_eval_step(
    config: RunConfig,
    model: LanguageModel,
    plan: Plan,
    schedule: Schedule,
    head: Callable[..., LossDict],
    options: dict[str, Any],
) -> Callable:
    """(params, batch) -> sums of `head`, which is model.eval_sums or model.target_scores, over the global batch,
    without dropout.  options: XLA's."""

    def eval_step(params: Tree, batch: Batch) -> LossDict:
        compute, reduce = jnp.dtype(config.precision.compute), jnp.dtype(config.precision.reduce)
        fns = model_fns(model, functools.partial(head, rows=config.train.batch), scan=True)
        blocks, last = (tuple(map(_alone, each)) for each in (fns.blocks, fns.last_blocks))
        fns = dataclasses.replace(fns, blocks=blocks, last_blocks=last)
        sharded = ShardedModel.from_params(fns, plan, params, compute, reduce)
        microbatches = ModelInput(local_batch(batch))
        zeros = sharded.zero_losses(microbatches)
        if schedule.stages > 1:
            totals = Pipeline(sharded, schedule, microbatches).evaluate(zeros)
        else:
            totals, _ = lax.scan(lambda total, x: (tree_add(total, sharded.forward(x)), None), zeros, microbatches)
        return plan.psum_batch(plan.psum_stages(totals))

    step = plan.partition(eval_step, (plan.param_specs, plan.batch_specs), P())
    return jax.jit(step, out_shardings=plan.sharding(P()), compiler_options=options)


def _alone(block: BlockFn) -> BlockFn:
    """The block without its auxiliary losses."""
    return lambda *inputs: (block(*inputs)[0], {})


def accumulate(model: ShardedModel, microbatches: Tree, zeros: LossesAndGrads) -> LossesAndGrads:
    """Losses and gradients, summed over microbatches one after the other."""

    def loss_fn(grad_argument: SplitParams, microbatch: ModelInput) -> tuple[jax.Array, LossDict]:
        losses = model.with_grad_argument(grad_argument).forward(microbatch)
        return sum_losses(losses), losses

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if jax.tree.leaves(microbatches)[0].shape[0] == 1:
        grads, losses = grad_fn(model.grad_argument, jax.tree.map(lambda x: x[0], microbatches))
        return losses, grads

    def add_microbatch(total: LossesAndGrads, microbatch: ModelInput) -> tuple[LossesAndGrads, None]:
        grads, losses = grad_fn(model.grad_argument, microbatch)
        return tree_add(total, (losses, grads)), None

    return lax.scan(add_microbatch, zeros, microbatches)[0]


def zero_gradients(model: ShardedModel, params: Tree) -> SplitParams:
    """Zeros to add microbatches' gradients to, in the widest of the parameters' dtypes, compute and float32."""
    dtype = jnp.result_type(jnp.promote_types(model.compute_dtype, jnp.float32), *jax.tree.leaves(params))
    return jax.tree.map(lambda w: zeros_like_gradient(w, dtype), model.grad_argument)


def model_fns(
    model: LanguageModel,
    head: Callable[[Tree, jax.Array, ModelInput], LossDict],
    *,
    scan: bool,
    allocated: bool = False,
) -> ModelFns:
    """`model` as a step runs it.  head(params, x, microbatch): runs after the last block.  scan: whether layers run in
    a scan; outside of training they always do: it compiles faster, and forward saves nothing.  allocated: see
    LayersLoop."""
    layers_per_weight = model.c.layers if model.c.share_layers else 1
    loop = LayersLoop(scan, layers_per_weight, model.remat.layers_per_remat_block, allocated)
    blocks, last = model.block_fns(), model.last_block_fns()
    return ModelFns(model.embed, blocks, head, model.embed_params, model.head_params, loop, model.period, last)


def dropout_keys(model: LanguageModel, seed: int, step: jax.Array, batch: Batch) -> DropoutKey | None:
    """The keys of all microbatches, leaves [microbatches, ...]; None for a model without dropout.

    Passed as arguments: what a block closes over cannot cross both with_gathered_weights and jax.checkpoint."""
    if not model.has_dropout:
        return None
    microbatches = batch.sample_ids.shape[:1]
    seeds, steps = (jnp.broadcast_to(x, microbatches) for x in (jnp.uint32(seed), step))
    return DropoutKey(seeds, steps, batch.sample_ids, jnp.zeros(microbatches, jnp.int32))


def row_weights(model: LanguageModel, config: RunConfig, state: TrainState, batch: Batch) -> jax.Array | None:
    """The weight of a row in auxiliary losses, times the loss scale, [microbatches]; None for blocks without."""
    if not model.has_auxiliary_losses:
        return None
    rows = jnp.asarray(config.train.batch, jnp.promote_types(config.precision.compute, jnp.float32))
    return jnp.broadcast_to(1 / loss_scale.unscale(rows, state.loss_scale), batch.sample_ids.shape[:1])


def psum_loss_weights(model: LanguageModel, plan: Plan, batch: Batch, compute: jnp.dtype) -> LossDict:
    """The total weight of the global batch for each loss; 1 where that is 0."""
    dtype = jnp.promote_types(compute, jnp.float32)
    weights = model.loss_weights(batch)
    totals = plan.psum_batch({name: partial_sum(w.astype(dtype)) for name, w in weights.items()})
    return nonzero_totals(totals)
