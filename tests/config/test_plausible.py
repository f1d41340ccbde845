import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.cli import main
from spmd_lm.config.load import load
from spmd_lm.config.plausible import RANGES, doubts, likely
from tests.config.test_load import CONFIGS

DEBUG = next(str(path) for path in CONFIGS if path.stem == "debug")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optim.lr=4e07", "optim.lr=4e-07"),
        ("optim.lr=30", "optim.lr=0.3"),
        ("optim.lr=3e-40", "optim.lr=3e-09"),
        ("optim.eps=1e8", "optim.eps=1e-08"),
        ("optim.b1=0.09", "optim.b1=0.9"),
        ("optim.b2=0.095", "optim.b2=0.95"),
        ("optim.weight_decay=1e5", "optim.weight_decay=1e-05"),
        ("optim.clip=1e9", "optim.clip=10000"),
        ("model.dropout=0.95", "model.dropout=0.095"),
        ("model.norm_eps=1e5", "model.norm_eps=1e-05"),
        ("optim.warmup=900", "optim.warmup="),
    ],
)
def test_a_value_that_nobody_means_is_told_with_the_likeliest(override, meant, capsys):
    assert main(["config", DEBUG, override, "optim.decay=constant", "optim.min_lr=0"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {override.partition('=')[0]}=") and f"Did you mean {meant}" in line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_shipped_configuration_is_doubted(path):
    assert list(doubts(load(path))) == []


IN_USE = ["optim.lr=1", "optim.lr=1e-7", "optim.clip=0", "optim.weight_decay=0", "optim.weight_decay=10", "optim.b1=0"]
IN_USE += ["optim.eps=1e-16", "optim.b2=0.999", "model.rope_theta=5e8", "model.dropout=0", "optim.clip=1000"]


@pytest.mark.parametrize("override", IN_USE)
def test_what_papers_use_is_not_doubted(override):
    assert list(doubts(load(DEBUG, ["optim.min_lr=0", override]))) == []


@given(st.sampled_from([*RANGES.values()]), st.floats(1e-300, 1e300))
def test_what_is_meant_is_within_the_range(limits, value):
    low, high = limits
    meant = likely(value, low, high)
    assert meant is None or low <= meant <= high
