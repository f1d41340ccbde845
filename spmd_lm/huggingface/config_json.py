"""config.json to the sections `model` and `objective` of our configuration, and back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_lm.config.schema import Classification, Model, Objective, RunConfig
from spmd_lm.data.tasks.files import MNLI_CLASSES
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface import architectures
from spmd_lm.huggingface.architectures import ARCHITECTURES, CLASSES, LLAMA, MODEL_TYPES, Architecture, ConfigKey
from spmd_lm.huggingface.rope import export_rope, flatten_rope, parse_rope, read_keys
from spmd_lm.runtime.formatting import abbreviate

EXPECTED = {bool: "true or false", float: "a number", int: "an integer"}


@dataclass(frozen=True)
class ParsedConfig:
    """The sections `model` and `objective` that a config.json stands for, and its keys that we do not know."""

    architecture: Architecture
    model: dict[str, Any]
    objective: dict[str, Any]
    unknown_keys: list[str]


def parse_config(hf_config: Mapping[str, Any]) -> ParsedConfig:
    """Raises ConfigError, one line per key, if we cannot compute exactly what this model computes."""
    architecture, class_name = _find_architecture(hf_config)
    is_rotary = architecture is LLAMA
    if is_rotary:
        hf_config = flatten_rope(hf_config)
    errors: list[str] = []
    model = {**architecture.fixed}
    for key in architecture.config_keys:
        value = _parse_value(key, hf_config.get(key.hf_key, key.default), errors)
        if model.setdefault(key.model_key, value) != value:
            hf_keys = [other.hf_key for other in architecture.config_keys if other.model_key == key.model_key]
            errors.append(f"{' and '.join(hf_keys)} differ, but here both are model.{key.model_key}. Make them equal.")
    if is_rotary:
        model |= parse_rope(hf_config, model["context"], errors)
    for name, supported in architecture.required.items():
        value = hf_config.get(name, supported)
        if value != supported and (supported or value is not None):  # null is as good as false
            errors.append(
                f"{name}={json.dumps(value):.80} is not supported for {architecture.model_type}, only "
                f"{json.dumps(supported)}. Such a model cannot be imported."
            )
    head_dim = hf_config.get("head_dim")
    if not errors and head_dim not in (None, model["width"] / max(model["heads"], 1)):
        errors.append(
            f"head_dim={json.dumps(head_dim):.80} is not hidden_size / num_attention_heads = {model['width']} / "
            f"{model['heads']}. Such a model cannot be imported."
        )
    if errors:
        raise ConfigError(*errors)
    rope_defaults = {key: Model.model_fields[key].default for key in ("rope_theta", "rope_fraction", "rope_scaling")}
    model = {"dropout": 0.0} | rope_defaults | model
    objective = {**architecture.classes[class_name]}
    if objective["kind"] == "classification":
        labels = hf_config.get("id2label")
        objective["classes"] = len(labels) if isinstance(labels, dict) else hf_config.get("num_labels", 2)
    known_keys = {*architectures.IGNORED_KEYS, *architecture.required, "head_dim"}
    known_keys |= {key.hf_key for key in architecture.config_keys} | (read_keys(hf_config) if is_rotary else set())
    return ParsedConfig(architecture, model, objective, sorted(hf_config.keys() - known_keys))


def _find_architecture(hf_config: Mapping[str, Any]) -> tuple[Architecture, str]:
    """The architecture and the name of its model class."""
    names, model_type = hf_config.get("architectures") or [], hf_config.get("model_type")
    supported = f"Supported: {', '.join(CLASSES)}."
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"architectures={json.dumps(names):.80}: expected a list of class names. {supported}")
    for name in names:
        if name in CLASSES:
            if model_type and model_type != CLASSES[name].model_type:
                raise ConfigError(
                    f"model_type={json.dumps(model_type):.80}, but {name} has model_type={CLASSES[name].model_type}. "
                    f"Download config.json again."
                )
            return CLASSES[name], name
    if names:
        raise ConfigError(f"architectures: {abbreviate(names):.200} is not supported. {supported}")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        raise ConfigError(f"model_type={json.dumps(model_type):.80} is not supported. Supported: {supported}.")
    return MODEL_TYPES[model_type], next(iter(MODEL_TYPES[model_type].classes))


def _parse_value(key: ConfigKey, value: Any, errors: list[str]) -> Any:
    """A value of config.json as our `model` has it; adds to `errors` if it is not of the key's type."""
    if key.choices:
        if isinstance(value, str) and value in key.choices:
            return key.choices[value]
        supported = ", ".join(key.choices)
        errors.append(f"{key.hf_key}={json.dumps(value):.40} is not supported. Supported: {supported}.")
        return None
    if value is None and key.default is None:
        return None
    kind = int if key.default is None else type(key.default)
    types = (int, float) if kind is float else (kind,)
    if type(value) in types and abs(value) < 2**31:
        return kind(value)
    errors.append(f"{key.hf_key}: expected {EXPECTED[kind]}, got {json.dumps(value):.40}.")
    return value


