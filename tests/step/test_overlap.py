"""Weights that are gathered ahead, and collective matmul: the same run, and the same bytes."""

import jax
import numpy as np
import pytest

from spmd_lm.analysis import topology
from spmd_lm.config import overlap
from spmd_lm.config.schema import RunConfig
from spmd_lm.planning.audit import audit, render
from spmd_lm.step.program import Program
from tests.helpers import (
    ORIGINAL_BERT,
    assert_close,
    device_batch,
    make_config,
    program,
    train_steps,
    trained,
    trained_reference,
)
from tests.step.test_train_step import assert_same_run

pytestmark = pytest.mark.usefixtures("x64")
slow, mutants = pytest.mark.slow, pytest.mark.mutants

HYBRID = {"replica": 2, "data": 2, "model": 2, "sequence": True, "microbatches": 2}
PIPELINE = {"pipe": 2, "data": 2, "model": 2, "microbatches": 4}
BREADTH_FIRST = PIPELINE | {"schedule": "breadth_first", "chunks": 3}
LLAMA = {"norm_type": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 4, "use_bias": False}


def config(layers: int, remat: str, model: dict, parallel: dict) -> RunConfig:
    return make_config(
        model={"layers": layers} | model,
        objective={"kind": "masked_lm" if "kind" in model else "causal_lm"},
        parallel={"data": 1} | parallel,
        remat={"policy": remat},
        optim={"eps": 1e-6},  # gradients of keys' biases are rounding alone
        train={"batch": 12 if parallel.get("data") == 3 else 16},
    )


@pytest.mark.parametrize(
    ("layers", "remat", "model", "parallel"),
    [
        pytest.param(4, "full", {}, HYBRID, id="hybrid", marks=slow),
        pytest.param(4, "full", {}, HYBRID | {"partitioner": "types"}, id="types", marks=[slow, mutants]),
        pytest.param(4, "offload", {}, HYBRID, id="offload", marks=slow),
        pytest.param(2, "selective", {}, {"data": 8}, id="two layers", marks=slow),
        pytest.param(3, "residual", ORIGINAL_BERT, {"data": 4, "model": 2}, id="bert", marks=slow),
        pytest.param(3, "none", LLAMA, {"data": 3, "model": 2, "microbatches": 2}, id="padded", marks=slow),
        pytest.param(8, "full", {}, PIPELINE, id="1f1b", marks=[slow, mutants]),
        pytest.param(8, "none", {}, PIPELINE | {"schedule": "gpipe"}, id="gpipe", marks=slow),
        pytest.param(8, "none", {}, PIPELINE | {"schedule": "interleaved", "chunks": 2}, id="interleaved", marks=slow),
        pytest.param(12, "full", {}, BREADTH_FIRST, id="breadth-first", marks=[slow, mutants]),
        pytest.param(6, "none", LLAMA, BREADTH_FIRST | {"microbatches": 2}, id="a layer a chunk", marks=slow),
    ],
)
def test_prefetch_computes_the_reference(layers, remat, model, parallel):
    prefetched = config(layers, remat, model, {"zero": 3, "prefetch": "on"} | parallel)
    plan, by_chunk = program(prefetched).plan, parallel.get("schedule") == "breadth_first"
    assert plan.prefetch_chunks == by_chunk and plan.prefetch == (() if by_chunk else ("attention",))
    alone = prefetched.model_copy(update={"parallel": make_config().parallel, "remat": make_config().remat})
    assert_same_run(trained(prefetched), trained_reference(alone))


