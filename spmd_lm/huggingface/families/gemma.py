"""Gemma 2 (arXiv:2408.00118), and the text models of Gemma 3 (arXiv:2503.19786)."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from spmd_lm.config.schema import Model
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import Architecture, ConfigKey, ConfigKeys, WeightMapping
from spmd_lm.huggingface.families import decoder
from spmd_lm.huggingface.families.decoder import DECODER_LAYER, FULL, SLIDING, layer_types_of
from spmd_lm.huggingface.rope import flatten_rope, parse_rope, read_keys, rope_parameters

NORMS = (
    WeightMapping("blocks.post_norm1.scale", f"{DECODER_LAYER}.post_attention_layernorm.weight"),
    WeightMapping("blocks.post_norm2.scale", f"{DECODER_LAYER}.post_feedforward_layernorm.weight"),
)
FIXED = decoder.DECODER | {"norm": "sandwich", "norm_type": "zero_centered_rms", "scale_embeddings": True}
REQUIRED = {"use_bidirectional_attention": False}


def _keys(logit_softcap: float | None, attention_softcap: float | None, **defaults: Any) -> tuple[ConfigKey, ...]:
    return (
        *decoder.config_keys(
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
            **defaults,
        ),
        ConfigKey("hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu_tanh"}),
        ConfigKey("query_pre_attn_scalar", "query_pre_attn_scalar", 256),
        ConfigKey("final_logit_softcapping", "logit_softcap", logit_softcap, kind=float),
        ConfigKey("attn_logit_softcapping", "attention_softcap", attention_softcap, kind=float),
    )


GEMMA2 = Architecture(
    model_type="gemma2",
    classes={"Gemma2ForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(*NORMS, norm2="pre_feedforward_layernorm"),
    config_keys=_keys(30.0, 50.0, vocab_size=256000, max_position_embeddings=8192),
    key_groups=(
        decoder.rope(),
        decoder.head_dim(256),
        decoder.ATTENTION_BIAS,
        decoder.windows(
            lambda _, layers, errors: [(SLIDING, FULL)[layer % 2] for layer in range(layers)], write=layer_types_of
        ),
    ),
    fixed=FIXED,
    required=REQUIRED,
    buffers=decoder.BUFFERS,
)


# --- Gemma 3: layers with a window have rotary positions of their own


def _read_layers(hf_config: Mapping[str, Any], sizes: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    every = hf_config.get("sliding_window_pattern", 6)
    if type(every) is not int or every < 1:
        errors.append(f"sliding_window_pattern: expected a positive integer, got {every!r:.40}.")
        return {}

    def default(_: Mapping[str, Any], layers: int, errors: list[str]) -> list[str]:
        return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]

    ropes = _ropes(hf_config)
    of_full, of_window = (parse_rope(ropes[kind], sizes["context"], errors) for kind in (FULL, SLIDING))
    for rope in (of_full, of_window):
        if rope.pop("rope_fraction") != 1:
            errors.append("partial_rotary_factor is not supported here. Leave it out.")
    if of_window["rope_scaling"] and not of_full["rope_scaling"]:
        kind = of_window["rope_scaling"]["kind"]
        errors.append(f"rope_type={kind} of {SLIDING} alone is not supported. {FULL} has to have one too.")
    block = {"kind": "block"} | {key: value for key, value in of_full.items() if value != of_window[key]}
    window = decoder.window_layer(hf_config)
    types = decoder.read_layer_types(hf_config, sizes["layers"], default, errors)
    period = decoder.period_of(types, {FULL: block if len(block) > 1 else "block", SLIDING: window}, errors)
    return of_window | {"period": period}


def _ropes(hf_config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rotary positions of each type of layer, in transformers 5's form or the older one."""
    thetas = {FULL: hf_config.get("rope_theta", 1e6), SLIDING: hf_config.get("rope_local_base_freq", 1e4)}
    by_type = hf_config.get("rope_parameters") or {}
    if not isinstance(by_type, dict) or by_type.keys() - {FULL, SLIDING}:
        raise ConfigError(f"rope_parameters={json.dumps(by_type):.80}: expected those of {FULL} and of {SLIDING}.")
    ropes = {kind: flatten_rope({"rope_parameters": by_type.get(kind)}) for kind in thetas}
    ropes[FULL] |= flatten_rope({"rope_scaling": hf_config.get("rope_scaling")})
    return {kind: {"rope_theta": theta} | ropes[kind] for kind, theta in thetas.items()}


def _unread(hf_config: Mapping[str, Any]) -> Iterable[str]:
    return {key for rope in _ropes(hf_config).values() for key in rope.keys() - read_keys(rope)}


def _write_layers(model: Model) -> dict[str, Any]:
    by_type = {SLIDING if each.span else FULL: rope_parameters(each) for each in model.of_each_kind}
    default = {"rope_type": "default", "rope_theta": model.rope_theta}
    return layer_types_of(model) | {"rope_parameters": {FULL: default, SLIDING: default} | by_type}


LAYERS = ConfigKeys(
    (
        *("layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
        *("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"),
    ),
    _read_layers,
    _write_layers,
    _unread,
)
GEMMA3 = Architecture(
    model_type="gemma3_text",
    classes={"Gemma3ForCausalLM": {"kind": "causal_lm"}},
    weights=decoder.weights(*NORMS, *decoder.HEAD_NORMS, norm2="pre_feedforward_layernorm"),
    config_keys=_keys(None, None, vocab_size=262208, max_position_embeddings=131072),
    key_groups=(LAYERS, decoder.head_dim(256), decoder.ATTENTION_BIAS),
    fixed=FIXED | {"qk_norm": True},
    required=REQUIRED,
    buffers=decoder.BUFFERS,
)
