"""Error messages for a bad key or value, with the nearest valid one.

pydantic finds the errors; this module words them and suggests valid names and numbers."""

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from spmd_lm.config.schema import RunConfig, variants
from spmd_lm.config.section import kind_of, sections_within, yaml_fields

Problems = Iterator[str]  # found by a check


class Obstacle(NamedTuple):
    """Settings that rule something out, and the reason."""

    settings: str
    reason: str
    alternative: str  # nearby settings that do not; may be empty


OTHER_NAMES = {  # keys' names in other trainers or earlier versions
    "run.simulate_devices": ["devices"],
    "model.layers": ["n_layer", "num_layers"],
    "model.width": ["n_embd", "d_model", "hidden_size"],
    "model.heads": ["n_head", "num_heads"],
    "model.context": ["block_size", "seq_len", "sequence_length"],
    "model.vocab": ["vocab_size"],
    "model.mlp_width": ["hidden", "intermediate_size", "ffn_hidden_size"],
    "model.norm_type": ["norm_kind"],
    "model.use_bias": ["biases"],
    "objective.mask_prob": ["rate"],
    "objective.short_seq_prob": ["short"],
    "objective.doc_stride": ["stride"],
    "objective.max_answer_length": ["longest"],
    "data.validation_fraction": ["validation"],
    "data.validation_path": ["validation"],
    "data.pack": ["packing", "pack_sequences", "sample_packing"],
    "parallel.pipe": ["pipeline", "pp"],
    "parallel.data": ["dp"],
    "parallel.expert": ["expert_parallel", "ep"],
    "parallel.context": ["context_parallel", "cp"],
    "parallel.model": ["tensor", "tensor_parallel", "tp"],
    "parallel.sequence": ["sp"],
    "parallel.zero": ["fsdp"],
    "parallel.microbatches": ["accumulation"],
    "parallel.run_idle_stages": ["mask"],
    "parallel.collective_matmul": ["tp_comm_overlap"],
    "precision.compute": ["dtype"],
    "optim.lr": ["learning_rate"],
    "optim.b1": ["beta1"],
    "optim.b2": ["beta2"],
    "optim.warmup": ["warmup_steps"],
    "optim.clip": ["grad_clip"],
    "remat.block_size": ["every"],
    "train.steps": ["max_steps", "iterations"],
    "train.batch": ["batch_size"],
    "checkpoint.async": ["asynchronous"],
    "adapter.rank": ["r", "lora_rank"],
    "adapter.alpha": ["lora_alpha"],
    "adapter.targets": ["target_modules"],
    "adapter.dropout": ["lora_dropout"],
    "adapter.rslora": ["use_rslora"],
    "adapter.base": ["load_in_4bit", "load_in_8bit", "quantization"],
}
RENAMED_VALUES = {"remat.policy=every": "block"}
TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": "letters, digits, '.', '_' or '-', not beginning with '.'",  # run.name's
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "{name: value}",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
EXAMPLES = {
    "data.blend": " Write data.blend='[{path: a, weight: 0.7}, {path: b, weight: 0.3}]'.",
    "model.rope_scaling": " Write model.rope_scaling='{kind: yarn, factor: 4.0, original_context: 4096}'.",
    "model.period": " Write model.period='[{kind: window, span: 1024}, block]'.",
}
SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def use(problem: str, *ways: str) -> str:
    """The problem with its solutions; empty ways are left out."""
    return f"{problem}. Use {', or '.join(filter(None, ways))}."


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def nearest(setting: str, choices: Iterable[int]) -> str:
    """'parallel.model=4 or 6' for 'parallel.model=5': the two nearest choices; '' if there are none."""
    key, _, value = setting.partition("=")
    two = sorted(sorted(choices, key=lambda n: (abs(n - int(value)), n))[:2])
    return f"{key}={' or '.join(map(str, two))}" if two else ""


