"""Pipelines against the reference, in float64: a stage here and a stage there compute the same run."""

import numpy as np
import pytest

from spmd_lm.config import checks
from spmd_lm.train.sample import Generator
from spmd_lm.train.sampling import Sampling
from tests.helpers import (
    assert_close,
    assert_equal,
    canonical,
    device_batch,
    make_config,
    program,
    trained,
    trained_reference,
)

pytestmark = pytest.mark.usefixtures("x64", "allowed")
MODEL = {"layers": 4}
slow, watcher = pytest.mark.slow, pytest.mark.mutants

CASES = [
    pytest.param(
        {"pipe": 2, "data": 2, "model": 2, "zero": 3, "sequence": True, "microbatches": 4}, "full", marks=watcher
    ),
    pytest.param({"pipe": 2, "microbatches": 2, "schedule": "gpipe", "model": 2}, "none", marks=[slow, watcher]),
    pytest.param({"pipe": 4, "data": 2, "zero": 2, "microbatches": 8}, "none", marks=slow),
    pytest.param({"pipe": 2, "replica": 2, "data": 2, "zero": 3, "reduce_once": True}, "residual", marks=slow),
    ({"pipe": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}, "full"),
    pytest.param(
        {"pipe": 2, "data": 2, "zero": 3, "microbatches": 4, "schedule": "breadth_first", "chunks": 2},
        "full",
        marks=slow,
    ),
    pytest.param({"pipe": 4, "model": 2, "zero": 1, "microbatches": 4, "schedule": "gpipe"}, "full", marks=slow),
]


@pytest.fixture
def allowed(monkeypatch):
    """Configurations refuse pipelines until all verbs know them; the step does."""
    monkeypatch.setattr(checks, "CHECKS", [c for c in checks.CHECKS if c is not checks.not_in_this_version])


@pytest.mark.parametrize(("parallel", "remat"), CASES, ids=str)
def test_parity(parallel, remat):
    got = trained(make_config(parallel={"data": 1} | parallel, model=MODEL, remat={"policy": remat}))
    want = trained_reference(make_config(model=MODEL))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    for tree in ("params", "mu", "nu"):
        assert_close(getattr(got.last, tree), getattr(want.last, tree), 1e-11)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=slow)])
def test_evaluation_sampling_and_canonical_states(schedule):
    """What does not train finds the same model."""
    chunks = 2 if schedule == "interleaved" else 1
    config = make_config(
        parallel={"pipe": 2, "data": 2, "microbatches": 2, "zero": 3, "schedule": schedule, "chunks": chunks},
        model=MODEL,
    )
    p, one = program(config), program(make_config(model=MODEL))
    state = p.init()
    for a, b in zip(
        p.evaluate(state.params, device_batch(p, 0)), one.evaluate(one.init().params, device_batch(one, 0)), strict=True
    ):
        assert float(a) == pytest.approx(float(b), rel=1e-12)
    assert_equal(p.canonical(state), canonical(p, state))
    assert_equal(p.place(p.canonical(state)), state)
    prompts = [np.arange(n, dtype=np.int32) for n in (1, 5, 9, 12)]
    texts = [
        Generator(each, 4, Sampling(tokens=8, greedy=True)).extend(each.init().params, prompts) for each in (p, one)
    ]
    assert [text.tolist() for text in texts[0]] == [text.tolist() for text in texts[1]]
