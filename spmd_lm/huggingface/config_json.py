"""Converts config.json to the sections `model` and `objective` of our configuration, and back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_lm.config.layers import shortest_period
from spmd_lm.config.mlp import DenseMLP, MoE
from spmd_lm.config.schema import Classification, Model, Objective, RunConfig
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.data.tasks.files import MNLI_CLASSES
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import IGNORED_KEYS, SPECIAL_TOKEN_KEYS, Architecture, HFTensor, Shape
from spmd_lm.huggingface.families import ARCHITECTURES, CLASSES, MODEL_TYPES
from spmd_lm.huggingface.families.experts import OTHER_ROUTERS
from spmd_lm.huggingface.rope import as_exported
from spmd_lm.runtime.formatting import abbreviate


@dataclass(frozen=True)
class ParsedConfig:
    architecture: Architecture
    model: dict[str, Any]
    objective: dict[str, Any]
    unknown_keys: list[str]

    def tensors(self, shapes: Mapping[str, Shape]) -> list[HFTensor]:
        """Tensors of a model with parameters of these canonical shapes."""
        return self.architecture.tensors(shapes, self.model["heads"])


def parse_config(hf_config: Mapping[str, Any]) -> ParsedConfig:
    """Raises ConfigError, one line per key, for a model that we cannot reproduce exactly."""
    architecture, class_name = _find_architecture(hf_config)
    errors: list[str] = []
    model = _read_model(architecture, hf_config, errors)
    for name, supported in {"quantization_config": None, **architecture.required}.items():
        value = hf_config.get(name, supported)
        if value != supported and (supported or value is not None):  # null is as good as false
            errors.append(
                f"{name}={json.dumps(value):.80} is not supported for {architecture.model_type}, only "
                f"{json.dumps(supported)}. Such a model cannot be imported."
            )
    if errors:
        raise ConfigError(*errors)
    objective = {**architecture.classes[class_name]}
    if objective["kind"] == "classification":
        labels = hf_config.get("id2label")
        objective["classes"] = len(labels) if isinstance(labels, dict) else hf_config.get("num_labels", 2)
    known_keys = {*IGNORED_KEYS, "quantization_config", *architecture.required}
    known_keys |= {key.hf_key for key in architecture.config_keys}
    known_keys |= {name for group in architecture.key_groups for name in group.names}
    unknown = hf_config.keys() - known_keys
    unknown |= {key for group in architecture.key_groups if group.unread for key in group.unread(hf_config)}
    return ParsedConfig(architecture, model, objective, sorted(unknown))


MOST_LAYERS = 10_000  # limit on a loop over layers that the files are not yet known to have
HOW_COMPUTED = ("scan", "attention")  # keys of section `model` that no import sets
DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
MODEL_DEFAULTS = {name: each.default for name, each in Model.model_fields.items() if not each.is_required()} | DROPOUT
MODEL_DEFAULTS |= {"mlp": DenseMLP().model_dump()}
MOE_DEFAULTS = {name: each.default for name, each in MoE.model_fields.items() if not each.is_required()}
MOE_TRAINING = ("capacity", "group", "balance_loss", "z_loss")  # keys of a mixture of experts for training alone


def _read_model(architecture: Architecture, hf_config: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    """Our section `model`; adds to `errors` if config.json is wrong or unsupported."""
    given: dict[str, Any] = {}
    for key in architecture.config_keys:
        value = key.read(hf_config, errors)
        if given.setdefault(key.model_key, value) != value:
            hf_keys = [other.hf_key for other in architecture.config_keys if other.model_key == key.model_key]
            errors.append(f"{' and '.join(hf_keys)} differ, but here both are model.{key.model_key}. Make them equal.")
    if architecture.key_groups and not errors and given["layers"] > MOST_LAYERS:
        errors.append(f"{given['layers']:,} layers are more than {MOST_LAYERS:,}. Download config.json again.")
    if not errors:
        for group in architecture.key_groups:
            given |= group.read(hf_config, given, errors)
    model = MODEL_DEFAULTS | dict(architecture.fixed) | given
    return {name: model[name] for name in Model.model_fields if name not in HOW_COMPUTED}


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
    if reason := next((OTHER_ROUTERS[each] for each in (*names, str(model_type)) if each in OTHER_ROUTERS), ""):
        raise ConfigError(f"{names[0] if names else model_type} is not supported: {reason}. {supported}")
    if names:
        nearest = did_you_mean(names[0], CLASSES)
        supported = f"The nearest is {nearest}. {supported}" if nearest else supported
        raise ConfigError(f"architectures: {abbreviate(names):.200} is not supported. {supported}")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        raise ConfigError(f"model_type={json.dumps(model_type):.80} is not supported. Supported: {supported}.")
    return MODEL_TYPES[model_type], next(iter(MODEL_TYPES[model_type].classes))


def build_config(model: Model, objective: Objective, model_type: str = "") -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a model, of `model_type` if several match, and its config.json.  Raises ConfigError if no
    architecture of Hugging Face matches, with the differences from the nearest one."""
    candidates = [(each, [*_differences(each, model, objective)]) for each in ARCHITECTURES]

    def distance(candidate: tuple[Architecture, list[str]]) -> tuple[int, bool, bool]:
        architecture, found = candidate
        return len(found), any("mlp.kind" in each for each in found), architecture.model_type != model_type

    architecture, found = min(candidates, key=distance)
    if found:
        raise ConfigError(
            f"no Hugging Face architecture matches this model. The nearest is {architecture.model_type}, except for "
            f"{', '.join(found)}. Supported: {', '.join(CLASSES)}."
        )
    _require_no_capacity(model)
    settings = objective.model_dump().items()
    (class_name,) = (name for name, heads in architecture.classes.items() if heads.items() <= settings)
    hf_config: dict[str, Any] = {"architectures": [class_name], "model_type": architecture.model_type}
    hf_config |= _write_model(architecture, model) | dict.fromkeys(SPECIAL_TOKEN_KEYS)
    if isinstance(objective, Classification):
        hf_config |= _labels([f"LABEL_{label}" for label in range(objective.classes)])
    return architecture, hf_config


