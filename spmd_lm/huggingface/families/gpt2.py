"""GPT-2 (modeling_gpt2.py of transformers 5.23)."""

from spmd_lm.huggingface.architectures import GELU_NAMES, Architecture, ConfigKey, WeightMapping, linear, norm

GPT2_LAYER = "transformer.h.{layer}"
GPT2 = Architecture(
    model_type="gpt2",
    classes={"GPT2LMHeadModel": {"kind": "causal_lm"}},
    weights=(
        WeightMapping("embedding.tokens", "transformer.wte.weight"),
        WeightMapping("embedding.positions", "transformer.wpe.weight"),
        *norm("blocks.norm1", f"{GPT2_LAYER}.ln_1"),
        *linear("blocks.attention.query", f"{GPT2_LAYER}.attn.c_attn"),
        *linear("blocks.attention.key", f"{GPT2_LAYER}.attn.c_attn"),
        *linear("blocks.attention.value", f"{GPT2_LAYER}.attn.c_attn"),
        *linear("blocks.attention.out", f"{GPT2_LAYER}.attn.c_proj", transposed=True),
        *norm("blocks.norm2", f"{GPT2_LAYER}.ln_2"),
        *linear("blocks.mlp.up", f"{GPT2_LAYER}.mlp.c_fc"),
        *linear("blocks.mlp.down", f"{GPT2_LAYER}.mlp.c_proj", transposed=True),
        *norm("head.norm", "transformer.ln_f"),
        WeightMapping("head.tokens", "lm_head.weight"),
    ),
    config_keys=(
        ConfigKey("vocab_size", "vocab", 50257),
        ConfigKey("n_positions", "context", 1024),
        ConfigKey("n_embd", "width", 768),
        ConfigKey("n_layer", "layers", 12),
        ConfigKey("n_head", "heads", 12),
        ConfigKey("n_inner", "mlp_width", None),
        ConfigKey("activation_function", "activation", "gelu_new", GELU_NAMES),
        ConfigKey("embd_pdrop", "dropout", 0.1),
        ConfigKey("resid_pdrop", "dropout", 0.1),
        ConfigKey("attn_pdrop", "attention_dropout", 0.1),
        ConfigKey("layer_norm_epsilon", "norm_eps", 1e-5),
        ConfigKey("tie_word_embeddings", "tie_embeddings", True),
    ),
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False}
    | {"add_cross_attention": False},
    legacy_names={"transformer.": ""},
    buffers=(f"{GPT2_LAYER}.attn.bias", f"{GPT2_LAYER}.attn.masked_bias"),
)
