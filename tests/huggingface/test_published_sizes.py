"""Shipped configurations of published sizes: transformers makes the same models of their published config.json."""

import pytest

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.huggingface.architectures import SPECIAL_TOKEN_KEYS
from spmd_lm.huggingface.config_json import build_config, comparable, parse_config
from tests.config.test_shipped import CONFIGS, PARAMETERS

LLAMA = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False}
LLAMA |= {"hidden_act": "silu", "max_position_embeddings": 131072, "model_type": "llama", "num_key_value_heads": 8}
LLAMA |= {"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256}
ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE |= {"rope_type": "llama3"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "model_type": "qwen2"}
QWEN2 |= {"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128}
QWEN3 |= {"hidden_act": "silu", "max_position_embeddings": 40960, "model_type": "qwen3", "num_key_value_heads": 8}
QWEN3 |= {"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None}
QWEN3 |= {"use_sliding_window": False, "vocab_size": 151936}
GEMMA = {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "query_pre_attn_scalar": 256}
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-06}
GEMMA2 = GEMMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0}
GEMMA2 |= {"final_logit_softcapping": 30.0, "max_position_embeddings": 8192, "rope_theta": 10000.0}
GEMMA2 |= {"sliding_window": 4096, "vocab_size": 256000}
GEMMA3 = GEMMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_local_base_freq": 10000}
GEMMA3 |= {"max_position_embeddings": 32768, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512}
GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window_pattern": 6}
NEOX = {"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "layer_norm_eps": 1e-05, "rotary_pct": 0.25}
NEOX |= {"max_position_embeddings": 2048, "model_type": "gpt_neox", "rotary_emb_base": 10000}
NEOX |= {"tie_word_embeddings": False, "use_parallel_residual": True}


def sizes(layers: int, width: int, heads: int, mlp_width: int, **keys: object) -> dict[str, object]:
    names = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    return dict(zip(names, (layers, width, heads, mlp_width), strict=True)) | keys


PUBLISHED = {  # what the config.json of the released models says
    "llama/3.2-1b": LLAMA
    | sizes(16, 2048, 32, 8192, head_dim=64, tie_word_embeddings=True, rope_scaling=ROPE | {"factor": 32.0}),
    "llama/3.1-8b": LLAMA | sizes(32, 4096, 32, 14336, tie_word_embeddings=False, rope_scaling=ROPE | {"factor": 8.0}),
    "llama/3.1-70b": LLAMA | sizes(80, 8192, 64, 28672, tie_word_embeddings=False, rope_scaling=ROPE | {"factor": 8.0}),
    "mistral/7b": {"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "max_position_embeddings": 32768}
    | {"model_type": "mistral", "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0}
    | sizes(32, 4096, 32, 14336, sliding_window=4096, tie_word_embeddings=False, vocab_size=32000),
    "qwen/2.5-0.5b": QWEN2
    | sizes(24, 896, 14, 4864, num_key_value_heads=2, tie_word_embeddings=True, vocab_size=151936)
    | {"max_position_embeddings": 32768, "max_window_layers": 24, "sliding_window": 32768},
    "qwen/2.5-7b": QWEN2
    | sizes(28, 3584, 28, 18944, num_key_value_heads=4, tie_word_embeddings=False, vocab_size=152064)
    | {"max_position_embeddings": 131072, "max_window_layers": 28, "sliding_window": 131072},
    "qwen/3-0.6b": QWEN3 | sizes(28, 1024, 16, 3072, max_window_layers=28, tie_word_embeddings=True),
    "qwen/3-8b": QWEN3 | sizes(36, 4096, 32, 12288, max_window_layers=36, tie_word_embeddings=False),
    "gemma/2-2b": GEMMA2 | sizes(26, 2304, 8, 9216, num_key_value_heads=4),
    "gemma/2-9b": GEMMA2 | sizes(42, 3584, 16, 14336, num_key_value_heads=8),
    "gemma/3-1b": GEMMA3 | sizes(26, 1152, 4, 6912, num_key_value_heads=1, vocab_size=262144),
    "pythia/160m": NEOX | sizes(12, 768, 12, 3072, vocab_size=50304),
    "pythia/1.4b": NEOX | sizes(24, 2048, 16, 8192, vocab_size=50304),
    "pythia/6.9b": NEOX | sizes(32, 4096, 32, 16384, vocab_size=50432),
    "moe/mixtral_8x7b": {"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "model_type": "mixtral"}
    | {"max_position_embeddings": 32768, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0}
    | {"num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02}
    | sizes(32, 4096, 32, 14336, sliding_window=None, tie_word_embeddings=False, vocab_size=32000),
}
published = pytest.mark.parametrize("name", PUBLISHED)
MAY_DIFFER = {"max_position_embeddings", "sliding_window_pattern", "head_dim", *SPECIAL_TOKEN_KEYS}
"""Keys that transformers may read otherwise: the length of rows, one that layer_types stands for, and one that is null
where it follows from others."""


def shipped_run(name: str) -> RunConfig:
    return load(CONFIGS / f"{name}.yaml")


def test_all_are_compared():
    assert PUBLISHED.keys() == {name for name in PARAMETERS if not name.startswith(("gpt2/", "bert/"))}


@published
def test_the_model_is_that_of_the_published_config_json(name):
    """The length of rows may differ, which pretraining chooses."""
    parsed, config = parse_config(PUBLISHED[name]), shipped_run(name)
    assert comparable(config.model.model_dump() | {"context": 0}) == comparable(parsed.model | {"context": 0})
    assert config.model.context <= parsed.model["context"] and not parsed.unknown_keys
    assert config.objective.kind == parsed.objective["kind"]
    assert config.model.dropout == config.model.attention_dropout == 0


@published
def test_transformers_makes_models_of_that_size(name):
    """The published config.json gives it, and the exported one reads alike; no array is made."""
    torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    config = shipped_run(name)
    _, exported = build_config(config.model, config.objective)
    assert exported["architectures"] == PUBLISHED[name]["architectures"]
    model_class = getattr(transformers, exported["architectures"][0])
    theirs, ours = (model_class.config_class.from_dict(each) for each in (PUBLISHED[name], exported))
    for each in (theirs, ours):
        with torch.device("meta"):
            model = model_class(each)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    before, after = theirs.to_dict(), ours.to_dict()
    assert {key for key, value in before.items() if after.get(key) != value} <= MAY_DIFFER
