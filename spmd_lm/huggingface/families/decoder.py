"""Shared parts of the tables of Llama-like decoders: names of tensors, and keys of config.json."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spmd_lm.config.layers import shortest_period
from spmd_lm.config.schema import Model
from spmd_lm.config.types import Bias
from spmd_lm.huggingface.architectures import LAYER, ConfigKey, ConfigKeys, WeightMapping, linear
from spmd_lm.huggingface.rope import CONTEXT_KEY, NESTED, SCALINGS, export_rope, flatten_rope, parse_rope, read_keys

DECODER_LAYER = f"model.layers.{LAYER}"
FULL, SLIDING = "full_attention", "sliding_attention"  # entries of layer_types

_MODEL_KEYS = {
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "mlp_width",
    "attention_dropout": "attention_dropout",
    "rms_norm_eps": "norm_eps",
    "layer_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def config_keys(norm_eps: str = "rms_norm_eps", **defaults: Any) -> tuple[ConfigKey, ...]:
    """Common keys of config.json, with `defaults` that differ from Llama's.  norm_eps: that key's name."""
    shared: dict[str, Any] = {
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    shared |= {"num_attention_heads": 32, "num_key_value_heads": None, "intermediate_size": 11008}
    shared |= {"attention_dropout": 0.0, norm_eps: 1e-6, "tie_word_embeddings": False} | defaults
    return tuple(ConfigKey(key, _MODEL_KEYS[key], default) for key, default in shared.items())


SILU = ConfigKey("hidden_act", "activation", "silu", {"silu": "swiglu"})


def weights(*more: WeightMapping, norm2: str = "post_attention_layernorm") -> tuple[WeightMapping, ...]:
    """Llama's tensors, biases for models that have them, and `more` of a block.  norm2: name of the MLP's norm."""
    return (
        WeightMapping("embedding.tokens", "model.embed_tokens.weight"),
        WeightMapping("blocks.norm1.scale", f"{DECODER_LAYER}.input_layernorm.weight"),
        *linear("blocks.attention.query", f"{DECODER_LAYER}.self_attn.q_proj", transposed=True),
        *linear("blocks.attention.key", f"{DECODER_LAYER}.self_attn.k_proj", transposed=True),
        *linear("blocks.attention.value", f"{DECODER_LAYER}.self_attn.v_proj", transposed=True),
        *linear("blocks.attention.out", f"{DECODER_LAYER}.self_attn.o_proj"),
        WeightMapping("blocks.norm2.scale", f"{DECODER_LAYER}.{norm2}.weight"),
        *linear("blocks.mlp.gate", f"{DECODER_LAYER}.mlp.gate_proj", transposed=True),
        *linear("blocks.mlp.up", f"{DECODER_LAYER}.mlp.up_proj", transposed=True),
        *linear("blocks.mlp.down", f"{DECODER_LAYER}.mlp.down_proj"),
        *more,
        WeightMapping("head.norm.scale", "model.norm.weight"),
        WeightMapping("head.tokens", "lm_head.weight"),
    )


HEAD_NORMS = (
    WeightMapping("blocks.attention.query_norm.scale", f"{DECODER_LAYER}.self_attn.q_norm.weight"),
    WeightMapping("blocks.attention.key_norm.scale", f"{DECODER_LAYER}.self_attn.k_norm.weight"),
)
BUFFERS = (f"{DECODER_LAYER}.self_attn.rotary_emb.inv_freq",)
DECODER = {"norm_type": "rms", "positions": "rotary", "use_bias": False}


# --- keys that are read together


def head_dim(default: int | None = None) -> ConfigKeys:
    """default: value if config.json lacks the key; None for hidden_size / num_attention_heads."""

    def read(hf_config: Mapping[str, Any], sizes: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
        width = hf_config.get("head_dim", default)
        if width is not None and (type(width) is not int or width < 1):
            errors.append(f"head_dim: expected a positive integer, got {json.dumps(width):.40}.")
            return {}
        return {"head_width": None if width == sizes["width"] / max(sizes["heads"], 1) else width}

    return ConfigKeys(("head_dim",), read, lambda model: {"head_dim": model.head_dim})


def rope(
    theta: str = "rope_theta",
    fraction: str = "partial_rotary_factor",
    default_fraction: float | None = None,
    scalings: Collection[str] = SCALINGS,
    default_theta: float | None = None,
) -> ConfigKeys:
    """Keys of rotary positions.

    theta, fraction: keys outside of rope_parameters.
    default_fraction: value if config.json lacks the key; None if all models rotate whole heads.
    scalings: supported values of rope_type, besides default.
    default_theta: value if config.json lacks the key, and it is not 10,000."""

    def read(hf_config: Mapping[str, Any], sizes: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
        outside = {
            "rope_theta": hf_config.get(theta, default_theta),
            "partial_rotary_factor": hf_config.get(fraction, default_fraction or 1.0),
        }
        given = {key: value for key, value in outside.items() if value is not None}
        keys = parse_rope(given | inside(hf_config), sizes["context"], errors, scalings)
        if default_fraction is None and keys["rope_fraction"] != 1:
            errors.append(f"partial_rotary_factor={keys['rope_fraction']} is not supported here, only 1.0.")
            keys["rope_fraction"] = 1.0
        return keys

    def inside(hf_config: Mapping[str, Any]) -> dict[str, Any]:
        return flatten_rope({name: hf_config[name] for name in (*NESTED, CONTEXT_KEY) if name in hf_config})

    def unread(hf_config: Mapping[str, Any]) -> Iterable[str]:
        flat = inside(hf_config)
        return flat.keys() - read_keys(flat) - {CONTEXT_KEY}

    def write(model: Model) -> dict[str, Any]:
        keys = export_rope(model)
        keys[theta] = keys["rope_theta"]
        return keys if default_fraction is None else keys | {fraction: model.rope_fraction}

    return ConfigKeys((*NESTED, theta, fraction, CONTEXT_KEY), read, write, unread)


def bias_keys(*always: Bias, **keys: tuple[bool, tuple[Bias, ...]]) -> ConfigKeys:
    """Keys of config.json that switch biases on: (default, projections) by name.
    always: projections that always have biases."""

    def read(hf_config: Mapping[str, Any], _: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
        chosen = set(always)
        for key, (default, switched) in keys.items():
            chosen |= set(switched) if ConfigKey(key, "use_bias", default).read(hf_config, errors) else set()
        return {"use_bias": [each for each in ("qkv", "out", "mlp", "norm") if each in chosen] or False}

    def write(model: Model) -> dict[str, Any]:
        return {key: all(map(model.has_bias, switched)) for key, (_, switched) in keys.items()}

    return ConfigKeys(tuple(keys), read, write)


ATTENTION_BIAS = bias_keys(attention_bias=(False, ("qkv", "out")))


# --- layers that attend within a window

DefaultTypes = Callable[[Mapping[str, Any], int, list[str]], Sequence[str]]
"""(config.json, layers, errors) -> FULL or SLIDING for each layer, if config.json has no layer_types."""


def windows(default: DefaultTypes, *names: str, write: Callable[[Model], dict[str, Any]]) -> ConfigKeys:
    """names: further keys that `default` and `write` use, besides layer_types and sliding_window."""

    def read(hf_config: Mapping[str, Any], sizes: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
        types = read_layer_types(hf_config, sizes["layers"], default, errors)
        return {"period": period_of(types, {FULL: "block", SLIDING: window_layer(hf_config)}, errors)}

    return ConfigKeys(("layer_types", "sliding_window", *names), read, write)


def same_window(span: int | None = None) -> ConfigKeys:
    """One sliding_window for all layers, or none if it is null.  span: value if config.json lacks the key."""

    def all_alike(hf_config: Mapping[str, Any], layers: int, _: list[str]) -> list[str]:
        return [FULL if hf_config.get("sliding_window", span) is None else SLIDING] * layers

    return windows(all_alike, write=lambda model: {"sliding_window": layer_types_of(model)["sliding_window"]})


def read_layer_types(
    hf_config: Mapping[str, Any], layers: int, default: DefaultTypes, errors: list[str]
) -> Sequence[str]:
    """FULL or SLIDING for each layer."""
    types = hf_config.get("layer_types")
    if types is None:
        return default(hf_config, layers, errors)
    if isinstance(types, list) and len(types) == layers and all(each in (FULL, SLIDING) for each in types):
        return types
    expected = f"expected {FULL} or {SLIDING} for each of {layers} layers"
    errors.append(f"layer_types: {expected}, got {json.dumps(types):.80}.")
    return ()


def window_layer(hf_config: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """An entry of `model.period` for a layer with a window and its `own` keys."""
    return {"kind": "window", "span": hf_config.get("sliding_window", 4096)} | own


def period_of(types: Sequence[str], kinds: Mapping[str, Any], errors: list[str]) -> list[Any] | None:
    """`model.period` of layers of these types; None if all are plain blocks."""
    span = kinds[SLIDING]["span"] if SLIDING in types else 1
    if type(span) is not int or span < 1:
        errors.append(f"sliding_window: expected a positive integer, got {json.dumps(span):.40}.")
        return None
    period = shortest_period([kinds[each] for each in types])
    return None if period in ([], ["block"]) else period


def layer_types_of(model: Model) -> dict[str, Any]:
    spans = [getattr(model.kinds[layer % len(model.kinds)], "span", None) for layer in range(model.layers)]
    return {
        "layer_types": [SLIDING if span else FULL for span in spans],
        "sliding_window": next(filter(None, spans), None),
    }