def build_config(model: Model, objective: Objective) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a model, and its config.json.

    Raises ConfigError if Hugging Face has none like it, with what differs from the nearest one."""

    def distance(architecture: Architecture) -> tuple[bool, int]:
        return architecture.fixed["kind"] != model.kind, len(_mismatches(architecture, model, objective))

    architecture = min(ARCHITECTURES, key=distance)
    if mismatches := _mismatches(architecture, model, objective):
        raise ConfigError(
            f"no Hugging Face architecture matches this model. The nearest is {architecture.model_type}, except for "
            f"{', '.join(mismatches)}. Supported: {', '.join(CLASSES)}."
        )
    settings = objective.model_dump().items()
    (class_name,) = (name for name, heads in architecture.classes.items() if heads.items() <= settings)
    hf_config: dict[str, Any] = {"architectures": [class_name], "model_type": architecture.model_type}
    values = model.model_dump() | {"mlp_width": model.mlp_dim, "kv_heads": model.kv_heads or model.heads}
    for key in architecture.config_keys:
        value = values[key.model_key]
        hf_config[key.hf_key] = next((theirs for theirs, ours in key.choices.items() if ours == value), value)
    hf_config |= dict.fromkeys(architectures.SPECIAL_TOKEN_KEYS)
    if isinstance(objective, Classification):
        hf_config |= _labels([f"LABEL_{label}" for label in range(objective.classes)])
    if architecture is LLAMA:
        hf_config["head_dim"] = model.head_width
        hf_config |= export_rope(model)
    return architecture, hf_config


CLASS_NAMES = {  # of the tasks' classes, in order
    "mnli": MNLI_CLASSES,
    "qqp": ("not_duplicate", "duplicate"),
    "sst2": ("negative", "positive"),
    "cola": ("unacceptable", "acceptable"),
}


def label_names(config: RunConfig, source: Mapping[str, Any], is_trained: bool) -> dict[str, Any]:
    """id2label and label2id of a classifier: those of its task, once it is trained on one, or of the config.json that
    it was imported with.  {} if neither names them."""
    if not isinstance(config.objective, Classification):
        return {}
    classes, given = config.objective.classes, source.get("id2label")
    names = CLASS_NAMES.get(getattr(config.data, "task", "")) if is_trained else None
    if names is None and isinstance(given, dict):
        listed = [given.get(str(label)) for label in range(classes)]
        if len(given) == classes and all(isinstance(name, str) for name in listed) and len({*listed}) == classes:
            names = tuple(map(str, listed))
    return _labels(names or ())


def _labels(names: Sequence[str]) -> dict[str, Any]:
    if not names:
        return {}
    numbers = {name: label for label, name in enumerate(names)}
    return {"id2label": {str(label): name for name, label in numbers.items()}, "label2id": numbers}


def _mismatches(architecture: Architecture, model: Model, objective: Objective) -> list[str]:
    """The settings that no model of this architecture has."""
    settings = model.model_dump()
    if model.kv_heads == model.heads:
        settings["kv_heads"] = None  # which means the same
    mismatches = [f"model.{key}={settings[key]}" for key, value in architecture.fixed.items() if settings[key] != value]
    if architecture.fixed["kind"] == "bert" and not model.token_types:
        mismatches.append("model.token_types=0")
    (activations,) = (key.choices for key in architecture.config_keys if key.model_key == "activation")
    if model.activation not in activations.values():
        mismatches.append(f"model.activation={model.activation}")
    if objective.kind not in {heads["kind"] for heads in architecture.classes.values()}:
        mismatches.append(f"objective.kind={objective.kind}")
    if objective.module:
        mismatches.append(f"objective.module={objective.module}")
    return mismatches
