"""Shared parts of the tables of mixtures of experts: names of tensors, and keys of config.json.  Their routers are a
softmax over all experts, of which the most probable are chosen."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from spmd_lm.config.layers import shortest_period
from spmd_lm.config.mlp import DenseMLP, MoE
from spmd_lm.config.schema import Model
from spmd_lm.huggingface.architectures import EXPERT, ConfigKey, ConfigKeys, WeightMapping
from spmd_lm.huggingface.families.decoder import DECODER_LAYER

ROUTER_KEYS: dict[str, Any] = {"scoring_func": "softmax", "topk_method": "greedy", "n_group": None, "topk_group": None}
ROUTER_KEYS |= {"routed_scaling_factor": 1.0, "n_shared_experts": None}
"""Keys of DeepSeek's routers, which transformers' classes here do not read."""

_SIGMOID = "its router scores experts by a sigmoid, with a bias that is no parameter of the loss, and chooses in groups"
_LLAMA4 = "its router scales the experts' inputs by a sigmoid"
_GPT_OSS = "its router has biases, and its softmax is over the chosen experts"
OTHER_ROUTERS = {
    **dict.fromkeys(("DeepseekV3ForCausalLM", "deepseek_v3", "Glm4MoeForCausalLM", "glm4_moe"), _SIGMOID),
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "llama4", "llama4_text"), _LLAMA4),
    **dict.fromkeys(("GptOssForCausalLM", "gpt_oss"), _GPT_OSS),
}
"""Why models of these classes and types are refused."""


def weights(module: str, *, gate: str, up: str, down: str) -> tuple[WeightMapping, ...]:
    """The router's tensor and those of each expert, in this module of a layer."""
    expert = f"{DECODER_LAYER}.{module}.experts.{EXPERT}"
    return (
        WeightMapping("blocks.mlp.router", f"{DECODER_LAYER}.{module}.gate.weight", transposed=True),
        WeightMapping("blocks.mlp.experts.gate", f"{expert}.{gate}.weight", transposed=True),
        WeightMapping("blocks.mlp.experts.up", f"{expert}.{up}.weight", transposed=True),
        WeightMapping("blocks.mlp.experts.down", f"{expert}.{down}.weight"),
    )


# What all classes here compute: no token is dropped.  Their losses have no z-loss.
_DROPLESS = MoE(kind="moe", experts=2, capacity="none", z_loss=0).model_dump()
BALANCE = ConfigKey("router_aux_loss_coef", "balance_loss", 0.001)


def mixture(*keys: ConfigKey, other_name: str = "", **fixed: bool) -> ConfigKeys:
    """Keys of a mixture of experts in every layer.

    keys: their counterparts are keys of `model.mlp`; the first is the number of experts.
    other_name: of that key.
    fixed: keys of `model.mlp` that all models of the family have."""

    def read(hf_config: Mapping[str, Any], _: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
        number, other = keys[0], hf_config.get(other_name, keys[0].default)
        given = {number.hf_key: other, **hf_config}
        if other_name in hf_config and given[number.hf_key] != other:
            errors.append(f"{number.hf_key} and {other_name} differ. Remove one of them.")
        moe = _DROPLESS | fixed | {key.model_key: key.read(given, errors) for key in keys}
        if errors:
            return {}
        try:
            MoE.model_validate(moe)
        except ValidationError as error:
            hf_keys = {key.model_key: key.hf_key for key in keys}
            for each in error.errors():
                what = f"{each['msg'][:1].lower()}{each['msg'][1:]}"
                errors.append(f"{hf_keys[str(each['loc'][0])]}: {what}, got {json.dumps(each['input']):.40}.")
        return {"mlp": moe}

    def write(model: Model) -> dict[str, Any]:
        found = next((each for each in model.of_each_kind if each.moe), None)
        if found is None or found.moe is None:
            return {}
        values = found.moe.model_dump() | {"width": found.moe.width or found.mlp_dim}
        return {key.hf_key: values[key.model_key] for key in keys}

    names = {"output_router_logits", other_name, *(key.hf_key for key in keys)} - {""}
    return ConfigKeys(tuple(sorted(names)), read, write)


_STEP = ConfigKey("decoder_sparse_step", "period", 1)
_LISTED = "mlp_only_layers"


def _read_dense(hf_config: Mapping[str, Any], sizes: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    layers, step, listed = sizes["layers"], _STEP.read(hf_config, errors), hf_config.get(_LISTED) or []
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        errors.append(f"{_LISTED}: expected a list of layers, got {json.dumps(listed):.40}.")
    elif type(step) is int and step < 1:
        errors.append(f"{_STEP.hf_key}: expected a positive integer, got {step}.")
    if errors:
        return {}
    dense = {layer for layer in range(layers) if (layer + 1) % step} | {*listed}
    if dense >= {*range(layers)}:
        errors.append(f"{_STEP.hf_key} and {_LISTED} leave no layer with experts. Import a dense model as its family.")
    period = sizes["period"] or ["block"]
    kinds = [_as_dense(period[each % len(period)], each in dense) for each in range(layers)]
    period = shortest_period(kinds)
    return {"period": None if period == ["block"] else period}


def _as_dense(kind: Any, dense: bool) -> Any:
    """An entry of `model.period`, without experts if `dense`."""
    if not dense:
        return kind
    return ({"kind": kind} if isinstance(kind, str) else kind) | {"mlp": DenseMLP().model_dump()}


def _write_dense(model: Model) -> dict[str, Any]:
    has_experts = [bool(each.moe) for each in model.of_each_kind]
    dense = [layer for layer in range(model.layers) if not has_experts[layer % len(has_experts)]]
    return {_STEP.hf_key: 1, _LISTED: dense}


DENSE_LAYERS = ConfigKeys((_STEP.hf_key, _LISTED), _read_dense, _write_dense)
"""Layers without experts, Qwen's; read after windows, which also set `model.period`."""
