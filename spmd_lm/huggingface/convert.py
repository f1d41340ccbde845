"""Between Hugging Face's models and ours, by the tables of `architectures`: config.json read and written, and which
tensors hold our leaves.  Nothing here reads a file or touches an array."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_lm.config.schema import Classification, Model, Objective
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import (
    ARCHITECTURES,
    CARRIED,
    CLASSES,
    HARMLESS,
    LAYER,
    LLAMA,
    Architecture,
    Key,
    Row,
    Shape,
)

# --- config.json to ours ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Description:
    """What a config.json says: sections `model` and `objective` of a configuration, and the keys that were not read."""

    architecture: Architecture
    model: dict[str, Any]
    objective: dict[str, Any]
    unread: list[str]


def read_config(theirs: Mapping[str, Any]) -> Description:
    """What this config.json says in our words.  ConfigError, a line for each key, if it is of no model that we compute
    exactly."""
    architecture, name = _architecture(theirs)
    theirs = _rope(theirs) if architecture is LLAMA else theirs
    problems: list[str] = []
    model = dict(architecture.fixed)
    for key in architecture.keys:
        value = _value(key, theirs.get(key.theirs, key.default), problems)
        if model.setdefault(key.ours, value) != value:
            others = [other.theirs for other in architecture.keys if other.ours == key.ours]
            problems.append(f"{' and '.join(others)} differ; here they are one, model.{key.ours}. Make them equal.")
    for wanted, value in architecture.only.items():
        said = theirs.get(wanted, value)
        if said != value and not (said is None and not value):
            problems.append(
                f"{wanted}={json.dumps(said)} makes another {architecture.kind} than the one computed here, which has "
                f"{json.dumps(value)}. Such a model cannot be imported."
            )
    head = theirs.get("head_dim")
    if not problems and head is not None and head * model["heads"] != model["width"]:
        problems.append(
            f"head_dim={json.dumps(head)} is not hidden_size / num_attention_heads = {model['width']} / "
            f"{model['heads']}. Such a model cannot be imported."
        )
    if problems:
        raise ConfigError(*problems)
    model = {"dropout": 0.0, "rope_theta": Model.model_fields["rope_theta"].default} | model
    known = HARMLESS | architecture.only.keys() | {key.theirs for key in architecture.keys} | {"head_dim"}
    objective = dict(architecture.classes[name])
    if objective["kind"] == "classification":
        labels = theirs.get("id2label")
        objective["classes"] = len(labels) if isinstance(labels, dict) else theirs.get("num_labels", 2)
    return Description(architecture, model, objective, sorted(theirs.keys() - known))


def _architecture(theirs: Mapping[str, Any]) -> tuple[Architecture, str]:
    """The architecture, and which of its classes."""
    kinds: dict[str, Architecture] = {}
    for architecture in ARCHITECTURES:
        kinds.setdefault(architecture.kind, architecture)
    names, kind = theirs.get("architectures") or [], theirs.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"architectures={json.dumps(names)}: expected a list of names. Known: {', '.join(CLASSES)}.")
    for name in names:
        if name in CLASSES:
            if CLASSES[name].kind != (kind or CLASSES[name].kind):
                raise ConfigError(f"model_type={json.dumps(kind)} is not that of {name}, {CLASSES[name].kind}.")
            return CLASSES[name], name
    if names:
        raise ConfigError(f"{', '.join(names)} is not known. Known: {', '.join(CLASSES)}.")
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"model_type={json.dumps(kind)} is not known. Known: {', '.join(kinds)}.")
    return kinds[kind], next(iter(kinds[kind].classes))


def _rope(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters, and rope_scaling before it, said as plain keys."""
    plain = {key: value for key, value in theirs.items() if key not in ("rope_parameters", "rope_scaling")}
    for name in ("rope_scaling", "rope_parameters"):
        inner = theirs.get(name) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{name}={json.dumps(inner)}: expected an object.")
        plain |= {"rope_type" if key == "type" else key: value for key, value in inner.items()}
    return plain


def _value(key: Key, said: Any, problems: list[str]) -> Any:
    """What they say of a key, in our words; what cannot be is a problem."""
    if key.words:
        if not isinstance(said, str) or said not in key.words:
            problems.append(f"{key.theirs}={json.dumps(said):.40} is not known. Known: {', '.join(key.words)}.")
            return None
        return key.words[said]
    if said is None and key.default is None:
        return None
    number = isinstance(said, int | float) and not isinstance(said, bool) and abs(said) < 2**31
    if isinstance(key.default, bool):
        wanted, sound = "true or false", isinstance(said, bool)
    elif isinstance(key.default, float):
        wanted, sound, said = "a number", number, float(said) if number else said
    else:
        wanted, sound = "a whole number", number and isinstance(said, int)
    if not sound:
        problems.append(f"{key.theirs}: expected {wanted}, got {json.dumps(said):.40}.")
    return said