def nearest_multiple(setting: str, step: int) -> str:
    """The positive multiples of `step` on either side of the setting's value, as `nearest` writes them."""
    below = int(setting.partition("=")[2]) // step * step
    return nearest(setting, [below, below + step] if below else [step])


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of `words`, if one is similar enough."""
    return next(iter(difflib.get_close_matches(word, list(words), 1, cutoff)), None)


def key_of_any_section(word: str, section: str = "") -> str | None:
    """The section.key that `word` resembles, by our or others' names; for keys of `section` just the key."""
    names: dict[str, str] = {}
    for key, others in OTHER_NAMES.items():
        names = dict.fromkeys(others, key) | names
    for name in RunConfig.model_fields:
        names |= {key: f"{name}.{key}" for key in keys_of_kind(name)}
    near = did_you_mean(word, names, cutoff=0.75)
    return names[near].removeprefix(f"{section}.") if near else None


def keys_of_kind(section: str, kind: str = "") -> list[str]:
    """The keys of a section of this kind; if the kind is unknown, of all kinds."""
    types = variants(section)
    known = [types[kind]] if kind in types else types.values()
    return list(dict.fromkeys(key for each in known for key in yaml_fields(each)))


def unknown_section(name: str, value: Any) -> str:
    if name == "base":  # in a file it is read before the sections
        path = f", or give {value} as the CONFIG" if isinstance(value, str) else ""
        return f"base: belongs in a file. Write it there{path}."
    if name in ("config", "grid", "zip", "when"):
        return f"{name}: this is a sweep's file. Run `spmd-lm sweep` with it."
    near = did_you_mean(name, RunConfig.model_fields) or key_of_any_section(name)
    return f"unknown section '{name}'. {_did_you_mean(near, RunConfig.model_fields)}"


def unknown_key(section: str, key: str, kind: str) -> str:
    owners = [each for each in variants(section) if each and key in keys_of_kind(section, each)]
    if owners:
        field = f"{section}.{RunConfig.model_fields[section].discriminator}"
        return f"{section}: '{key}' belongs to {field}={owners[0]}, not {kind}. Remove it, or set {field}={owners[0]}."
    known = keys_of_kind(section, kind)
    same = [name for name in known if key in OTHER_NAMES.get(f"{section}.{name}", [])]
    near = "' or '".join(same) or did_you_mean(key, known) or key_of_any_section(key, section)
    return f"{section}: unknown key '{key}'. {_did_you_mean(near, known)}"


def _did_you_mean(near: str | None, known: Iterable[str]) -> str:
    return f"Did you mean '{near}'?" if near else f"Known: {', '.join(known)}."


