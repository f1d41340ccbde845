"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671), with an MLP that all tokens share; Qwen3-MoE (arXiv:2505.09388).  Some
layers may have a dense MLP."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_lm.config.schema import Model
from spmd_lm.huggingface.architectures import Architecture, ConfigKey, WeightMapping
from spmd_lm.huggingface.families import decoder, experts
from spmd_lm.huggingface.families.decoder import DECODER_LAYER, FULL, SLIDING, layer_types_of
from spmd_lm.huggingface.families.qwen import FIRST, SLIDES, windows_of

EXPERTS = experts.weights("mlp", gate="gate_proj", up="up_proj", down="down_proj")
SHARED = f"{DECODER_LAYER}.mlp.shared_expert"


def _keys(number: int, width: int, per_token: int) -> tuple[ConfigKey, ...]:
    """Keys of the experts, with these defaults."""
    return (
        ConfigKey("num_experts", "experts", number),
        ConfigKey("moe_intermediate_size", "width", width),
        ConfigKey("num_experts_per_tok", "per_token", per_token),
        ConfigKey("norm_topk_prob", "renormalize", False),
        experts.BALANCE,
    )


def _every_other(hf_config: Mapping[str, Any], layers: int, errors: list[str]) -> Sequence[str]:
    """Windows for the first, third, .. of the layers before max_window_layers, if any."""
    slides = SLIDES.read(hf_config, errors) and hf_config.get("sliding_window", 4096) is not None
    end = FIRST.read(hf_config, errors)
    return [SLIDING if slides and layer < end and layer % 2 == 0 else FULL for layer in range(layers)] * (not errors)


QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    classes={"Qwen2MoeForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(
        *EXPERTS,
        WeightMapping("blocks.mlp.shared.gate", f"{SHARED}.gate_proj.weight", transposed=True),
        WeightMapping("blocks.mlp.shared.up", f"{SHARED}.up_proj.weight", transposed=True),
        WeightMapping("blocks.mlp.shared.down", f"{SHARED}.down_proj.weight"),
        WeightMapping("blocks.mlp.shared_gate", f"{SHARED}_gate.weight", is_row=True),
    ),
    config_keys=(
        *decoder.config_keys(
            vocab_size=151936,
            max_position_embeddings=32768,
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=5632,
        ),
        decoder.SILU,
    ),
    key_groups=(
        decoder.rope(),
        decoder.head_dim(),
        decoder.bias_keys(qkv_bias=(True, ("qkv",))),
        windows_of(_every_other),
        experts.mixture(
            *_keys(60, 1408, 4),
            ConfigKey("shared_expert_intermediate_size", "shared", 5632),
            other_name="num_local_experts",
            shared_gate=True,
        ),
        experts.DENSE_LAYERS,
    ),
    fixed=decoder.DECODER,
    required=experts.ROUTER_KEYS,
    buffers=decoder.BUFFERS,
)


def _all(hf_config: Mapping[str, Any], layers: int, errors: list[str]) -> Sequence[str]:
    slides = SLIDES.read(hf_config, errors) and hf_config.get("sliding_window", 4096) is not None
    return [SLIDING if slides else FULL] * layers


def _write_window(model: Model) -> dict[str, Any]:
    span = layer_types_of(model)["sliding_window"]
    return {"sliding_window": span, SLIDES.hf_key: span is not None}


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    classes={"Qwen3MoeForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(*decoder.HEAD_NORMS, *EXPERTS),
    config_keys=(
        *decoder.config_keys(
            vocab_size=151936,
            max_position_embeddings=32768,
            hidden_size=2048,
            num_hidden_layers=24,
            num_key_value_heads=4,
            intermediate_size=6144,
        ),
        decoder.SILU,
    ),
    key_groups=(
        decoder.rope(),
        decoder.head_dim(),
        decoder.ATTENTION_BIAS,
        decoder.windows(_all, SLIDES.hf_key, FIRST.hf_key, write=_write_window),
        experts.mixture(*_keys(128, 768, 8), other_name="num_local_experts"),
        experts.DENSE_LAYERS,
    ),
    fixed=decoder.DECODER | {"qk_norm": True},
    required={"layer_types": None} | experts.ROUTER_KEYS,
    buffers=decoder.BUFFERS,
)
