"""The settings that families of published models are made of, under every layout as on one device."""

import pytest

from tests.helpers import assert_states_close, diagonals, make_config, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("x64")]

LLAMA = {"positions": "rotary", "norm_type": "rms", "activation": "swiglu", "use_bias": False, "kv_heads": 2}
WINDOW = {"kind": "window", "span": 5}
GEMMA = LLAMA | {"norm": "sandwich", "norm_type": "zero_centered_rms", "activation": "geglu_tanh", "head_width": 6}
GEMMA |= {"scale_embeddings": True, "query_pre_attn_scalar": 7}
FAMILIES = {
    "mistral": LLAMA | {"period": [WINDOW]},
    "qwen2": LLAMA | {"use_bias": ["qkv"], "tie_embeddings": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_width": 8},
    "gemma2": GEMMA | {"period": [WINDOW, "block"], "attention_softcap": 0.05, "logit_softcap": 3.0},
    "gemma3": GEMMA | {"period": [WINDOW | {"rope_theta": 100.0}, WINDOW, "block"], "qk_norm": True},
    "two kinds": LLAMA | {"period": [{"kind": "block", "kv_heads": 8}, "block"]},
    "neox": {"positions": "rotary", "parallel_branches": True, "use_bias": True},
}
LAYOUTS = {
    "tensor": {"data": 2, "model": 4},
    "eight": {"model": 8},
    "sequence": {"data": 2, "model": 4, "sequence": True, "zero": 1},
    "zero3": {"data": 4, "model": 2, "zero": 3},
    "zero3 of sequences, prefetched": {"data": 2, "model": 4, "sequence": True, "zero": 3, "prefetch": "on"},
    "hybrid": {"replica": 2, "data": 1, "model": 4, "zero": 3, "microbatches": 2},
    "types": {"data": 2, "model": 4, "sequence": True, "zero": 2, "partitioner": "types"},
    "1f1b": {"pipe": 2, "data": 1, "model": 4, "zero": 3, "microbatches": 2},
}
REMAT = {"hybrid": "full", "tensor": "residual", "sequence": "selective", "1f1b": "full"}


@pytest.mark.parametrize(("family", "layout"), [*diagonals(FAMILIES, LAYOUTS, 2)])
def test_every_layout_computes_the_same(family, layout):
    """Eight heads share two key/value heads, so that devices share them where `model` is more than 2."""
    layers = 6 if family == "gemma3" else 4
    model = {"layers": layers, "width": 32, "heads": 8, "attention_dropout": 0.0, "dropout": 0.1} | FAMILIES[family]
    sections = {"model": model, "optim": {"eps": 1e-6}}
    got = trained(make_config(parallel=LAYOUTS[layout], remat={"policy": REMAT.get(layout, "none")}, **sections))
    want = trained(make_config(parallel={"data": 1}, **sections))
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)
