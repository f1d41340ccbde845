"""float16: the scale moves as its rules say, a step that overflows leaves no trace, and every layout skips the same."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.config.schema import Precision, RunConfig
from spmd_lm.errors import Exit
from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import ZeroPolicy
from spmd_lm.step.loss_scale import LARGEST, all_finite, init_loss_scale, next_loss_scale
from spmd_lm.step.program import Program
from spmd_lm.training import loop
from tests.helpers import FLOAT32, assert_equal, device_batch, make_config, program

FLOAT16 = FLOAT32 | {"compute": "float16", "loss_scale": "dynamic"}

# ---- the scale

OVERFLOW, CLEAN = False, True
TABLE = [  # what a step does to scale, growth_tracker, hysteresis_tracker, skipped; window 3, hysteresis 2, minimum 1
    (OVERFLOW, 8, 0, 1, 1),  # the first is forgiven
    (CLEAN, 8, 1, 1, 1),
    (CLEAN, 8, 2, 1, 1),  # what is not a full window forgives none
    (OVERFLOW, 4, 0, 0, 2),  # the second halves
    (CLEAN, 4, 1, 0, 2),
    (OVERFLOW, 2, 0, -1, 3),  # and so does each one after it, clean steps in between or not
    (CLEAN, 2, 1, -1, 3),
    (CLEAN, 2, 2, -1, 3),
    (CLEAN, 4, 0, 2, 3),  # a full window doubles, and counts anew
    (CLEAN, 4, 1, 2, 3),
    (CLEAN, 4, 2, 2, 3),
    (CLEAN, 8, 0, 2, 3),
    (OVERFLOW, 8, 0, 1, 4),
    (OVERFLOW, 4, 0, 0, 5),
    (OVERFLOW, 2, 0, -1, 6),
    (OVERFLOW, 1, 0, -2, 7),
    (OVERFLOW, 1, 0, -3, 8),  # the minimum
    (CLEAN, 1, 1, -3, 8),
    (CLEAN, 1, 2, -3, 8),
    (CLEAN, 2, 0, 2, 8),
]


@pytest.mark.mutants
def test_the_scale_moves_as_its_rules_say():
    p = Precision(**FLOAT16, initial_scale=8, scale_window=3)
    state, move = init_loss_scale(p), jax.jit(functools.partial(next_loss_scale, p))
    assert dataclasses.astuple(state) == (8, 0, 2, 0)
    for step, (clean, *want) in enumerate(TABLE, 1):
        state = move(state, np.bool_(clean))
        assert [x.item() for x in dataclasses.astuple(state)] == want, step
        assert [str(x.dtype) for x in dataclasses.astuple(state)] == ["float32", "int32", "int32", "int32"]


def test_the_scale_begins_at_2_to_the_16_and_does_not_grow_without_end():
    p = Precision(**FLOAT16)
    assert (p.initial_scale, p.scale_window, p.hysteresis, p.min_scale) == (2**16, 1000, 2, 1)
    megatron = Precision(**FLOAT16, initial_scale=4294967296)
    assert init_loss_scale(megatron).scale.item() == 2**32
    state = dataclasses.replace(init_loss_scale(p), growth_tracker=np.int32(999))
    assert next_loss_scale(p, state, np.bool_(CLEAN)).scale.item() == 2**17
    state = dataclasses.replace(state, scale=np.float32(LARGEST))
    assert next_loss_scale(p, state, np.bool_(CLEAN)).scale.item() == LARGEST
    assert init_loss_scale(Precision(**FLOAT32)) is None


# ---- one step of it


def one_step(precision: dict, **parallel) -> RunConfig:
    """A run without dropout that learns next to nothing: gradients stay as large as they are at first."""
    rest = {"model": {"dropout": 0.0, "attention_dropout": 0.0}, "optim": {"lr": 1e-5, "min_lr": 1e-6}}
    return make_config(precision=precision, parallel=parallel, **rest)


# Of the powers of 2 from here down 2^20.7 overflows, by 24% at least, and 2^19.7 is clean by as much, on every layout.
SCALED = FLOAT16 | {"scale_window": 5, "initial_scale": 2.0**25.7}
ONE = one_step(SCALED, data=1, microbatches=8)
LITTLE, SAFE, TOO_MUCH = 2.0**-10, 2.0**12, 2.0**40  # LITTLE: as if the batch were a thousand times as large


def rescaled(p: Program, state, scale: float):
    """`state` with this scale; everything in it is new."""
    state = jax.tree.map(lambda x: x.copy(), state)
    put = jax.device_put(np.float32(scale), p.state_shardings.loss_scale.scale)
    return dataclasses.replace(state, loss_scale=dataclasses.replace(state.loss_scale, scale=put))


@functools.cache
def after_two() -> tuple[Program, tuple]:
    """The run of ONE after two updates: moments are no longer zero."""
    p = program(ONE)
    state = rescaled(p, p.init(), SAFE)
    for step in range(2):
        state, figures = p.step(state, device_batch(p, step))
        assert not figures["skipped"]
    return p, state


@pytest.mark.slow
def test_a_skipped_step_leaves_parameters_and_moments_as_they_were():
    p, before = after_two()
    after, figures = p.step(rescaled(p, before, TOO_MUCH), device_batch(p, 2))
    assert figures["skipped"] and figures["skipped_steps"] == 1 and figures["loss_scale"] == TOO_MUCH
    assert_equal((after.params, after.opt_state), (before.params, before.opt_state))
    assert (int(before.step), int(after.step)) == (2, 3)
    assert int(after.updates) == int(before.updates) == 2


def test_a_step_after_a_skipped_one_is_the_update_that_it_would_have_been():
    """The learning rate, which warms up here, and Adam's correction do not count what was skipped."""
    p = program(
        ONE.model_copy(update={"model": ONE.model.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})})
    )
    runs = []
    for scales in ([SAFE, SAFE], [TOO_MUCH, SAFE, TOO_MUCH, SAFE]):
        state, batch = p.init(), 0
        for scale in scales:
            state, figures = p.step(rescaled(p, state, scale), device_batch(p, batch))
            batch += scale == SAFE
            assert bool(figures["skipped"]) == (scale == TOO_MUCH)
        runs.append((state, figures))
    (plain, told), (other, told_too) = runs
    assert (int(plain.step), int(other.step)) == (2, 4)
    assert_equal((other.params, other.opt_state), (plain.params, plain.opt_state))
    assert told["lr"] == told_too["lr"] and told["loss"] == told_too["loss"]