# --- ours to config.json ----------------------------------------------------------------------------------------------


def write_config(model: Model, objective: Objective) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of this model, and its config.json.  ConfigError, with what differs from the nearest, if there
    is none."""
    differences = [_differences(architecture, model, objective) for architecture in ARCHITECTURES]
    kind = f"model.kind={model.kind}"
    fewest = min(differences, key=lambda found: (kind in found, len(found)))
    nearest = ARCHITECTURES[differences.index(fewest)]
    if fewest:
        raise ConfigError(
            f"no architecture of Hugging Face's has this model. The nearest is {nearest.kind}, but for "
            f"{', '.join(fewest)}. Known: {', '.join(CLASSES)}."
        )
    ours = objective.model_dump()
    (name,) = (name for name, asks in nearest.classes.items() if asks.items() <= ours.items())
    said: dict[str, Any] = {"architectures": [name], "model_type": nearest.kind}
    said |= {key.theirs: _said(key, model) for key in nearest.keys} | dict.fromkeys(CARRIED)
    if isinstance(objective, Classification):
        said["id2label"] = {str(number): f"LABEL_{number}" for number in range(objective.classes)}
        said["label2id"] = {f"LABEL_{number}": number for number in range(objective.classes)}
    if nearest is LLAMA:
        said["head_dim"] = model.head_width
        said["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
    return nearest, said


def _differences(architecture: Architecture, model: Model, objective: Objective) -> list[str]:
    """The settings that keep a model from being of this architecture."""
    alike = {"kv_heads": (None, model.heads)}
    found = [
        f"model.{key}={getattr(model, key)}"
        for key, value in architecture.fixed.items()
        if getattr(model, key) not in alike.get(key, (value,))
    ]
    if architecture.fixed["kind"] == "bert" and not model.token_types:
        found.append("model.token_types=0")
    words = next(key.words for key in architecture.keys if key.ours == "activation")
    if model.activation not in words.values():
        found.append(f"model.activation={model.activation}")
    if objective.kind not in {asks["kind"] for asks in architecture.classes.values()}:
        found.append(f"objective.kind={objective.kind}")
    return found


def _said(key: Key, model: Model) -> Any:
    """Our value of a key in their words."""
    if key.words:
        return next(theirs for theirs, ours in key.words.items() if ours == getattr(model, key.ours))
    derived = {"mlp_width": model.mlp_dim, "kv_heads": model.kv_heads or model.heads}
    return derived.get(key.ours, getattr(model, key.ours))


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """One of theirs.  rows: what it holds, part by part; of `layer` alone where our leaves hold all of them."""

    name: str
    shape: Shape
    rows: tuple[Row, ...]
    layer: int | None


def tensors(architecture: Architecture, shapes: Mapping[str, Shape]) -> list[Tensor]:
    """The tensors of a model whose leaves, by path, have these canonical shapes; layer by layer."""
    groups: dict[str, list[Row]] = {}
    for row in architecture.rows:
        if row.ours in shapes:
            groups.setdefault(row.theirs, []).append(row)
    assert {row.ours for rows in groups.values() for row in rows} == shapes.keys(), shapes.keys()
    layers = next(shape[0] for path, shape in shapes.items() if path.startswith("blocks."))
    stacks = {name: rows for name, rows in groups.items() if rows[0].stacked}

    def of(name: str, rows: list[Row], layer: int | None) -> Tensor:
        shape = shapes[rows[0].ours][rows[0].stacked :]
        return Tensor(name.format(layer=layer), rows[0].shape(shape), tuple(rows), layer)

    once = [of(name, rows, None) for name, rows in groups.items() if name not in stacks]
    first = [tensor for tensor in once if tensor.rows[0].ours.startswith("embedding.")]
    last = [tensor for tensor in once if tensor not in first]
    return [*first, *(of(name, rows, layer) for layer in range(layers) for name, rows in stacks.items()), *last]


def copies(architecture: Architecture, names: Iterable[str], shapes: Mapping[str, Shape]) -> set[str]:
    """Of these names in files, those of what is no parameter, or one that stands there once more."""
    patterns = [*architecture.copies]
    if "head.tokens" not in shapes:  # tied
        patterns += (row.theirs for row in architecture.rows if row.ours == "head.tokens")
    spelled = (each for pattern in patterns for each in architecture.spellings(pattern))
    known = re.compile("|".join(re.escape(each).replace(re.escape(LAYER), r"\d+") for each in spelled))
    return {name for name in names if known.fullmatch(name)}


def left_out(architecture: Architecture, names: Iterable[str], shapes: Mapping[str, Shape]) -> set[str]:
    """Of these names in files, those of parameters that other models of this architecture have, for another
    objective."""
    absent = {row.theirs for row in architecture.rows if row.ours not in shapes and row.ours != "head.tokens"}
    return {name for name in names if name in absent}
