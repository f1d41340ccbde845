"""Pipelines against the reference, in float64: a stage here and a stage there compute the same run."""

import pytest

from spmd_lm.config import checks
from tests.helpers import assert_close, make_config, trained, trained_reference

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