@pytest.mark.mutants
@pytest.mark.slow
def test_the_loss_is_told_unscaled_and_small_gradients_are_kept():
    """Scaled, the update follows float32; unscaled, what float16 has no number for is lost."""
    p, exact = program(ONE), program(one_step(FLOAT32, data=1, microbatches=8))
    want, told = exact.step(exact.init(), device_batch(exact, 0))
    errors = {}
    for scale in (LITTLE, SAFE):
        got, figures = p.step(rescaled(p, p.init(), scale), device_batch(p, 0))
        assert float(figures["loss"]) == pytest.approx(float(told["loss"]), rel=1e-4)
        errors[scale] = distance(got.opt_state.mu, want.opt_state.mu)
    assert float(figures["grad_norm"]) == pytest.approx(float(told["grad_norm"]), rel=1e-3)
    assert errors[SAFE] < 2e-3  # float16 rounds by up to 5e-4
    assert errors[LITTLE] > 0.1


def distance(a, b) -> float:
    """Relative distance of two trees, in the norm of the second."""

    def norm(tree):
        return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))

    return norm(jax.tree.map(np.subtract, jax.device_get(a), jax.device_get(b))) / norm(b)


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("worst", "clean"),
    [(1.0, True), (1e30, True), (np.inf, False), (np.nan, False)],  # the square of 1e30 is no float32
)
def test_one_entry_of_one_device_is_everybody_s(worst, clean):
    layout = Layout(data=2, model=4)
    names, shapes = {"up": ("width", "mlp")}, {"up": jax.ShapeDtypeStruct((6, 8), np.float32)}
    plan = Plan(layout, make_mesh(layout, jax.devices()), "cpu", names, shapes, ZeroPolicy.of_stage(1))
    found = plan.shard_map(lambda grads: all_finite(plan, grads)[None], (plan.param_specs,), P(("data", "model")))
    grads = {"up": np.ones((6, 8), np.float32)}
    grads["up"][5, 7] = worst
    assert jax.jit(found)(grads).tolist() == 8 * [clean]


# ---- layouts

# Each device has two rows of a microbatch, as ONE has, so that the sums that float16 has to hold are of the same.
LAYOUTS = [
    {"replica": 2, "data": 2, "zero": 2, "microbatches": 2},
    pytest.param(
        {"pipe": 2, "data": 2, "model": 2, "zero": 3, "sequence": True, "microbatches": 4}, marks=pytest.mark.slow
    ),
]


@functools.cache
def told(config: RunConfig) -> dict[str, np.ndarray]:
    """The figures of 24 steps, all of one batch."""
    p = program(config)
    state, steps = p.init(), []
    for _ in range(24):
        state, figures = p.step(state, device_batch(p, 0))
        steps.append(jax.device_get(figures))
    assert int(state.updates) == 24 - steps[-1]["skipped_steps"]
    return {name: np.array([figures[name] for figures in steps]) for name in steps[0]}


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.slow
def test_every_layout_skips_the_same_steps(parallel):
    got, want = told(one_step(SCALED, **parallel)), told(ONE)
    assert want["skipped"].tolist() == 7 * [True] + 5 * [False] + 2 * [True] + 5 * [False] + 2 * [True] + 3 * [False]
    for name in ("skipped", "skipped_steps", "loss_scale", "lr"):
        assert got[name].tolist() == want[name].tolist(), name
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)