@slow
@mutants
@pytest.mark.parametrize(
    ("layers", "parallel"),
    [(4, HYBRID), (2, HYBRID), (4, HYBRID | {"partitioner": "types"}), (8, PIPELINE), (6, BREADTH_FIRST)],
    ids=str,
)
def test_prefetch_sends_what_theory_expects(layers, parallel):
    prefetched = config(layers, "full", {}, {"zero": 3, "prefetch": "on"} | parallel)
    result = audit(prefetched, topology.parse_topology("cpu:8"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 2048, render(result)


@pytest.mark.parametrize(
    ("remat", "model", "parallel"),
    [
        pytest.param("full", {}, {"data": 2, "model": 4, "sequence": True}, id="four devices", marks=mutants),
        pytest.param("none", LLAMA, {"data": 2, "model": 4, "zero": 1}, id="whole sequence", marks=[slow, mutants]),
        pytest.param("full", {}, {"model": 8, "sequence": True}, id="eight devices", marks=[slow, mutants]),
        pytest.param("selective", LLAMA, {"data": 4, "model": 2, "sequence": True, "zero": 3}, id="a pair", marks=slow),
        pytest.param(
            "full",
            ORIGINAL_BERT | {"width": 24, "heads": 6, "context": 12},
            {"data": 2, "model": 3, "sequence": True},
            id="three devices",
            marks=slow,
        ),
        pytest.param(
            "none",
            {},
            {"pipe": 2, "model": 4, "sequence": True, "microbatches": 4, "run_idle_stages": True},
            id="pipeline",
            marks=slow,
        ),
        pytest.param("full", {}, HYBRID | {"zero": 3, "prefetch": "on"}, id="prefetch", marks=slow),
    ],
)
@pytest.mark.slow
def test_products_in_parts_compute_the_reference(remat, model, parallel):
    in_parts = config(2, remat, model, {"collective_matmul": "on"} | parallel)
    assert program(in_parts).model.collective_matmul == overlap.BRANCHES
    alone = in_parts.model_copy(update={"parallel": make_config().parallel, "remat": make_config().remat})
    assert_same_run(trained(in_parts), trained_reference(alone))


@slow
@mutants
@pytest.mark.parametrize(
    ("remat", "model", "parallel"),
    [
        ("full", {}, {"data": 2, "model": 4, "sequence": True}),
        ("selective", {"scan": False}, {"data": 4, "model": 2, "sequence": True}),
        ("residual", ORIGINAL_BERT, {"data": 2, "model": 4, "zero": 3, "prefetch": "on"}),
        (
            "none",
            {},
            {"pipe": 2, "model": 4, "sequence": True, "microbatches": 4, "run_idle_stages": True}
            | {"schedule": "breadth_first"},
        ),
    ],
    ids=str,
)
def test_products_in_parts_send_what_theory_expects(remat, model, parallel):
    in_parts = config(4, remat, model, {"collective_matmul": "on"} | parallel)
    result = audit(in_parts, topology.parse_topology("cpu:8"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 2048, render(result)


@slow
@mutants
def test_the_mlp_s_products_alone_are_in_parts_on_a_tpu(monkeypatch):
    """The CPU is treated as a TPU."""
    monkeypatch.setattr(overlap, "BRANCHES", ("mlp",))
    parallel = {"data": 2, "model": 4, "sequence": True, "collective_matmul": "on"}
    in_parts = config(2, "full", {"scan": False}, parallel)
    laid_out = Program(in_parts)
    assert laid_out.plan.collective_matmul == ("mlp",)
    alone = in_parts.model_copy(update={"parallel": make_config().parallel, "remat": make_config().remat})
    assert_same_run(train_steps(laid_out), trained_reference(alone))
    result = audit(in_parts, topology.parse_topology("cpu:8"))
    assert result["missing_bytes"] + result["excess_bytes"] <= 2048, render(result)


@slow
@pytest.mark.parametrize(
    ("layers", "parallel"),
    [
        (2, {"data": 2, "model": 4, "sequence": True, "collective_matmul": "on"}),
        (4, HYBRID | {"zero": 3, "prefetch": "on"}),
        (6, BREADTH_FIRST | {"zero": 3, "prefetch": "on"}),
    ],
    ids=str,
)
def test_evaluation_is_that_of_one_device(layers, parallel):
    laid_out = config(layers, "full", {}, parallel)
    alone = laid_out.model_copy(update={"parallel": make_config().parallel})
    got, want = (p.evaluate(p.init().params, device_batch(p, 0)) for p in map(program, (laid_out, alone)))
    assert_close(*(jax.tree.map(np.asarray, sums) for sums in (got, want)), 1e-12)
