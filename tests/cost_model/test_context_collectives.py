"""What devices that share rows send, by the formulas; tests/planning/test_audit_of_context.py compares compiled
steps."""

import pytest

from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.wire import ALL_TO_ALL, COLLECTIVE_PERMUTE, wire_bytes
from spmd_lm.resolve import abstract_plan
from tests.helpers import FLOAT32, make_config

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 8, 4, 16
HEAD = WIDTH // HEADS
BFLOAT16 = FLOAT32 | {"compute": "bfloat16"}


def sent(
    parallel: dict, remat: str = "none", precision: dict = FLOAT32, optim: dict | None = None, **model
) -> dict[tuple[str, str], tuple]:
    """(count, bytes) over `context` by (kind, dtype), of what layers send."""
    sizes = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT}
    config = make_config(
        model=sizes | model,
        parallel=parallel,
        remat={"policy": remat},
        precision=precision,
        optim=optim or {},
        train={"batch": BATCH},
    )
    rows = [
        row
        for row in expected_collectives(config, abstract_plan(config, 8, "tpu", ""))
        if row.part == "blocks" and row.axes == ("context",)
    ]
    keys = dict.fromkeys((row.kind, row.dtype) for row in rows)
    of = {key: [row for row in rows if (row.kind, row.dtype) == key] for key in keys}
    return {key: (sum(r.count for r in each), sum(r.bytes for r in each)) for key, each in of.items()}


@pytest.mark.parametrize(
    ("parallel", "remat", "kv_heads", "tokens", "queries", "keys", "times", "results"),
    [
        # times: that queries, keys and values are exchanged; results: that what attention returns is
        ({"data": 2, "context": 4}, "none", 8, 8 * 8, 8, 8, 2 * 4, 2 * 4),
        ({"data": 2, "context": 4}, "full", 8, 8 * 8, 8, 8, 3 * 4, 3 * 4),
        ({"data": 2, "context": 4}, "selective", 8, 8 * 8, 8, 8, 3 * 4, 2 * 4),
        ({"data": 2, "context": 4}, "none", 2, 8 * 8, 8, 4, 2 * 4, 2 * 4),  # keys of 2 heads, twice each
        ({"data": 2, "context": 2, "model": 2}, "none", 2, 8 * 16, 4, 2, 2 * 4, 2 * 4),
        ({"data": 2, "context": 4, "microbatches": 2}, "residual", 8, 4 * 8, 8, 8, 2 * 3 * 4, 2 * 3 * 4),
        # two layers a stage; its chunk but for the last stage's runs forward once more
        (
            {"pipe": 2, "data": 2, "context": 2, "microbatches": 4},
            "full",
            8,
            2 * 16,
            8,
            8,
            4 * 3 * 2 + 4 * 2 / 2,
            4 * 3 * 2 + 4 * 2 / 2,
        ),
    ],
)
def test_heads_are_exchanged_for_tokens(parallel, remat, kv_heads, tokens, queries, keys, times, results):
    found = sent(parallel | {"context_attention": "heads"}, remat, kv_heads=kv_heads)
    assert list(found) == [(ALL_TO_ALL, "float32")]
    elements = tokens * HEAD * (times * (queries + 2 * keys) + results * queries)
    assert found[ALL_TO_ALL, "float32"][1] == wire_bytes(ALL_TO_ALL, 4 * elements, parallel["context"])


@pytest.mark.parametrize(
    ("parallel", "remat", "kv_heads", "elements", "rounds", "backward"),
    [
        # elements: of a device's keys.  rounds: that keys and values go; backward: that their gradients do
        ({"data": 2, "context": 4}, "none", 8, 8 * 8 * 8 * HEAD, 2 * 4, 4),
        ({"data": 2, "context": 4}, "full", 2, 8 * 8 * 2 * HEAD, 3 * 4, 4),
        ({"data": 1, "context": 8, "microbatches": 2}, "selective", 1, 8 * 4 * HEAD, 2 * 3 * 4, 2 * 4),
        ({"data": 2, "context": 2, "model": 2}, "none", 1, 8 * 16 * HEAD, 2 * 4, 4),
        ({"pipe": 2, "data": 2, "context": 2, "microbatches": 4}, "full", 8, 2 * 16 * WIDTH, 24 + 4, 4 * 2),
    ],
)
def test_keys_and_values_go_around_a_ring(parallel, remat, kv_heads, elements, rounds, backward):
    """Gradients, in float32, make one hop more, in the compute dtype, which brings them home."""
    n = parallel["context"]
    found = sent(parallel | {"context_attention": "ring"}, remat, BFLOAT16, kv_heads=kv_heads)
    keys = 2 * (n - 1) * rounds + 2 * backward
    gradients = 2 * (n - 1) * backward
    assert found == {
        (COLLECTIVE_PERMUTE, "bfloat16"): (keys, keys * 2 * elements),
        (COLLECTIVE_PERMUTE, "float32"): (gradients, gradients * 4 * elements),
    }


def test_frozen_layers_send_forward_alone():
    layout, frozen = {"data": 2, "context": 4}, {"freeze": "embedding.* blocks.*"}
    ring = sent(layout | {"context_attention": "ring"}, "full", BFLOAT16, optim=frozen, tie_embeddings=False)
    assert [key[1] for key in ring] == ["bfloat16"] and ring[COLLECTIVE_PERMUTE, "bfloat16"][0] == 2 * 3 * LAYERS
    heads = sent(layout | {"context_attention": "heads"}, "full", optim=frozen, tie_embeddings=False)
    assert heads[ALL_TO_ALL, "float32"][1] == LAYERS * wire_bytes(ALL_TO_ALL, 4 * 8 * 8 * 4 * WIDTH, 4)