# ---- a run

RUN = {
    "model": {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocab": 32},
    "data": {"source": "synthetic"},
    "parallel": {"zero": 1},
    "optim": {"lr": 1e-2, "warmup": 5, "decay": "constant"},
    "train": {"steps": 90, "batch": 16, "log_every": 1, "eval_every": 90},
    "checkpoint": {"every": 10, "keep": 20},
}
TOO_LARGE = FLOAT16 | {"scale_window": 20, "initial_scale": 2.0**32}


def run_in(directory, precision, **train) -> RunConfig:
    tree = RUN | {"run": {"dir": str(directory)}, "precision": precision, "train": RUN["train"] | train}
    return RunConfig.model_validate(tree)


def records(directory):
    """Records without times."""
    told = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in ("tokens_per_second", "mfu", "seconds")} for r in told]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """A run from a scale that is far too large, in a small window; not to be written to."""
    directory = tmp_path_factory.mktemp("float16") / "run"
    assert loop.train(run_in(directory, TOO_LARGE)) is Exit.DONE
    return directory


@pytest.mark.slow
def test_a_run_finds_its_scale_and_ends_where_float32_does(scaled, tmp_path):
    assert loop.train(run_in(tmp_path, FLOAT32)) is Exit.DONE
    got, want = records(scaled), records(tmp_path)
    assert got[-1]["eval_loss"] == pytest.approx(want[-1]["eval_loss"], rel=0.02)
    assert got[-1]["eval_loss"] < 1.5
    assert "loss_scale" not in want[-1]
    assert got[0]["loss_scale"] == got[1]["loss_scale"] == 2**32  # hysteresis
    assert got[2]["loss_scale"] == 2**31
    skipped = [r["skipped"] for r in got]
    assert [r["skipped_steps"] for r in got] == np.cumsum(skipped).tolist()
    assert [r["grad_norm"] is None for r in got] == skipped
    assert skipped[:5] == [True] * 5 and 5 < sum(skipped) < 45
    changes = np.diff([np.log2(r["loss_scale"]) for r in got])
    assert set(changes) == {-1, 0, 1}  # it grew as well


@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit(scaled, tmp_path):
    """The run resumes within a window, after an overflow: every scalar counts."""
    directory = tmp_path / "run"
    shutil.copytree(scaled, directory)
    for step in range(40, 91, 10):
        shutil.rmtree(directory / "checkpoints" / str(step))
    (directory / "status.json").unlink()
    config = run_in(directory, TOO_LARGE)
    state = Checkpointer(directory / "checkpoints").restore(30, Program(config).abstract_canonical())
    assert 0 < state.loss_scale.growth_tracker < 20 and state.loss_scale.hysteresis_tracker < 2
    assert loop.train(config) is Exit.DONE
    assert records(directory) == records(scaled)
    ends = [
        Checkpointer(d / "checkpoints").restore(90, Program(config).abstract_canonical()) for d in (scaled, directory)
    ]
    assert_equal(*ends)


def test_a_state_without_a_scale_gets_one():
    with_one, without = (Program(make_config(precision=p), jax.devices()[:1]) for p in (FLOAT16, FLOAT32))
    bare = without.canonical(without.init())
    again = with_one.from_canonical(bare)
    assert bare.loss_scale is None and again.loss_scale == jax.device_get(init_loss_scale(with_one.config.precision))
    assert_equal(with_one.canonical(again).params, bare.params)


def test_a_run_saved_with_another_initial_scale_keeps_its_own_scale():
    """Scales of older runs began at 2^32."""
    before, now = (Program(make_config(precision=p), jax.devices()[:1]) for p in (TOO_LARGE, FLOAT16))
    again = now.from_canonical(before.canonical(before.init()))
    assert again.loss_scale.scale.item() == 2**32 and now.init().loss_scale.scale.item() == 2**16


@pytest.mark.slow
def test_a_run_may_take_up_float16_and_give_it_up(scaled, tmp_path):
    """A scale is left behind, or begins anew; without one a checkpoint is what it was before there were any."""
    with_one, without = (Program(run_in(tmp_path, precision)) for precision in (FLOAT16, FLOAT32))
    saved, other = Checkpointer(scaled / "checkpoints"), Checkpointer(tmp_path)
    state, meta = saved.restore(90, without.abstract_canonical()), saved.meta(90)
    assert state.loss_scale is None and int(state.step) == 90
    other.save(90, without.canonical(without.from_canonical(state)), meta)
    other.close()
    assert "scaling" not in (tmp_path / "90/state/_METADATA").read_text()
    again = with_one.from_canonical(other.restore(90, with_one.abstract_canonical()))
    assert [x.item() for x in jax.tree.leaves(again.loss_scale)] == [2**16, 0, 2, 0]
    assert_equal(with_one.canonical(again).params, state.params)
