import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.config.schema import AdamW, Lion
from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import merge
from spmd_lm.step.optimizer import (
    Optimizer,
    decay_mask,
    global_norm,
    lr_schedule,
    trained_layers,
    without_frozen_layers,
)
from spmd_lm.step.state import TrainState
from tests import reference
from tests.helpers import assert_close, canonical, device_batch, param_trees, program, run_of

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


def update(optimizer, plan, state, grads):
    masks = trained_layers(plan, grads)
    norm = global_norm(plan, without_frozen_layers(masks, grads))
    scalars, params = optimizer.scalars(state, norm, jnp.bool_(True)), plan.trained(state.params)
    params, opt_state = optimizer.update(plan.names, masks, scalars, params, state.opt_state, grads)
    state = TrainState(state.step + 1, merge(state.params, params), opt_state)
    return state, {"grad_norm": norm, "lr": scalars.lr}


def make_update(config, layout, steps=10):
    """(state, gradients) -> (state, scalars), compiled for a layout."""
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float64) for name, shape in SHAPES.items()}
    plan = Plan(layout, make_mesh(layout, jax.devices()[: layout.devices]), "cpu", NAMES, shapes)
    optimizer = Optimizer(config, steps)
    abstract = TrainState(jnp.int32(0), shapes, jax.eval_shape(optimizer.rule.init, shapes))
    specs = abstract.map_params(lambda _: plan.param_specs, lambda _: P())

    def body(state, grads):
        return update(optimizer, plan, state, grads)

    return jax.jit(plan.shard_map(body, (specs, plan.param_specs), (specs, {"grad_norm": P(), "lr": P()})))


OPTIM = AdamW(lr=0.1, min_lr=0.01, warmup=2, weight_decay=0.3, clip=5.0)


@pytest.mark.parametrize(("layout", "chunks"), [(Layout(pipe=2, data=2), 2), (Layout(data=2), 1)], ids=str)
def test_frozen_layers_stay_wherever_their_stage_is(layout, chunks, x64):
    """Layers 0, 3 and 6 of eight, and a parameter that is no layer."""
    r = np.random.default_rng(0)
    params, grads = (
        {"blocks": {"w": r.normal(size=(8, 6))}, "start": r.normal(size=6), "end": r.normal(size=6)} for _ in range(2)
    )
    frozen = np.arange(8) % 3 == 0
    names = {"blocks": {"w": ("layers", "width")}, "start": ("width",), "end": ("width",)}
    shapes = jax.eval_shape(lambda: params)
    mesh = make_mesh(layout, jax.devices()[: layout.devices])
    plan = Plan(layout, mesh, "cpu", names, shapes, chunks=chunks, freeze=("blocks.[036].w", "start"))
    optimizer, in_order = Optimizer(OPTIM, 10), plan.from_canonical(params)
    opt_state = optimizer.rule.init(plan.trained(in_order))._replace(count=jnp.int32(5))
    assert opt_state.mu.keys() == {"blocks", "end"}
    state = TrainState(jnp.int32(5), in_order, opt_state)
    specs = TrainState(P(), plan.param_specs, optax.ScaleByAdamState(P(), *(plan.trained(plan.param_specs),) * 2))

    def body(state, grads):
        return update(optimizer, plan, state, grads)

    trained_specs = plan.trained(plan.param_specs)
    run = plan.shard_map(body, (specs, trained_specs), (specs, {"grad_norm": P(), "lr": P()}))
    state, scalars = jax.jit(run)(state, plan.trained(plan.from_canonical(grads)))
    trained = [grads["blocks"]["w"][~frozen], grads["end"]]
    assert float(scalars["grad_norm"]) == pytest.approx(np.sqrt(sum(np.square(g).sum() for g in trained)), rel=1e-14)
    moved = jax.tree.map(lambda new, old: np.asarray(new != old), plan.canonical(state.params), params)
    assert moved["blocks"]["w"].all(1).tolist() == moved["blocks"]["w"].any(1).tolist() == (~frozen).tolist()
    assert not moved["start"].any() and moved["end"].all()


def test_any_leaves_are_updated_as_all_together(x64):
    plan = Plan(Layout(), make_mesh(Layout(), jax.devices()[:1]), "cpu", NAMES, jax.eval_shape(lambda: trees(0)))
    optimizer, params, grads = Optimizer(OPTIM, 10), trees(0), trees(1)
    state = TrainState(jnp.int32(0), params, optimizer.rule.init(params))
    scalars = optimizer.scalars(state, jnp.float64(7), jnp.bool_(True))
    whole, moments = optimizer.update(plan.names, {}, scalars, params, state.opt_state, grads)
    for name in params:
        (one, p, g) = ({name: tree[name]} for tree in (whole, params, grads))
        alone, moments_alone = optimizer.update(plan.names, {}, scalars, p, optimizer.rule.init(p), g)
        assert_close(alone, one, 1e-15)
        assert_close(moments_alone.nu, {name: moments.nu[name]}, 1e-15)
        assert moments_alone.count == moments.count


