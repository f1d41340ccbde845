"""What layers with experts send, by the formulas; tests/planning/test_audit.py compares compiled steps."""

import pytest

from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, wire_bytes
from spmd_lm.resolve import abstract_plan
from tests.helpers import FLOAT32, make_config

MOE = {"kind": "moe", "experts": 8, "per_token": 2, "capacity": 1.25}
DENSE = {"kind": "dense"}
CONTEXT, WIDTH = 16, 32


def sent(parallel: dict, remat: str = "none", mlp: dict | None = None, **model) -> dict[tuple, tuple[float, float]]:
    """(count, bytes) by (kind, axes), of what layers send; 4 layers, 16 rows."""
    config = make_config(
        model={"layers": 4, "mlp": DENSE if mlp is DENSE else MOE | (mlp or {})} | model,
        parallel=parallel,
        remat={"policy": remat},
        precision=FLOAT32,
    )
    rows = [row for row in expected_collectives(config, abstract_plan(config, 8, "tpu", "")) if row.part == "blocks"]
    keys = {(row.kind, row.axes): None for row in rows}
    of = {key: [row for row in rows if (row.kind, row.axes) == key] for key in keys}
    return {key: (sum(r.count for r in each), sum(r.bytes for r in each)) for key, each in of.items()}


@pytest.mark.parametrize(
    ("parallel", "remat", "mlp", "rows", "slots", "exchanges"),
    [
        ({"data": 4, "expert": 2}, "none", {}, 2, 5, 4 * 4),  # 1.25 x 2 x 16 / 8 slots
        ({"data": 4, "expert": 2}, "full", {}, 2, 5, 4 * 6),
        ({"data": 4, "expert": 2}, "selective", {}, 2, 5, 4 * 4),
        ({"data": 1, "expert": 8, "microbatches": 2}, "residual", {}, 1, 5, 2 * 4 * 6),
        ({"data": 4, "expert": 2}, "none", {"group": 8, "capacity": 0.3}, 2, 2 * 1, 4 * 4),  # rounded up, in each group
        ({"data": 2, "expert": 4}, "none", {"capacity": "none"}, 2, 16, 4 * 4),
        # two layers a stage; its chunk but for the last stage's runs forward once more
        ({"pipe": 2, "data": 2, "expert": 2, "microbatches": 4}, "full", {}, 1, 5, 2 * 4 * 6 + 2 * 2 * 4 / 2),
    ],
)
def test_buffers_go_to_experts_and_back(parallel, remat, mlp, rows, slots, exchanges):
    count, bytes_ = sent(parallel, remat, mlp)[ALL_TO_ALL, ("expert",)]
    buffers = rows * MOE["experts"] * slots * WIDTH * 4
    assert count == exchanges
    assert bytes_ == exchanges * wire_bytes(ALL_TO_ALL, buffers, parallel["expert"])


def test_layers_without_experts_exchange_nothing():
    every, second = (
        sent({"data": 4, "expert": 2}, period=["block", {"kind": "block", "mlp": MOE}] if mixed else None, mlp=mlp)
        for mixed, mlp in ((False, {}), (True, DENSE))
    )
    assert [n / 2 for n in every[ALL_TO_ALL, ("expert",)]] == [*second[ALL_TO_ALL, ("expert",)]]


@pytest.mark.parametrize("sequence", [False, True])
def test_probabilities_and_gates_enter_the_region(sequence):
    """8 probabilities of a token, and a shared MLP's gate, beside its 32 features."""
    layout = {"data": 2, "expert": 2, "model": 2, "sequence": sequence}
    own = {"shared": 64, "shared_gate": True}
    dense = sent({"data": 4, "model": 2, "sequence": sequence}, mlp=DENSE)
    tokens = 4 * CONTEXT * 4  # their bytes, one number each
    experts = sent(layout, mlp=own)
    over = ("model",)
    if not sequence:
        count, bytes_ = (x - y for x, y in zip(experts[ALL_REDUCE, over], dense[ALL_REDUCE, over], strict=True))
        assert (count, bytes_) == (2 * 4, 4 * wire_bytes(ALL_REDUCE, (8 + 1) * tokens, 2))
        return
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        count, bytes_ = (x - y for x, y in zip(experts[kind, over], dense[kind, over], strict=True))
        saved_whole = 4 if kind == ALL_GATHER else 0  # dense layers gather in backward what they have saved in shards
        assert count == 2 * 4 - saved_whole
        whole = wire_bytes(kind, tokens * WIDTH, 2)
        assert bytes_ == 4 * wire_bytes(kind, (8 + 1) * tokens, 2) - saved_whole * whole
    assert experts[ALL_REDUCE, over] == (2 * 4, 2 * 4 * wire_bytes(ALL_REDUCE, 4, 2))  # two losses