def wrong_values(section: str, error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yields each wrong or missing key of `section`, and its problem."""
    for key, errors in itertools.groupby(error.errors(), lambda each: _key_and_siblings(section, each)[0]):
        yield re.split(r"[.[]", key)[0], f"{section}.{_wrong_value(section, key, [*errors])}"


def _key_and_siblings(section: str, error: ErrorDetails) -> tuple[str, dict[str, FieldInfo]]:
    """The wrong key within `section`, as in period[0].span, and all keys beside it."""
    discriminator = RunConfig.model_fields[section].discriminator
    # pydantic puts the kind before the key, and gives neither if the kind is wrong.
    kind, *loc = error["loc"] if discriminator and error["loc"] else ("", *error["loc"])
    if not loc:
        return str(discriminator), {}
    inner = [variants(section)[str(kind)]]
    names, siblings = list[str](), dict[str, FieldInfo]()
    for place in loc:
        if not inner:
            break
        if isinstance(place, int):
            names[-1] += f"[{place}]"
            continue
        if len(inner) > 1:  # the kind stands before the key here too
            inner = [each for each in inner if kind_of(each) == place]
            continue
        name = str(place)
        names.append(name)
        siblings = yaml_fields(inner[0])
        inner = sections_within(siblings.get(name))
    return ".".join(names), siblings


def _wrong_value(section: str, key: str, errors: list[ErrorDetails]) -> str:
    """The problem with one key.  errors: several if its value may have several types."""
    siblings, name = _key_and_siblings(section, errors[0])[1], key.rpartition(".")[2]
    default = _default(siblings.get(name))
    in_list = [error for error in errors if error["loc"] and isinstance(error["loc"][-1], int)]
    if in_list and not key.endswith("]"):
        # Lists are allowed, so errors about other types do not count.
        key, errors = f"{key}[{in_list[0]['loc'][-1]}]", in_list[:1]
    whole_value = errors[0]["input"]
    in_mapping = [error for error in errors if isinstance(whole_value, dict) and error["input"] is not whole_value]
    if in_mapping:  # likewise; the key stands before the type that pydantic tried
        inner = in_mapping[0]["loc"][-2]
        key, errors = f"{key}.{inner}", [error for error in in_mapping if error["loc"][-2] == inner]
        default = ""
    error = errors[0]
    error_type, value, context = error["type"], error["input"], error.get("ctx", {})
    example = EXAMPLES.get(f"{section}.{key.partition('[')[0]}", "")
    if error_type == "extra_forbidden":
        return f"{key}: unknown key. {_did_you_mean(did_you_mean(name, siblings), siblings)}"
    if (error_type in ("missing", "union_tag_not_found") and "[" in key) or (
        error_type == "union_tag_not_found" and example
    ):
        return f"{key}: {'missing' if error_type == 'missing' else 'of no kind'}.{example}"
    if error_type == "missing":
        return f"{key}: missing. Set it in the file, or as {section}.{key}=... on the command line."
    if error_type == "union_tag_not_found":
        return f"{key}: missing. Choose {_either(variants(section))}."
    if error_type in ("union_tag_invalid", "literal_error"):
        others = [TYPES[each["type"]] for each in errors[1:] if each["type"] in TYPES]
        return f"{key}: {_wrong_choice(section, key, error, others)}"
    bound = next((f"{words} {context[name]:.15g}" for name, words in BOUNDS.items() if name in context), None)
    if bound:
        what = f"must be {bound}, got {_show(value)}"
    elif all(each["type"] in TYPES for each in errors):
        what = f"expected {_either(dict.fromkeys(TYPES[each['type']] for each in errors))}, got {_show(value)}"
    else:
        what = error["msg"] if isinstance(value, dict) else f"{error['msg']}, got {_show(value)}"
    example = example if error_type in ("list_type", "tuple_type", "model_type") else ""
    return f"{key}: {what}.{_correction(error_type, value) or example or default}"


def _wrong_choice(section: str, key: str, error: ErrorDetails, others: list[str]) -> str:  # others: types, in words
    context = error["ctx"]
    choices = re.findall(r"'([^']*)'", context.get("expected_tags") or context["expected"])
    value = error["input"].get(context["discriminator"].strip("'")) if "tag" in context else error["input"]
    near = RENAMED_VALUES.get(f"{section}.{key}={value}") or did_you_mean(str(value), choices, cutoff=0.5)
    suggestion = f" Did you mean '{near}'?" if near else ""
    if TYPES["bool_type"] in others:
        suggestion = suggestion or _correction("bool_type", value)
    return f"expected {_either([*choices, *others])}, got {_show(value)}.{suggestion}"


def _correction(error_type: str, value: Any) -> str:
    """A likely correction, or ''.  error_type: pydantic's."""
    text = str(value)
    if len(text) > 40:  # too long to repeat
        return ""
    if error_type == "bool_type" and text.lower() in SWITCHES:
        return f" Write {SWITCHES[text.lower()]}."
    if error_type in ("int_type", "int_from_float") and isinstance(value, float):
        return f" Write {int(value)}." if value.is_integer() and abs(value) < 1e15 else ""
    if error_type == "string_type" and isinstance(value, bool | int | float):
        return f' Quote it: "{value}".'
    if error_type == "string_type" and isinstance(value, dict):
        return " Quote it, and on the command line again: 'section.key=\"a: b\"'."
    if error_type == "string_pattern_mismatch" and (fitting := re.sub(r"[^\w.-]+", "-", value).strip(".-")):
        return f" Write {fitting}."
    if error_type in ("int_type", "float_type") and isinstance(value, str) and re.fullmatch(r"[-+.eE\d]+", value):
        return f" Write {value}, without quotes."
    return ""


def _default(field: FieldInfo | None) -> str:
    if field is None or field.is_required() or field.default is None or sections_within(field):
        return ""
    return f" The default is {_show(field.default)}."


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