def _require_no_capacity(model: Model) -> None:
    """Raises ConfigError for experts that drop tokens in training, which Hugging Face's do not."""
    for each in model.mixtures:
        if each.capacity != "none":
            key, advice = "model.mlp.capacity", "Use"
            if each != model.mlp:
                key = "mlp.capacity in model.period"
                advice = "In a run with the experts in model.mlp, and the dense layers in model.period, use"
            raise ConfigError(
                f"{key}={each.capacity}: in training experts drop the tokens beyond it, and Hugging Face's drop none. "
                f"{advice} model.mlp.capacity=none to export the model as it is evaluated here, without drops."
            )


def _write_model(architecture: Architecture, model: Model) -> dict[str, Any]:
    """The keys of config.json for the model, as far as the architecture supports them."""
    hf_config: dict[str, Any] = {}
    values = model.model_dump() | {"mlp_width": model.mlp_dim, "kv_heads": model.kv_heads or model.heads}
    values |= {"query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_dim}
    for key in architecture.config_keys:
        value = values[key.model_key]
        hf_config[key.hf_key] = next((theirs for theirs, ours in key.choices.items() if ours == value), value)
    for group in architecture.key_groups:
        hf_config |= group.write(model)
    return hf_config


def _differences(architecture: Architecture, model: Model, objective: Objective) -> Iterator[str]:
    """Settings that this architecture lacks: its config.json would not restore them."""
    if architecture.fixed.get("kind", "gpt") != model.kind:
        yield f"model.kind={model.kind}"
    errors: list[str] = []
    found = False
    settings = model.model_dump()
    written = comparable(_read_model(architecture, _write_model(architecture, model), errors))
    for name, value in comparable(as_exported(model).model_dump()).items():
        if name == "mlp_width" and None in (written[name], value):  # the two differ in `mlp`
            continue
        if written[name] != value and name != "kind":
            found = True
            yield from _describe_mlps(written[name], value) if name == "mlp" else [f"model.{name}={settings[name]}"]
    if errors and not found:
        yield f"what its config.json is refused for ({errors[0].rstrip('.')})"
    if model.kind == "bert" and not model.token_types:
        yield "model.token_types=0"
    if objective.kind not in {heads["kind"] for heads in architecture.classes.values()}:
        yield f"objective.kind={objective.kind}"
    if objective.module:
        yield f"objective.module={objective.module}"


def _describe_mlps(written: Sequence[Mapping[str, Any]], mlps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Settings of a period's MLPs that differ from those that an architecture has written."""
    kinds = [mlp["kind"] for mlp in mlps]
    if kinds != [mlp["kind"] for mlp in written]:
        yield f"model.mlp.kind={' and '.join(dict.fromkeys(kinds))}"
        return
    for mlp, other in zip(mlps, written, strict=True):
        yield from (f"model.mlp.{key}={each}" for key, each in mlp.items() if other[key] != each)


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A section `model` without keys that leave the meaning of parameters unchanged, and with defaults resolved."""
    m = {name: value for name, value in settings.items() if name not in (*HOW_COMPUTED, *DROPOUT)}
    m["kv_heads"] = m["kv_heads"] or m["heads"]
    m["head_width"] = m["head_width"] or m["width"] / m["heads"]
    m["mlp_width"] = m["mlp_width"] or 4 * m["width"]
    m["query_pre_attn_scalar"] = m["query_pre_attn_scalar"] or m["head_width"]
    with_bias = ["qkv", "out", "mlp", *(["norm"] if m["norm_type"] == "layer" else [])]
    with_bias += ["head"] if m["kind"] == "bert" else []
    m["use_bias"] = [name for name in with_bias if m["use_bias"] is True or (m["use_bias"] and name in m["use_bias"])]
    period = [{"kind": each} if isinstance(each, str) else each for each in m["period"] or ["block"]]
    kinds = [period[layer % len(period)] for layer in range(m["layers"])]
    m["mlp"] = shortest_period([_comparable_mlp({**m, **kind}) for kind in kinds])
    m["period"] = shortest_period([{key: value for key, value in kind.items() if key != "mlp"} for kind in kinds])
    if all(mlp["kind"] == "moe" for mlp in m["mlp"]):
        m["mlp_width"] = None  # there is no such MLP
    return m


def _comparable_mlp(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section `mlp` of one kind of layer, without the keys that matter in training alone, and the experts' width
    resolved."""
    if settings["mlp"]["kind"] == "dense":
        return {**settings["mlp"]}
    return outside_training(
        {**MOE_DEFAULTS, **settings["mlp"]} | {"width": settings["mlp"].get("width") or settings["mlp_width"]}
    )


def outside_training(mlp: Mapping[str, Any]) -> dict[str, Any]:
    """A section `mlp` without the keys that matter in training alone."""
    return {key: value for key, value in mlp.items() if key not in MOE_TRAINING}


CLASS_NAMES = {  # by task, in the order of its classes
    "mnli": MNLI_CLASSES,
    "qqp": ("not_duplicate", "duplicate"),
    "sst2": ("negative", "positive"),
    "cola": ("unacceptable", "acceptable"),
}


def label_names(config: RunConfig, source: Mapping[str, Any], is_trained: bool) -> dict[str, Any]:
    """A classifier's id2label and label2id: its task's, once trained on it, or else its imported config.json's; {} if
    its classes have no names."""
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
