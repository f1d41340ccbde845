"""A model on its weights, of a stack of layers that are numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.parallel.layers_loop import LayersLoop
from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.sharded_model import ModelFns, ShardedModel, join_params
from spmd_lm.step.train_step import accumulate, zero_gradients

STACK = {"w": jnp.array([2.0, 3.0, 5.0])}
PARAMS = {"blocks": STACK, "start": jnp.array(7.0)}


def block(p, x, microbatch, layer):
    return x * p["w"] + layer, {"balance": p["w"] * microbatch, "size": x}


def embed(params, microbatch):
    return params["start"] * microbatch


def head(params, x, microbatch):
    return {"end": 10 * x}


def model_fns(scan: bool) -> ModelFns:
    def all_params(params):
        return params

    return ModelFns(embed, block, head, all_params, all_params, LayersLoop(scan))


@pytest.mark.parametrize("scan", [True, False])
def test_layers_run_in_order_and_know_their_index(scan):
    x, losses = LayersLoop(scan).run(block, (STACK,), jnp.array(7.0), 1.0)
    inputs = [7.0, 7 * 2.0, (7 * 2) * 3.0 + 1]
    assert float(x) == inputs[2] * 5 + 2
    assert {name: float(loss) for name, loss in losses.items()} == {"balance": 10.0, "size": sum(inputs)}


@pytest.mark.parametrize("scan", [True, False])
def test_auxiliary_losses_join_the_loss_and_reach_the_gradients(scan):
    layout = Layout()
    names = {"blocks": {"w": ("layers",)}, "start": ()}
    plan = Plan(layout, make_mesh(layout, jax.devices()[:1]), "cpu", names, jax.eval_shape(lambda: PARAMS))

    def body(params, batch):
        model = ShardedModel.from_params(model_fns(scan), plan, params, jnp.float32, jnp.float32)
        losses, grads = accumulate(model, batch, (model.zero_losses(batch), zero_gradients(model, params)))
        return losses, join_params(grads)

    run = plan.shard_map(body, (plan.param_specs, P()), (P(), plan.param_specs))
    losses, grads = jax.jit(run)(PARAMS, jnp.ones(1))
    losses = {name: float(loss) for name, loss in losses.items()}
    assert losses == {"end": 10 * (43 * 5 + 2), "balance": 10, "size": 7 + 14 + 43}
    assert float(grads["start"]) == 10 * 30 + 1 + 2 + 6
    np.testing.assert_allclose(grads["blocks"]["w"], [10 * 7 * 15 + 1 + 7 + 21, 10 * 14 * 5 + 1 + 14, 10 * 43 + 1])
