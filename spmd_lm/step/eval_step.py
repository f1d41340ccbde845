"""Steps without gradients: evaluation of a batch, and logits."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.models.transformer import LossDict
from spmd_lm.parallel.pipeline.interpreter import Pipeline
from spmd_lm.parallel.pipeline.schedule import Schedule
from spmd_lm.parallel.plan import Plan, Tree
from spmd_lm.parallel.sharded_model import ShardedModel
from spmd_lm.parallel.trees import tree_add
from spmd_lm.step.train_step import model_fns


def make_eval_step(config: RunConfig, model: LanguageModel, plan: Plan, schedule: Schedule) -> Callable:
    """(params, batch) -> LanguageModel.eval_sums of the global batch, without dropout."""

    def eval_step(params: Tree, batch: Batch) -> LossDict:
        compute, reduce = jnp.dtype(config.precision.compute), jnp.dtype(config.precision.reduce)
        fns = model_fns(model, functools.partial(model.eval_sums, rows=config.train.batch))
        sharded = ShardedModel.from_params(fns, plan, params, compute, reduce)
        microbatches = batch, None
        zeros = sharded.zero_losses(microbatches)
        if schedule.stages > 1:
            totals = Pipeline(sharded, schedule, microbatches).evaluate(zeros)
        else:
            totals, _ = lax.scan(lambda total, x: (tree_add(total, sharded.forward(x)), None), zeros, microbatches)
        return plan.psum_batch(plan.psum_stages(totals))

    step = plan.shard_map(eval_step, (plan.param_specs, plan.batch_spec), P())
    return jax.jit(step, out_shardings=plan.sharding(P()))


def make_forward(model: LanguageModel, plan: Plan, compute: jnp.dtype) -> Callable:
    """(params, batch) -> logits by what they predict, [microbatches, rows, ...], on every device."""

    def forward(params: Tree, batch: Batch) -> dict[str, jax.Array]:
        inference, gather = inference_params(model, plan, params, compute)
        return lax.map(lambda microbatch: model.forward(inference, gather, microbatch), batch)

    step = plan.shard_map(forward, (plan.param_specs, plan.batch_spec), plan.batch_spec)
    return jax.jit(step, out_shardings=plan.sharding(P()))


def inference_params(
    model: LanguageModel, plan: Plan, params: Tree, compute: jnp.dtype
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """Inside `plan.shard_map`: (parameters in dtype `compute`, gather), where gather makes one layer of their stack
    whole."""
    fns = model_fns(model, lambda params, x, microbatch: {})
    return ShardedModel.from_params(fns, plan, params, compute, compute).inference_params()
