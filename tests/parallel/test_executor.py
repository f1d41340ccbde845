"""The executor on a stack of layers that are numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.pipeline.executor import gradients
from spmd_lm.parallel.pipeline.schedule import schedule
from spmd_lm.parallel.pipeline.stages import Pieces, run_layers
from spmd_lm.parallel.plan import Plan

STACK = {"w": jnp.array([2.0, 3.0, 5.0])}
PARAMS = {"blocks": STACK, "start": jnp.array(7.0)}


def block(p, x, part, layer):
    return x * p["w"] + layer, {"balance": p["w"] * part, "size": x}


def pieces(scan):
    whole = lambda params: params  # noqa: E731
    start = lambda params, part: params["start"] * part  # noqa: E731
    return Pieces(start, block, lambda params, x, part: {"end": 10 * x}, whole, whole, scan)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_run_in_order_and_know_their_number(scan):
    x, losses = run_layers(lambda p, x, layer: block(p, x, 1.0, layer), STACK, jnp.array(7.0), scan)
    inputs = [7.0, 7 * 2.0, (7 * 2) * 3.0 + 1]
    assert float(x) == inputs[2] * 5 + 2
    assert {name: float(loss) for name, loss in losses.items()} == {"balance": 10.0, "size": sum(inputs)}


@pytest.mark.parametrize("scan", [True, False])
def test_auxiliary_losses_join_the_loss_and_reach_the_gradients(scan):
    layout = Layout()
    names = {"blocks": {"w": ("layers",)}, "start": ()}
    plan = Plan(layout, make_mesh(layout, jax.devices()[:1]), "cpu", names, jax.eval_shape(lambda: PARAMS))

    def body(params, batch):
        return gradients(
            plan,
            pieces(scan),
            schedule("1f1b", 1, 1),
            params,
            batch,
            compute=jnp.float32,
            reduce=jnp.float32,
        )

    run = plan.shard_map(body, (plan.param_specs, P()), (P(), plan.param_specs))
    losses, grads = jax.jit(run)(PARAMS, jnp.ones(1))
    made = {name: float(loss) for name, loss in losses.items()}
    assert made == {"end": 10 * (43 * 5 + 2), "balance": 10, "size": 7 + 14 + 43}
    assert float(grads["start"]) == 10 * 30 + 1 + 2 + 6
    np.testing.assert_allclose(grads["blocks"]["w"], [10 * 7 * 15 + 1 + 7 + 21, 10 * 14 * 5 + 1 + 14, 10 * 43 + 1])
