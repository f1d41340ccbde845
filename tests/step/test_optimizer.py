import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.config.schema import AdamW
from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.plan import Plan
from spmd_lm.step.optimizer import Optimizer, decay_mask, lr_schedule
from spmd_lm.step.state import TrainState
from tests import reference
from tests.helpers import assert_close, param_trees

NAMES = {
    "table": ("vocab", "width"),
    "up": ("layers", "width", "mlp"),
    "up_bias": ("layers", "mlp"),
    "scale": ("width",),
}
SHAPES = {"table": (16, 6), "up": (2, 6, 8), "up_bias": (2, 8), "scale": (6,)}


def trees(seed, size=1.0):
    r = np.random.default_rng(seed)
    return {name: size * r.normal(size=shape) for name, shape in SHAPES.items()}


def make_update(config, layout, steps=10):
    """(state, gradients) -> (state, scalars), compiled for a layout."""
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in SHAPES.items()}
    plan = Plan(layout, make_mesh(layout, jax.devices()[: layout.devices]), "cpu", NAMES, shapes)
    optimizer = Optimizer(config, steps)
    specs = TrainState(P(), plan.param_specs, optimizer.state_like(shapes, plan.param_specs, P()))
    body = lambda state, grads: optimizer.update(plan, state, grads)  # noqa: E731
    return jax.jit(plan.shard_map(body, (specs, plan.param_specs), (specs, {"grad_norm": P(), "lr": P()})))


OPTIM = AdamW(lr=0.1, min_lr=0.01, warmup=2, weight_decay=0.3, clip=5.0)


@pytest.mark.parametrize("clip", [5.0, 0.0])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2, model=4), Layout(replica=2, model=2)], ids=str)
def test_five_updates_are_adamw_s(layout, clip, x64):
    config = OPTIM.model_copy(update={"clip": clip})
    update = make_update(config, layout)
    params, mu, nu = trees(0), trees(0, 0.0), trees(0, 0.0)
    state = TrainState(jnp.int32(0), params, Optimizer(config, 10).init(params))
    for step in range(5):
        grads = trees(1 + step, 10.0**-step)  # the first ones are clipped, the last ones are not
        params, mu, nu, norm = reference.adamw(config, 10, step, params, mu, nu, grads)
        state, scalars = update(state, grads)
        assert float(scalars["grad_norm"]) == pytest.approx(norm, rel=1e-14)
        assert float(scalars["lr"]) == pytest.approx(reference.learning_rate(config, 10, step), rel=1e-14)
        assert int(state.step) == step + 1
        for got, want in zip(param_trees(state), (params, mu, nu), strict=True):
            assert_close(jax.tree.map(np.asarray, got), want, 1e-12)


def test_no_gradient_is_no_step_but_decay(x64):
    """And no division by the norm."""
    params, zero = trees(0), trees(0, 0.0)
    state, scalars = make_update(OPTIM, Layout())(
        TrainState(jnp.int32(0), params, Optimizer(OPTIM, 10).init(params)), zero
    )
    assert float(scalars["grad_norm"]) == 0
    for name, p in params.items():
        kept = 1 - 0.05 * 0.3 if name in ("table", "up") else 1
        np.testing.assert_allclose(state.params[name], kept * p, rtol=1e-15)


def test_biases_and_norms_do_not_decay():
    assert decay_mask(NAMES) == {"table": True, "up": True, "up_bias": False, "scale": False}


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_the_schedule_at_its_corners(decay):
    rate = lr_schedule(AdamW(lr=1.0, min_lr=0.1, warmup=10, decay=decay, decay_steps=110), 1000)
    half, floor = {"cosine": (0.55, 0.1), "linear": (0.55, 0.1), "constant": (1.0, 1.0)}[decay]
    points = {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 60: half, 110: floor, 111: floor, 10_000: floor}
    assert {step: pytest.approx(float(rate(jnp.int32(step))), rel=1e-6) for step in points} == points


@pytest.mark.parametrize("warmup", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_the_schedule_step_by_step(decay, warmup, x64):
    """To the end of the run, where no other end is named, and past it."""
    config = AdamW(lr=3e-4, min_lr=1e-5, warmup=warmup, decay=decay)
    got = lr_schedule(config, 20)(jnp.arange(25.0))
    np.testing.assert_allclose(got, [reference.learning_rate(config, 20, step) for step in range(25)], rtol=1e-12)
