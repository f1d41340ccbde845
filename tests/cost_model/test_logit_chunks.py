"""How many logits a GPU's step computes at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.cost_model.logit_chunks import MOST_LOGIT_BYTES, MOST_PADDING, SHARE_OF_PEAK, TILE, tokens_per_chunk
from spmd_lm.planning.plan_report import plan_on
from spmd_lm.resolve import make_model
from tests.helpers import make_config

GPT2 = 4 * 50_304  # bytes of a token's float32 logits


@pytest.mark.parametrize(
    ("tokens", "peak", "free", "each"),
    [
        (32 * 1024, 2e10, 1e11, 4736),  # in 7 chunks, the fewest of 1 GiB
        (32 * 1024, 1e9, 1e11, 384),  # within a tenth of the peak
        (32 * 1024, 2e10, 3e8, 1280),  # within what is free, and with 1/64 of padding, not the 1/32 of 1408
        (1000, 2e10, 1e11, None),  # a multiple of the tile would have 24 tokens more: too many
        (1024, 2e10, 1e11, 1024),
        (32 * 1024, 2e8, 1e11, None),  # not even a tile fits
        (32 * 1024, 2e10, -1e9, None),
    ],
)
def test_chunks_of_gpt2(tokens, peak, free, each):
    assert tokens_per_chunk(tokens, GPT2, peak, free) == each


@given(st.integers(1, 2**20), st.integers(2, 2**21), st.floats(1, 1e12), st.floats(-1e9, 1e12))
def test_chunks_fit_and_pad_little(tokens, logit_bytes, peak, free):
    each = tokens_per_chunk(tokens, logit_bytes, peak, free)
    if each is not None:
        assert each % TILE == 0 and each * logit_bytes <= min(MOST_LOGIT_BYTES, SHARE_OF_PEAK * peak, free)
        assert tokens <= -(-tokens // each) * each <= (1 + MOST_PADDING) * tokens


@pytest.mark.parametrize(("topology", "each"), [("h200:1x1", 5504), ("v5p:1x1x1", None), ("cpu:1", None)])
def test_a_gpu_s_model_has_as_many_as_its_memory_has_room_for(topology, each):
    """Of 16,384 tokens with 2**15 logits: in 3 chunks, or as many as CHUNK_BYTES holds."""
    model = {"layers": 12, "width": 1024, "context": 1024, "vocab": 2**15, "dropout": 0.0, "attention_dropout": 0.0}
    precision = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
    config = make_config(model=model, precision=precision)
    plan = plan_on(config, parse_topology(topology))
    assert make_model(config, plan.platform, plan).logits_policy.tokens == each
