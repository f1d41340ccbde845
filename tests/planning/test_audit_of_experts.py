"""Compiled steps with experts send what theory expects, on simulated devices and for hardware that is absent."""

import pytest

from spmd_lm.analysis import topology
from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.planning.audit import audit, audit_step, render
from tests.helpers import FLOAT32, make_config
from tests.planning.test_audit import BF16, compilable, no_cache

__all__ = ["no_cache"]
MOE = {"kind": "moe", "experts": 8}
DENSE_AND_EXPERTS = {"mlp": {"kind": "dense"}, "period": ["block", {"kind": "block", "mlp": MOE}], "layers": 4}
SHARED = {"mlp": MOE | {"shared": 32, "shared_gate": True}}
slow = pytest.mark.slow


def exact(
    name: str,
    parallel: dict,
    remat: str,
    model: dict,
    precision: dict,
    width: int = 64,
    context: int = 32,
    slack: int = 64,
) -> None:
    sizes = {"layers": 2, "width": width, "heads": 4, "context": context, "vocab": 61, "dropout": 0.0}
    config = make_config(
        model=sizes | {"attention_dropout": 0.0, "attention": "xla", "mlp": MOE} | model,
        parallel=parallel,
        remat={"policy": remat},
        precision=precision,
        train={"batch": 64},
    )
    result = audit(config, topology.parse_topology(name))
    assert result["ok"] and result["missing_bytes"] + result["excess_bytes"] <= slack, render(result)


@pytest.mark.parametrize(
    ("parallel", "remat", "model"),
    [
        ({"data": 4, "expert": 2}, "none", {}),
        ({"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3}, "full", {}),
        pytest.param({"data": 2, "expert": 4, "zero": 1}, "full", {}, marks=slow),
        pytest.param({"data": 1, "expert": 8, "zero": 2}, "selective", {}, marks=slow),
        pytest.param({"data": 2, "expert": 2, "model": 2, "zero": 3}, "none", SHARED, marks=slow),
        pytest.param({"data": 2, "expert": 2, "model": 2, "sequence": True}, "none", SHARED, marks=slow),
        pytest.param({"data": 2, "model": 4, "sequence": True, "zero": 2}, "residual", {}, marks=slow),
        pytest.param(
            {"pipe": 2, "data": 2, "expert": 2, "microbatches": 4, "zero": 3}, "full", {"layers": 4}, marks=slow
        ),
        pytest.param(
            {"pipe": 2, "data": 1, "expert": 2, "model": 2, "sequence": True, "microbatches": 4, "zero": 2}
            | {"schedule": "breadth_first", "chunks": 2},
            "none",
            {"layers": 4},
            marks=slow,
        ),
        pytest.param({"replica": 2, "data": 2, "expert": 2, "zero": 3, "microbatches": 2}, "none", {}, marks=slow),
        pytest.param(
            {"data": 4, "expert": 2, "zero": 1, "microbatches": 2},
            "full",
            {"mlp": MOE | {"capacity": "none"}},
            marks=slow,
        ),
        pytest.param(
            {"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3}, "none", DENSE_AND_EXPERTS, marks=slow
        ),
        pytest.param(
            {"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3}, "block", {"layers": 4}, marks=slow
        ),
        pytest.param(
            {"data": 4, "expert": 2, "zero": 3, "quantize_gather": "int8", "quantize_scatter": "int8"},
            "full",
            {},
            marks=slow,
        ),
    ],
    ids=str,
)
def test_simulated_experts_send_what_theory_expects(parallel, remat, model):
    exact("cpu:8", parallel, remat, model, FLOAT32)


@slow
@pytest.mark.parametrize(
    ("name", "parallel", "remat", "model"),
    [
        ("v5p:2x2x2", {"data": 4, "expert": 2, "zero": 3}, "full", {}),
        ("v5p:2x2x2", {"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 1}, "none", {}),
        ("v5p:2x2x2", {"pipe": 2, "data": 2, "expert": 2, "zero": 2, "microbatches": 4}, "none", {"layers": 4}),
        ("h100:1x8", {"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 3}, "full", {}),
        ("h100:1x8", {"pipe": 2, "data": 2, "expert": 2, "zero": 3, "microbatches": 4}, "full", {"layers": 4}),
        ("h100:2x8", {"data": 2, "expert": 4, "model": 2, "zero": 2}, "none", SHARED),
        ("h100:2x8", {"data": 4, "expert": 4, "zero": 3}, "none", DENSE_AND_EXPERTS),
        ("h100:1x8", {"replica": 2, "data": 2, "expert": 2, "zero": 3, "microbatches": 2}, "full", {}),
    ],
    ids=str,
)
def test_experts_of_accelerators_send_what_theory_expects(name, parallel, remat, model):
    """A GPU's compiler may sum the counts of tokens over several axes at once."""
    compilable(name)
    exact(name, parallel, remat, model, BF16, width=256, context=128, slack=1024)


@slow
def test_a_tpu_multiplies_the_tokens_that_there_are():
    """A step whose experts drop none has the FLOPs of a dense MLP as wide as a token's two experts, and sends what
    theory expects."""
    sizes = {"layers": 2, "width": 512, "heads": 4, "context": 512, "vocab": 61, "dropout": 0.0}
    sizes |= {"attention_dropout": 0.0, "attention": "xla"}
    flops = {}
    for mlp in ({"mlp_width": 2048}, {"mlp": MOE | {"width": 1024, "capacity": "none"}}):
        config = make_config(
            model=sizes | mlp,
            parallel={"data": 2, "model": 2, "sequence": True, "zero": 3},
            remat={"policy": "none"},
            precision=BF16,
            train={"batch": 16},
        )
        step = audit_step(config, compilable("v5p:2x2x1"))
        assert step.report["ok"], render(step.report)
        flops[step.program.model.expert_products] = compiled_flops(step.module)
    assert flops[("megablox",)] == pytest.approx(flops[()], rel=0.03)
