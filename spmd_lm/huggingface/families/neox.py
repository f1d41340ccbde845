"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373)."""

from spmd_lm.huggingface.architectures import GELU_NAMES, LAYER, Architecture, ConfigKey, WeightMapping, linear, norm
from spmd_lm.huggingface.families import decoder

NEOX_LAYER = f"gpt_neox.layers.{LAYER}"
QKV = f"{NEOX_LAYER}.attention.query_key_value"
NEOX = Architecture(
    model_type="gpt_neox",
    classes={"GPTNeoXForCausalLM": {"kind": "causal_lm"}},
    weights=(
        WeightMapping("embedding.tokens", "gpt_neox.embed_in.weight"),
        *norm("blocks.norm1", f"{NEOX_LAYER}.input_layernorm"),
        *linear("blocks.attention.query", QKV, transposed=True, by_head=True),
        *linear("blocks.attention.key", QKV, transposed=True, by_head=True),
        *linear("blocks.attention.value", QKV, transposed=True, by_head=True),
        *linear("blocks.attention.out", f"{NEOX_LAYER}.attention.dense"),
        *norm("blocks.norm2", f"{NEOX_LAYER}.post_attention_layernorm"),
        *linear("blocks.mlp.up", f"{NEOX_LAYER}.mlp.dense_h_to_4h", transposed=True),
        *linear("blocks.mlp.down", f"{NEOX_LAYER}.mlp.dense_4h_to_h"),
        *norm("head.norm", "gpt_neox.final_layer_norm"),
        WeightMapping("head.tokens", "embed_out.weight"),
    ),
    config_keys=(
        ConfigKey("vocab_size", "vocab", 50432),
        ConfigKey("max_position_embeddings", "context", 2048),
        ConfigKey("hidden_size", "width", 6144),
        ConfigKey("num_hidden_layers", "layers", 44),
        ConfigKey("num_attention_heads", "heads", 64),
        ConfigKey("intermediate_size", "mlp_width", 24576),
        ConfigKey("hidden_act", "activation", "gelu", GELU_NAMES),
        ConfigKey("attention_dropout", "attention_dropout", 0.0),
        ConfigKey("hidden_dropout", "dropout", 0.0),
        ConfigKey("layer_norm_eps", "norm_eps", 1e-5),
        ConfigKey("use_parallel_residual", "parallel_branches", True),
        ConfigKey("tie_word_embeddings", "tie_embeddings", False),
    ),
    key_groups=(
        decoder.rope("rotary_emb_base", "rotary_pct", 0.25),
        decoder.bias_keys("mlp", "norm", attention_bias=(True, ("qkv", "out"))),
    ),
    fixed={"positions": "rotary"},
    required={"is_decoder": False},
    legacy_names={"embed_out.weight": "lm_head.weight"},
    buffers=tuple(f"{NEOX_LAYER}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")),
)
