"""Pipelines against the reference, in float64: a stage here and a stage there compute the same run."""

import math

import jax
import numpy as np
import pytest

from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.step.program import Program
from tests.helpers import (
    assert_close,
    assert_equal,
    assert_states_close,
    canonical,
    device_batch,
    make_config,
    program,
    train_steps,
    trained,
    trained_reference,
)

pytestmark = pytest.mark.usefixtures("x64")
MODEL = {"layers": 4}
slow, watcher = pytest.mark.slow, pytest.mark.mutants


def case(schedule: str, pipe: int, chunks: int, microbatches: int, remat: str = "full", *marks, **parallel):
    keys = {"schedule": schedule, "pipe": pipe, "chunks": chunks, "microbatches": microbatches, "data": 1} | parallel
    return pytest.param(keys, remat, marks=marks, id="-".join(f"{k}={v}" for k, v in keys.items()) + f"-{remat}")


CASES = [
    case("1f1b", 2, 1, 4, "full", watcher, data=2, model=2, zero=3, sequence=True),
    case("interleaved", 2, 2, 4, "full", slow, watcher, layers=8),
    case("breadth_first", 2, 2, 4, "full", slow, watcher, data=2, zero=3, layers=8),
    case("gpipe", 2, 1, 2, "block", slow, watcher, model=2, layers=8),
    case("breadth_first", 2, 2, 2, "none", slow, watcher, run_idle_stages=True, data=2, model=2, zero=2, sequence=True),
    # every schedule, 2, 4 and 8 stages, 1, 2 and 4 chunks; every stage of ZeRO; a diagonal of the rest
    case("gpipe", 4, 1, 4, "full", slow, model=2, zero=1),
    case("gpipe", 8, 1, 4, "none", slow),
    case("gpipe", 2, 1, 3, "selective", slow, data=2, zero=3, replica=2),
    case("1f1b", 2, 1, 1, "residual", slow, replica=2, data=2, zero=3, reduce_once=True),
    case("1f1b", 4, 1, 8, "none", slow, data=2, zero=2),
    case("1f1b", 4, 1, 2, "full", slow, model=2, sequence=True, run_idle_stages=True),
    case("1f1b", 8, 1, 8, "full", slow),
    case("1f1b", 2, 1, 5, "none", slow, data=2, model=2, zero=1, scan=False),
    case("interleaved", 2, 4, 2, "none", slow, data=4, zero=3),
    case("interleaved", 4, 2, 4, "residual", slow, model=2, sequence=True, zero=1),
    case("interleaved", 4, 4, 8, "full", slow, data=2, zero=2),
    case("interleaved", 8, 2, 8, "full", slow),
    case("interleaved", 2, 2, 8, "selective", slow, model=4, zero=0, run_idle_stages=True),
    case("breadth_first", 2, 4, 8, "none", slow, model=4),
    case("breadth_first", 4, 1, 3, "full", slow, data=2, zero=1),
    case("breadth_first", 4, 2, 8, "residual", slow, data=2, zero=2),
    case("breadth_first", 2, 2, 4, "full", slow, data=2, model=2, zero=3, sequence=True, scan=False),
    case("breadth_first", 8, 2, 8, "full", slow),
    case("breadth_first", 2, 1, 4, "none", slow, data=4, zero=3, reduce_once=True),
]


def config_of(keys: dict, remat: str = "full", **sections):
    model = {"layers": max(4, keys["pipe"] * keys["chunks"])}
    model |= {name: keys[name] for name in ("layers", "scan") if name in keys}
    keys = {name: value for name, value in keys.items() if name not in model}
    batch = math.lcm(8, keys["microbatches"] * keys["data"] * keys.get("replica", 1))
    # Where gradients are nearly 0 Adam divides rounding by rounding: with eps 1e-8 and 8 layers one device alone is
    # 8e-12 from the reference.
    optim = {"eps": 1e-6} if model["layers"] > 4 else {}
    policy = {"policy": remat} | ({"block_size": 2} if remat == "block" else {})
    return make_config(parallel=keys, model=model, remat=policy, train={"batch": batch}, optim=optim, **sections)


@pytest.mark.parametrize(("parallel", "remat"), CASES, ids=str)
def test_parity(parallel, remat):
    """Dropout is on."""
    config = config_of(parallel, remat)
    alone = config.model_copy(update={"parallel": make_config().parallel, "remat": make_config().remat})
    got, want = trained(config), trained_reference(alone)
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"pipe": 2, "microbatches": 4, "data": 2, "model": 2, "zero": 3, "sequence": True}, marks=slow),
        pytest.param({"pipe": 4, "microbatches": 8, "data": 2, "zero": 1}, marks=slow),
    ],
    ids=str,
)
def test_gpipe_and_1f1b_are_equal_bit_for_bit(parallel):
    """Both add up microbatches in their order.  (Chunks lay layers elsewhere, and the norm of the gradients is then
    added up in another order; breadth_first does the embedding's gradient of all microbatches at once.)

    As users compile: what LLVM does not optimize, it contracts to fused multiply-adds in one program and not in the
    other."""
    run = {"compiler_options": {"xla_backend_optimization_level": 3}}
    schedules = [parallel | {"schedule": kind, "chunks": 1} for kind in ("1f1b", "gpipe")]
    one, other = (train_steps(Program(config_of(keys, run=run))) for keys in schedules)
    assert one.losses.tolist() == other.losses.tolist() and one.norms.tolist() == other.norms.tolist()
    assert_equal(one.last, other.last)


def test_one_stage_has_one_chunk():
    """A sweep over stages may end at one, with no layers to divide."""
    one = program(make_config(parallel={"pipe": 1, "schedule": "gpipe", "chunks": 2}, model={"layers": 3}))
    assert one.schedule.chunks == 1 and one.plan.chunks == 1


@watcher
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=slow)])
@pytest.mark.slow
def test_evaluation_sampling_and_canonical_states(schedule):
    """Evaluation and sampling find the same model."""
    chunks = 2 if schedule == "interleaved" else 1
    config = make_config(
        parallel={"pipe": 2, "data": 2, "microbatches": 2, "zero": 3, "schedule": schedule, "chunks": chunks},
        model=MODEL,
    )
    p, one = program(config), program(make_config(model=MODEL))
    state = p.init()
    got, want = (each.evaluate(each.init().params, device_batch(each, 0)) for each in (p, one))
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), 1e-12)
    assert_equal(p.canonical(state), canonical(p, state))
    assert_equal(p.from_canonical(p.canonical(state)), state)
    prompts = [np.arange(n, dtype=np.int32) for n in (1, 5, 9, 12)]
    texts = []
    for each in (p, one):  # ten times the first weights: theirs is the same text whatever the layers' order
        params = jax.tree.map(lambda x: 10 * x, each.init().params)
        texts.append(Generator(each, 4, Sampling(tokens=8, greedy=True)).generate(params, prompts))
    assert [text.tolist() for text in texts[0]] == [text.tolist() for text in texts[1]]
    assert len({tuple(text.tolist()) for text in texts[0]}) == 4
