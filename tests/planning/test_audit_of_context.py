"""Compiled steps whose rows several devices share send what theory expects, on simulated devices and for hardware that
is absent."""

import pytest

from spmd_lm.analysis import topology
from spmd_lm.planning.audit import audit, render
from tests.helpers import FLOAT32, TASKS, make_config
from tests.planning.test_audit import BF16, compilable, no_cache

__all__ = ["no_cache"]
pytestmark = pytest.mark.slow
RING, HEADS = {"context_attention": "ring"}, {"context_attention": "heads"}


def exact(
    name: str,
    parallel: dict,
    remat: str,
    model: dict,
    precision: dict,
    *,
    width: int = 64,
    context: int = 64,
    slack: int = 64,
    **sections: dict,
) -> dict:
    sizes = {"layers": 2, "width": width, "heads": 8, "context": context, "vocab": 61, "dropout": 0.0}
    config = make_config(
        model=sizes | {"attention_dropout": 0.0, "attention": "chunked"} | model,
        parallel=parallel,
        remat={"policy": remat},
        precision=precision,
        **sections,
    )
    result = audit(config, topology.parse_topology(name))
    assert result["ok"] and result["missing_bytes"] + result["excess_bytes"] <= slack, render(result)
    return result


@pytest.mark.parametrize(
    ("parallel", "remat", "model"),
    [
        ({"data": 2, "context": 4, "zero": 1} | RING, "full", {"kv_heads": 4}),
        ({"data": 2, "context": 4, "zero": 3} | HEADS, "full", {"kv_heads": 2}),
        ({"data": 1, "context": 8, "zero": 3} | RING, "selective", {}),
        ({"data": 1, "context": 8, "zero": 1} | HEADS, "selective", {"kv_heads": 4}),
        ({"data": 2, "context": 4} | RING, "none", {"kind": "bert"}),
        ({"data": 2, "context": 2, "model": 2, "sequence": True, "zero": 3} | RING, "residual", {}),
        (
            {"data": 2, "context": 2, "model": 2, "sequence": True, "zero": 1, "microbatches": 2} | HEADS,
            "none",
            {"kv_heads": 2, "attention": "xla"},
        ),
        (
            {"pipe": 2, "data": 2, "context": 2, "zero": 1, "microbatches": 4, "run_idle_stages": True} | RING,
            "full",
            {"layers": 4},
        ),
        (
            {"pipe": 2, "data": 1, "context": 2, "model": 2, "zero": 1, "microbatches": 4} | HEADS,
            "none",
            {"layers": 4},
        ),
        ({"data": 4, "context": 2, "zero": 3} | RING, "block", {"layers": 4}),
        (
            {"data": 2, "expert": 2, "context": 2, "zero": 2} | HEADS,
            "full",
            {"mlp": {"kind": "moe", "experts": 4, "capacity": "none"}, "attention": "xla"},
        ),
    ],
    ids=str,
)
def test_simulated_devices_that_share_rows_send_what_theory_expects(parallel, remat, model):
    exact("cpu:8", parallel, remat, model, FLOAT32)


def test_logits_of_spans_are_summed_over_rows():
    layout = {"data": 2, "context": 2, "model": 2, "sequence": True, "zero": 1} | HEADS
    result = exact("cpu:8", layout, "none", {"kind": "bert", "attention": "xla"}, FLOAT32, **TASKS["span"])
    assert any(row["part"] == "head" and row["axes"] == ["context"] for row in result["theory"])


@pytest.mark.parametrize(
    ("name", "parallel", "remat", "model"),
    [
        ("v5p:2x2x1", {"data": 1, "context": 4, "zero": 1} | RING, "none", {}),
        ("v5p:2x2x2", {"data": 4, "context": 2, "zero": 3} | HEADS, "full", {"kv_heads": 2}),
        ("h100:1x8", {"data": 2, "context": 4, "zero": 3} | RING, "full", {"kv_heads": 2}),
        ("h100:1x8", {"data": 2, "context": 2, "model": 2, "sequence": True, "zero": 1} | HEADS, "none", {}),
    ],
    ids=str,
)
def test_accelerators_that_share_rows_send_what_theory_expects(name, parallel, remat, model):
    compilable(name)
    exact(name, parallel, remat, model | {"attention": "auto"}, BF16, width=1024, context=1024, slack=1024)