@pytest.mark.parametrize("clip", [5.0, 0.0])
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2, model=4), Layout(replica=2, model=2)], ids=str)
def test_five_updates_are_adamw_s(layout, clip, x64):
    config = OPTIM.model_copy(update={"clip": clip})
    update = make_update(config, layout)
    params, mu, nu = trees(0), trees(0, 0.0), trees(0, 0.0)
    state = TrainState(jnp.int32(0), params, Optimizer(config, 10).rule.init(params))
    for step in range(5):
        grads = trees(1 + step, 10.0**-step)  # the first ones are clipped, the last ones are not
        params, mu, nu, norm = reference.adamw(config, 10, step, params, mu, nu, grads)
        state, scalars = update(state, grads)
        assert float(scalars["grad_norm"]) == pytest.approx(norm, rel=1e-14)
        assert float(scalars["lr"]) == pytest.approx(reference.learning_rate(config, 10, step), rel=1e-14)
        assert int(state.step) == step + 1
        for got, want in zip(param_trees(state), (params, mu, nu), strict=True):
            assert_close(jax.tree.map(np.asarray, got), want, 1e-12)


def test_five_updates_are_lion_s(x64):
    """arXiv:2302.06675, algorithm 2."""
    config = Lion(kind="lion", lr=0.01, warmup=2, weight_decay=0.3, clip=0.0)
    update = make_update(config, Layout(data=2, model=4))
    params, momentum = trees(0), trees(0, 0.0)
    state = TrainState(jnp.int32(0), trees(0), Optimizer(config, 10).rule.init(trees(0)))
    for step in range(5):
        grads, lr = trees(1 + step), reference.learning_rate(config, 10, step)
        for name, p in params.items():
            decay = 0.3 * p if name in ("table", "up") else 0
            params[name] = p - lr * (np.sign(0.9 * momentum[name] + 0.1 * grads[name]) + decay)
            momentum[name] = 0.99 * momentum[name] + 0.01 * grads[name]
        state, _ = update(state, grads)
        for got, want in ((state.params, params), (state.opt_state.mu, momentum)):
            assert_close(jax.tree.map(np.asarray, got), want, 1e-12)


LION = {"kind": "lion", "lr": 1e-3, "b1": 0.8}
LAYOUT_OF_STAGE = ["data4-model2", "data8-zero1", "data4-model2-zero2", "data2-model4-zero3"]


@pytest.mark.parametrize(
    "layout",
    [LAYOUT_OF_STAGE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUT_OF_STAGE[1:])],
)
@pytest.mark.slow
def test_a_second_optimizer_is_sharded_as_the_first(layout, x64):
    """Lion, under every stage of ZeRO, as on one device.  Without biases: the gradient of a key's bias is zero but for
    rounding, and Lion takes its sign."""
    sections = {"model": {"use_bias": False}, "optim": LION}
    got, want = lion_run(run_of(layout, 1, **sections)), lion_run(run_of("one", 1, **sections))
    assert got[0] == pytest.approx(want[0], rel=1e-12)
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert_close(ours, theirs, 1e-12)


def lion_run(config):
    """Losses and norms, parameters and momentum of three steps."""
    p = program(config)
    state, metrics = p.init(), []
    assert jax.tree.structure(state.opt_state.mu) == jax.tree.structure(state.params)
    shardings = jax.tree.map(lambda x: x.sharding, (state.opt_state.mu, state.params))
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, *shardings))
    for step in range(3):
        state, step_metrics = p.step(state, device_batch(p, step))
        metrics += [float(step_metrics["loss"]), float(step_metrics["grad_norm"])]
    last = canonical(p, state)
    return metrics, last.params, last.opt_state.mu


def test_no_gradient_is_no_step_but_decay(x64):
    """Nothing is divided by the norm."""
    params, zero = trees(0), trees(0, 0.0)
    state, scalars = make_update(OPTIM, Layout())(
        TrainState(jnp.int32(0), params, Optimizer(OPTIM, 10).rule.init(params)), zero
    )
    assert float(scalars["grad_norm"]) == 0
    for name, p in params.items():
        kept = 1 - 0.05 * 0.3 if name in ("table", "up") else 1
        np.testing.assert_allclose(state.params[name], kept * p, rtol=1e-15)


def test_biases_and_norms_do_not_decay():
    assert decay_mask(NAMES) == {"table": True, "up": True, "up_bias": False, "scale": False}


@pytest.mark.parametrize("decay", ["cosine", "linear", "sqrt", "constant"])
def test_the_schedule_at_its_corners(decay):
    rate = lr_schedule(AdamW(lr=1.0, min_lr=0.1, warmup=10, decay=decay, decay_steps=110), 1000)
    half = {"cosine": 0.55, "linear": 0.55, "sqrt": 1 - 0.9 / math.sqrt(2), "constant": 1.0}[decay]
    floor = 1.0 if decay == "constant" else 0.1
    points = {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 60: half, 110: floor, 111: floor, 10_000: floor}
    assert {step: pytest.approx(float(rate(jnp.int32(step))), rel=1e-6) for step in points} == points


@pytest.mark.parametrize("start", [None, 7, 12, 19])
@pytest.mark.parametrize("warmup", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("decay", ["cosine", "linear", "sqrt", "constant"])
def test_the_schedule_step_by_step(decay, warmup, start, x64):
    """Decay begins at decay_start, if set, and ends with the run; steps past the end are compared too."""
    start = None if warmup > (start or 0) or decay == "constant" else start
    config = AdamW(lr=3e-4, min_lr=1e-5, warmup=warmup, decay=decay, decay_start=start)
    got = lr_schedule(config, 20)(jnp.arange(25.0))
    np.testing.assert_allclose(got, [reference.learning_rate(config, 20, step) for step in range(25)], rtol=1e-12)
