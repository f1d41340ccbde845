"""What is wrong with a key or a value, said so that it can be mended.

pydantic finds the errors; these are its findings in words, with the nearest thing that would have been right."""

import difflib
import re
import typing
from collections.abc import Iterable
from typing import Any

from spmd_lm.config.schema import RunConfig, Section

OTHER_NAMES = {  # how other trainers say it
    "tensor": "parallel.model",
    "tensor_parallel": "parallel.model",
    "tp": "parallel.model",
    "pipeline": "parallel.pipe",
    "pp": "parallel.pipe",
    "dp": "parallel.data",
    "fsdp": "parallel.zero",
    "sp": "parallel.sequence",
    "accumulation": "parallel.microbatches",
    "n_layer": "model.layers",
    "num_layers": "model.layers",
    "n_head": "model.heads",
    "num_heads": "model.heads",
    "n_embd": "model.width",
    "d_model": "model.width",
    "hidden_size": "model.width",
    "intermediate_size": "model.mlp_width",
    "ffn_hidden_size": "model.mlp_width",
    "block_size": "model.context",
    "seq_len": "model.context",
    "sequence_length": "model.context",
    "vocab_size": "model.vocab",
    "dtype": "precision.compute",
    "learning_rate": "optim.lr",
    "beta1": "optim.b1",
    "beta2": "optim.b2",
    "warmup_steps": "optim.warmup",
    "grad_clip": "optim.clip",
    "max_steps": "train.steps",
    "iterations": "train.steps",
    "batch_size": "train.batch",
    "devices": "run.simulate_devices",
    "asynchronous": "checkpoint.async",
    # what keys were called here before
    "hidden": "model.mlp_width",
    "norm_kind": "model.norm_type",
    "biases": "model.use_bias",
    "mask": "parallel.run_idle_stages",
    "rate": "objective.mask_prob",
    "short": "objective.short_seq_prob",
    "stride": "objective.doc_stride",
    "longest": "objective.max_answer_length",
}
TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": "letters, digits, '.', '_' or '-', not beginning with '.'",  # run.name alone
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def variants(section: str) -> dict[str, type[Section]]:
    """The types a section may have, by the value of its discriminator; a section of one type has it under ''."""
    field = RunConfig.model_fields[section]
    if not field.discriminator:
        return {"": typing.cast(type[Section], field.annotation)}
    return {
        typing.get_args(variant.model_fields[field.discriminator].annotation)[0]: variant
        for variant in typing.get_args(field.annotation)
    }


def keys(section: type[Section]) -> list[str]:
    """As a YAML file spells them."""
    return [field.alias or name for name, field in section.model_fields.items()]


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(word, list(words), 1, cutoff)), None)


def unknown_section(name: str, value: Any) -> str:
    if name == "base":  # a file's own is read before sections are
        give = f", or give {value} as the CONFIG" if isinstance(value, str) else ""
        return f"base: stands in a file only. Write it there{give}."
    near = did_you_mean(name, RunConfig.model_fields) or elsewhere(name)
    return f"unknown section '{name}'. " + (f"Did you mean '{near}'?" if near else _known(RunConfig.model_fields))


def unknown_key(section: str, key: str, variant: str) -> str:
    types = variants(section)
    owners = [name for name, owner in types.items() if name and key in keys(owner)]
    if owners:
        field = f"{section}.{RunConfig.model_fields[section].discriminator}"
        return (
            f"{section}: '{key}' belongs to {field}={owners[0]}, not {variant}. Remove it, or set {field}={owners[0]}."
        )
    known = keys(types[variant]) if variant in types else {key: None for each in types.values() for key in keys(each)}
    near = did_you_mean(key, known) or elsewhere(key, section)
    return f"{section}: unknown key '{key}'. " + (f"Did you mean '{near}'?" if near else _known(known))


def wrong_value(section: str, key: str, errors: list[dict[str, Any]]) -> str:
    """One key's errors, as pydantic lists them: several where the value may have one of several types."""
    within = [error for error in errors if error["loc"] and isinstance(error["loc"][-1], int)]
    if within:  # a list, as it may be; of other types nothing need be said
        key, errors = f"{key}[{within[0]['loc'][-1]}]", within[:1]
    kind, got, context = errors[0]["type"], errors[0]["input"], errors[0].get("ctx", {})
    if kind.startswith("union_tag") or kind in ("missing", "literal_error"):
        return f"{section}.{key}: " + _choose(section, key, kind, errors[0])
    bound = next((f"{words} {context[name]:.15g}" for name, words in BOUNDS.items() if name in context), None)
    if bound:
        what = f"must be {bound}, got {_show(got)}"
    elif all(error["type"] in TYPES for error in errors):
        what = f"expected {' or '.join(dict.fromkeys(TYPES[error['type']] for error in errors))}, got {_show(got)}"
    else:
        what = f"{errors[0]['msg']}, got {_show(got)}"
    return f"{section}.{key}: {what}.{_mend(kind, got) or _default(section, key)}"


def elsewhere(word: str, section: str = "") -> str | None:
    """A key of any section, or what another trainer calls it; without the section where that is the one we are in."""
    names = dict(OTHER_NAMES)
    for name in RunConfig.model_fields:
        for variant in variants(name).values():
            names |= {key: f"{name}.{key}" for key in keys(variant)}
    near = did_you_mean(word, names, cutoff=0.75)
    return names[near].removeprefix(f"{section}.") if near else None


def _known(words: Iterable[str]) -> str:
    return f"Known: {', '.join(words)}."


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _choose(section: str, key: str, kind: str, error: dict[str, Any]) -> str:
    context = error.get("ctx", {})
    if kind == "missing":
        return f"missing. Set it in the file, or as {section}.{key}=... on the command line."
    if kind == "union_tag_not_found":
        return f"missing. Choose {_or(variants(section))}."
    choices = re.findall(r"'([^']*)'", context.get("expected_tags") or context["expected"])
    got = error["input"].get(key) if "tag" in context else error["input"]
    near = did_you_mean(str(got), choices, cutoff=0.5)
    return f"expected {_or(choices)}, got {_show(got)}." + (f" Did you mean '{near}'?" if near else "")


def _or(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _mend(kind: str, got: Any) -> str:
    if len(str(got)) > 40:  # not worth repeating
        return ""
    if kind == "bool_type" and str(got).lower() in SWITCHES:
        return f" Write {SWITCHES[str(got).lower()]}."
    if kind in ("int_type", "int_from_float") and isinstance(got, float) and got.is_integer() and abs(got) < 1e15:
        return f" Write {int(got)}."
    if kind == "string_type" and isinstance(got, bool | int | float):
        return f' Quote it: "{got}".'
    if kind == "string_pattern_mismatch" and (fitting := re.sub(r"[^\w.-]+", "-", got).strip(".-")):
        return f" Write {fitting}."
    if kind in ("int_type", "float_type") and isinstance(got, str) and re.fullmatch(r"[-+.eE\d]+", got):
        return f" Write {got}, without quotes."
    return ""


def _default(section: str, key: str) -> str:
    for variant in variants(section).values():
        for name, field in variant.model_fields.items():
            if key == (field.alias or name) and not field.is_required() and field.default is not None:
                return f" The default is {_show(field.default)}."
    return ""
