"""Converts rotary positions between config.json, in rope_parameters or the older rope_scaling, and our section
`model`."""

import json
from collections.abc import Collection, Mapping
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from spmd_lm.config.rope import DynamicRope, RopeScaling
from spmd_lm.config.schema import Model
from spmd_lm.config.section import Section, kind_of
from spmd_lm.errors import ConfigError

NESTED = ("rope_scaling", "rope_parameters")
CONTEXT_KEY = "original_max_position_embeddings"
SCALINGS: dict[str, type[Section]] = {kind_of(section): section for section in get_args(get_args(RopeScaling)[0])}
"""Sections by rope_type, which equals our `kind`."""


def _hf_keys(section: type[Section]) -> dict[str, str]:
    """Hugging Face's keys of a scaling, by ours, except for `kind` and for the original context of `dynamic`."""
    excluded = ("kind", "original_context") if section is DynamicRope else ("kind",)
    keys = [key for key in section.model_fields if key not in excluded]
    return {key: CONTEXT_KEY if key == "original_context" else key for key in keys}


def flatten_rope(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys inside rope_parameters, or the older rope_scaling, at the top level.  Raises
    ConfigError if they are not objects, or contradict each other."""
    flat = {key: value for key, value in hf_config.items() if key not in NESTED}
    given = {name: hf_config[name] for name in NESTED if hf_config.get(name)}
    for name, rope in given.items():
        if not isinstance(rope, dict):
            raise ConfigError(f"{name}={json.dumps(rope):.80}: expected an object. Download config.json again.")
        if other := [key for key, value in rope.items() if isinstance(value, dict)]:
            raise ConfigError(
                f"{name}: settings for {' and '.join(other):.80} apart are not supported. Give one for all."
            )
        contexts = [each for each in (flat.get(CONTEXT_KEY), rope.get(CONTEXT_KEY)) if each is not None]
        if contexts[1:] not in ([], contexts[:1]):
            raise ConfigError(f"{CONTEXT_KEY}={json.dumps(contexts):.80}, of which one is in {name}. Remove one.")
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ConfigError("rope_scaling and rope_parameters differ. Remove one of them.")
    return flat | {key: value for rope in given.values() for key, value in rope.items()}


def read_keys(rope: Mapping[str, Any]) -> set[str]:
    """Keys of rope_parameters that `parse_rope` reads for their rope_type."""
    kind = _rope_type(rope)
    keys = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *([CONTEXT_KEY] if kind == "dynamic" else [])}
    return keys | ({*_hf_keys(SCALINGS[kind]).values()} if kind in SCALINGS else set())


def parse_rope(
    rope: Mapping[str, Any], context: int, errors: list[str], scalings: Collection[str] = SCALINGS
) -> dict[str, Any]:
    """`rope_theta`, `rope_fraction` and `rope_scaling` of our section `model`, from the keys of one rope_parameters.

    context: max_position_embeddings, the default original context.
    scalings: supported values of rope_type, besides default.

    Adds to `errors` the settings that transformers would compute differently, or not at all."""
    kind = _rope_type(rope)
    new, old = rope.get("rope_type"), rope.get("type")
    if kind not in ("default", *scalings):
        supported = ", ".join(("default", *scalings))
        errors.append(f"rope_type={kind:.40} is not supported here. Supported: {supported}.")
        kind = "default"
    if new and old and new != old:
        errors.append(f"rope_type={json.dumps(new):.40} and type={json.dumps(old):.40} differ. Remove one of them.")
    return {
        "rope_theta": _number(rope, "rope_theta", Model.model_fields["rope_theta"].default, errors),
        "rope_fraction": _number(rope, "partial_rotary_factor", 1.0, errors),
        "rope_scaling": None if kind == "default" else _scaling(rope, kind, context, errors),
    }


def rope_parameters(model: Model) -> dict[str, Any]:
    """The keys that `parse_rope` reads back as `model`'s, without defaults."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_fraction != 1:
        rope["partial_rotary_factor"] = model.rope_fraction
    if scaling := model.rope_scaling:
        hf_keys = _hf_keys(type(scaling))
        own = scaling.model_dump(exclude_defaults=True, exclude={"kind"})
        rope |= {"rope_type": scaling.kind} | {hf_keys[key]: value for key, value in own.items() if key in hf_keys}
    return rope


def as_exported(model: Model) -> Model:
    """The model to export.  `dynamic` scaling beyond the original context becomes a fixed theta: all our rows have it,
    but transformers would use it only for the longest ones.  A shorter context becomes the original one."""
    scaling = model.rope_scaling
    if not isinstance(scaling, DynamicRope):
        return model
    if model.context <= scaling.original_context:
        return model.model_copy(update={"context": scaling.original_context})
    theta = scaling.grown_theta(model.rope_theta, model.context, model.rotated_width)
    return model.model_copy(update={"rope_theta": theta, "rope_scaling": None})


def export_rope(model: Model) -> dict[str, Any]:
    """Keys of config.json for rotary positions, readable by transformers 4 too."""
    model = as_exported(model)
    rope, scaling = rope_parameters(model), model.rope_scaling
    keys: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_parameters": rope}
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = rope
    if isinstance(scaling, DynamicRope):  # transformers scales beyond this context
        keys["max_position_embeddings"] = model.context
    return keys


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _number(rope: Mapping[str, Any], key: str, default: float, errors: list[str]) -> float:
    value = rope.get(key, default)
    if type(value) in (int, float) and 0 < value < 2**31:
        return float(value)
    errors.append(f"{key}: expected a positive number, got {json.dumps(value):.40}.")
    return default


def _scaling(rope: Mapping[str, Any], kind: str, context: int, errors: list[str]) -> dict[str, Any] | None:
    original = rope.get(CONTEXT_KEY)
    if kind == "dynamic" and original not in (None, context):
        errors.append(
            f"{CONTEXT_KEY}={json.dumps(original):.40} with rope_type=dynamic, for which transformers takes "
            f"max_position_embeddings={context}. Make them equal."
        )
    hf_keys = _hf_keys(SCALINGS[kind])
    given = {} if kind == "linear" else {"original_context": context}
    given |= {key: rope[hf_key] for key, hf_key in hf_keys.items() if rope.get(hf_key) is not None}
    try:
        return TypeAdapter(RopeScaling).validate_python({"kind": kind} | given).model_dump()
    except ValidationError as error:
        for each in error.errors():
            key = hf_keys[str(each["loc"][-1])] if each["loc"][-1] != kind else f"rope_type={kind}"
            got = "" if each["type"] in ("missing", "rope") else f", got {json.dumps(each['input']):.40}"
            what = f"missing, and rope_type={kind} needs it" if each["type"] == "missing" else each["msg"] + got
            errors.append(f"{key}: {what[:1].lower()}{what[1:]}.")
    return None
