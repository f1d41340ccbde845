"""What `make mutants` watches each broken package with: parity and audit of layouts that use every collective."""

import pytest

from spmd_lm.analysis import topology
from spmd_lm.audit import audit, render
from tests.helpers import assert_close, make_config, run_of, trained, trained_reference

pytestmark = [pytest.mark.mutants, pytest.mark.slow]

RUNS = [
    ("replica2-data2-model2-sequence-zero3", 2, "scan", "full"),
    ("data4-model2", 1, "scan", "none"),
    ("data4-model2-sequence", 2, "scan", "none"),
    ("data8-zero1", 1, "scan", "none"),
    ("data4-model2-zero2", 2, "scan", "none"),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_parity(run, x64):
    got, want = trained(run_of(*run)), trained_reference(make_config())
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    for tree in ("params", "mu", "nu"):
        assert_close(getattr(got.last, tree), getattr(want.last, tree), 1e-11)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_communication(run, x64):
    result = audit(run_of(*run), topology.parse("cpu:8"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 256, render(result)
