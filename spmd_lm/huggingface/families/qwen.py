"""Qwen2 and Qwen2.5 (arXiv:2407.10671), with biases on queries, keys and values; Qwen3 (arXiv:2505.09388), with norms
on queries and keys."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd_lm.config.schema import Model
from spmd_lm.huggingface.architectures import Architecture, ConfigKey, ConfigKeys
from spmd_lm.huggingface.families import decoder
from spmd_lm.huggingface.families.decoder import FULL, SLIDING, DefaultTypes, layer_types_of


def _last_layers(hf_config: Mapping[str, Any], layers: int, errors: list[str]) -> Sequence[str]:
    """Windows for the layers from max_window_layers on, if any."""
    slides = SLIDES.read(hf_config, errors) and hf_config.get("sliding_window", 4096) is not None
    first = FIRST.read(hf_config, errors)
    return [SLIDING if slides and layer >= first else FULL for layer in range(layers)] if not errors else ()


def _write_windows(model: Model) -> dict[str, Any]:
    keys = layer_types_of(model)
    types, slides = keys["layer_types"], keys["sliding_window"] is not None
    return keys | {"use_sliding_window": slides, "max_window_layers": types.index(SLIDING) if slides else len(types)}


QWEN_KEYS = (
    *decoder.config_keys(
        vocab_size=151936, max_position_embeddings=32768, num_key_value_heads=32, intermediate_size=22016
    ),
    decoder.SILU,
)
SLIDES = ConfigKey("use_sliding_window", "period", False)
FIRST = ConfigKey("max_window_layers", "period", 28)


def windows_of(default: DefaultTypes) -> ConfigKeys:
    """default: the layers with windows if config.json has no layer_types."""
    by_layer = decoder.windows(default, SLIDES.hf_key, FIRST.hf_key, write=_write_windows)

    def read(hf_config: Mapping[str, Any], sizes: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
        types = hf_config.get("layer_types")
        if isinstance(types, list) and SLIDING in types and not SLIDES.read(hf_config, errors):
            errors.append(f"layer_types has {SLIDING}, but {SLIDES.hf_key} is not true. Correct one of them.")
        return by_layer.read(hf_config, sizes, errors)

    return dataclasses.replace(by_layer, read=read)


WINDOWS = windows_of(_last_layers)
QWEN2 = Architecture(
    model_type="qwen2",
    classes={"Qwen2ForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(),
    config_keys=QWEN_KEYS,
    key_groups=(decoder.rope(), decoder.head_dim(), WINDOWS),
    fixed=decoder.DECODER | {"use_bias": ["qkv"]},
    buffers=decoder.BUFFERS,
)
QWEN3 = Architecture(
    model_type="qwen3",
    classes={"Qwen3ForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(*decoder.HEAD_NORMS),
    config_keys=QWEN_KEYS,
    key_groups=(decoder.rope(), decoder.head_dim(128), decoder.ATTENTION_BIAS, WINDOWS),
    fixed=decoder.DECODER | {"qk_norm": True},
    buffers=decoder.BUFFERS,
)
