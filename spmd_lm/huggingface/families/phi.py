"""Phi-3 (arXiv:2404.14219) with a context of 4,096, and Phi-4 (arXiv:2412.08905), without rope_type longrope."""

from spmd_lm.huggingface.architectures import Architecture, ConfigKey, WeightMapping
from spmd_lm.huggingface.families import decoder
from spmd_lm.huggingface.families.decoder import DECODER_LAYER

QKV, GATE_UP = f"{DECODER_LAYER}.self_attn.qkv_proj.weight", f"{DECODER_LAYER}.mlp.gate_up_proj.weight"

PHI3 = Architecture(
    model_type="phi3",
    classes={"Phi3ForCausalLM": {"kind": "causal_lm"}},
    weights=(
        WeightMapping("embedding.tokens", "model.embed_tokens.weight"),
        WeightMapping("blocks.norm1.scale", f"{DECODER_LAYER}.input_layernorm.weight"),
        WeightMapping("blocks.attention.query", QKV, transposed=True),
        WeightMapping("blocks.attention.key", QKV, transposed=True),
        WeightMapping("blocks.attention.value", QKV, transposed=True),
        WeightMapping("blocks.attention.out", f"{DECODER_LAYER}.self_attn.o_proj.weight"),
        WeightMapping("blocks.norm2.scale", f"{DECODER_LAYER}.post_attention_layernorm.weight"),
        WeightMapping("blocks.mlp.gate", GATE_UP, transposed=True),
        WeightMapping("blocks.mlp.up", GATE_UP, transposed=True),
        WeightMapping("blocks.mlp.down", f"{DECODER_LAYER}.mlp.down_proj.weight"),
        WeightMapping("head.norm.scale", "model.norm.weight"),
        WeightMapping("head.tokens", "lm_head.weight"),
    ),
    config_keys=(
        *decoder.config_keys(
            vocab_size=32064,
            max_position_embeddings=4096,
            hidden_size=3072,
            intermediate_size=8192,
            rms_norm_eps=1e-5,
        ),
        decoder.SILU,
        ConfigKey("resid_pdrop", "dropout", 0.0),
        ConfigKey("embd_pdrop", "dropout", 0.0),
    ),
    key_groups=(
        decoder.rope(default_fraction=1.0, scalings=()),
        decoder.head_dim(),
        decoder.same_window(),
    ),
    fixed=decoder.DECODER,
    required={"attention_bias": False, "layer_types": None},  # transformers' class reads neither
    buffers=decoder.BUFFERS,
)
