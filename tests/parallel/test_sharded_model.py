"""A model on its weights, of a stack of layers that are numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.parallel.layers_loop import LayersLoop
from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.pipeline.interpreter import Pipeline
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.sharded_model import ModelFns, ShardedModel, join_params
from spmd_lm.parallel.zero import ZeroPolicy
from spmd_lm.step.train_step import accumulate, zero_gradients
from tests.helpers import assert_close

STACK = {"w": jnp.array([2.0, 3.0, 5.0])}
PARAMS = {"blocks": STACK, "start": jnp.array(7.0)}


def block(p, x, microbatch, layer):
    return x * p["w"] + layer, {"balance": (p["w"] * microbatch).sum(), "size": x.sum()}


def embed(params, microbatch):
    return params["start"] * microbatch


def head(params, x, microbatch):
    return {"end": 10 * x.sum()}


def model_fns(loop: LayersLoop, of_vectors=lambda params: params) -> ModelFns:
    """of_vectors: makes what these functions take of the model's parameters."""

    def of_params(f):
        return lambda params, *rest: f(of_vectors(params), *rest)

    def all_params(params):
        return params

    return ModelFns(of_params(embed), (of_params(block),), of_params(head), all_params, all_params, loop)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_run_in_order_and_know_their_index(scan):
    x, losses = LayersLoop(scan).run(block, (STACK,), jnp.array(7.0), 1.0)
    inputs = [7.0, 7 * 2.0, (7 * 2) * 3.0 + 1]
    assert float(x) == inputs[2] * 5 + 2
    assert {name: float(loss) for name, loss in losses.items()} == {"balance": 10.0, "size": sum(inputs)}


def test_remat_blocks_compute_the_same_and_their_gradients_are_complete_before_they_are_read():
    stack = {"w": jnp.array([2.0, 3.0, 5.0, 7.0])}

    def result(w, size):
        return LayersLoop(layers_per_remat_block=size).run(block, ({"w": w},), jnp.array(7.0), 1.0)[0]

    alone, in_blocks = (jax.value_and_grad(result)(stack["w"], size) for size in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, alone, in_blocks)
    jaxpr = jax.make_jaxpr(jax.grad(result), static_argnums=1)(stack["w"], 2)
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("optimization_barrier") == 1


@pytest.mark.parametrize("scan", [True, False])
def test_layers_that_share_weights_know_their_index_too(scan):
    x, losses = LayersLoop(scan, layers_per_weight=3).run(block, ({"w": jnp.array([2.0])},), jnp.array(7.0), 1.0)
    inputs = [7.0, 7 * 2.0, (7 * 2) * 2.0 + 1]
    assert float(x) == inputs[2] * 2 + 2
    assert {name: float(loss) for name, loss in losses.items()} == {"balance": 6.0, "size": sum(inputs)}


@pytest.mark.parametrize("scan", [True, False])
def test_auxiliary_losses_join_the_loss_and_reach_the_gradients(scan):
    layout = Layout()
    names = {"blocks": {"w": ("layers",)}, "start": ()}
    plan = Plan(layout, make_mesh(layout, jax.devices()[:1]), "cpu", names, jax.eval_shape(lambda: PARAMS))

    def body(params, batch):
        model = ShardedModel.from_params(model_fns(LayersLoop(scan)), plan, params, jnp.float32, jnp.float32)
        losses, grads = accumulate(model, batch, (model.zero_losses(batch), zero_gradients(model, params)))
        return losses, join_params(grads)

    run = plan.shard_map(body, (plan.param_specs, P()), (P(), plan.param_specs))
    losses, grads = jax.jit(run)(PARAMS, jnp.ones(1))
    losses = {name: float(loss) for name, loss in losses.items()}
    assert losses == {"end": 10 * (43 * 5 + 2), "balance": 10, "size": 7 + 14 + 43}
    assert float(grads["start"]) == 10 * 30 + 1 + 2 + 6
    np.testing.assert_allclose(grads["blocks"]["w"], [10 * 7 * 15 + 1 + 7 + 21, 10 * 14 * 5 + 1 + 14, 10 * 43 + 1])


def columns_summed(matrices):
    """Vectors, which these functions take, of matrices, which ZeRO shards."""
    return jax.tree.map(lambda w: w.sum(-1), matrices)


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("kind", "chunks", "layers_per_remat_block", "zero", "layers"),
    [
        pytest.param("gpipe", 1, 2, 0, 8, marks=pytest.mark.slow),
        ("1f1b", 1, 1, 0, 8),
        ("1f1b", 1, 1, 3, 2),  # one layer per stage
        pytest.param("interleaved", 2, 1, 0, 8, marks=pytest.mark.slow),
        ("interleaved", 2, 2, 0, 8),
        pytest.param("breadth_first", 2, 1, 0, 8, marks=pytest.mark.slow),
        ("breadth_first", 2, 1, 3, 8),
    ],
)
def test_every_schedule_computes_what_one_device_does(kind, chunks, layers_per_remat_block, zero, layers, x64):
    """Rows are divided over data too under ZeRO, and 2 does not divide the 3 rows of a matrix."""
    layout, microbatches = Layout(pipe=2, data=2 if zero else 1), 4
    r = np.random.default_rng(0)
    params = {"blocks": {"w": jnp.asarray(r.normal(size=(layers, 3, 2)))}, "start": jnp.asarray(r.normal(size=(3, 2)))}
    batch = jnp.asarray(r.normal(size=(microbatches, 2, 5, 3)))
    names = {"blocks": {"w": ("layers", "width", "mlp")}, "start": ("width", "mlp")}
    policy = ZeroPolicy.of_stage(zero, layers=layers, breadth_first=kind == "breadth_first")
    mesh, shapes = make_mesh(layout, jax.devices()[: layout.devices]), jax.eval_shape(lambda: params)
    plan = Plan(layout, mesh, "cpu", names, shapes, policy, chunks=chunks)
    fns = model_fns(LayersLoop(layers_per_remat_block=layers_per_remat_block), of_vectors=columns_summed)

    def body(params, batch):
        model = ShardedModel.from_params(fns, plan, params, jnp.float64, jnp.float64)
        pipeline = Pipeline(model, make_schedule(kind, 2, microbatches, chunks), batch)
        zeros = model.zero_losses(batch)
        losses, grads = pipeline.gradients(zeros, zero_gradients(model, params))
        sums = (plan.psum_batch(plan.psum_stages(x)) for x in (losses, pipeline.evaluate(zeros)))
        return *sums, model.reduce_gradients(grads)

    def losses_of_all(params):
        losses = dict.fromkeys(("end", "balance", "size"), 0.0)
        for microbatch in batch:
            x = embed(columns_summed(params), microbatch)
            for i, w in enumerate(params["blocks"]["w"]):
                x, of_layer = block(columns_summed({"w": w}), x, microbatch, i)
                losses = {name: loss + of_layer.get(name, 0) for name, loss in losses.items()}
            losses["end"] += head(params, x, microbatch)["end"]
        return sum(losses.values()), losses

    run = plan.shard_map(body, (plan.param_specs, plan.row_spec), (P(), P(), plan.param_specs))
    trained, evaluated, grads = jax.jit(run)(plan.from_canonical(params), batch)
    wanted, wanted_losses = jax.jit(jax.grad(losses_of_all, has_aux=True))(params)
    assert_close(trained, wanted_losses, 1e-12)
    assert_close(evaluated, wanted_losses, 1e-12)
    assert_close(plan.canonical(grads), wanted, 1e-12)
