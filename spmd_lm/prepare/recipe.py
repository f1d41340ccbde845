"""Reads the YAML of `spmd-lm prepare`, changed by overrides, and reports all its problems at once."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from spmd_lm.config.load import locate, make_layer, merge_trees, read_yaml_file
from spmd_lm.config.schema import RunConfig
from spmd_lm.config.section import Section, sections_within
from spmd_lm.config.suggest import BOUNDS, TYPES, did_you_mean
from spmd_lm.config.syntax import read
from spmd_lm.errors import ConfigError
from spmd_lm.prepare.schema import UNION_TAGS, Preparation


def read_recipe(path: Path, overrides: Iterable[str] = ()) -> Preparation:
    """The checked configuration.  Raises ConfigError with one line per problem."""
    problems: list[str] = []
    path = locate(path)
    tree = read_yaml_file(str(path), str(path), problems)
    if problems or tree is None:
        raise ConfigError(*(problems or [f"{path}: empty. Give sources and out."]))
    if tree.keys() & {"base", *RunConfig.model_fields}:
        what = "this is a configuration of a run, not a recipe, which has sources and out (configs/prepare)"
        raise ConfigError(f"{path}: {what}. Run `spmd-lm train {path}`, or give a recipe.")
    try:
        return Preparation.model_validate(merge_trees(tree, parse_overrides(overrides)))
    except ValidationError as error:
        raise ConfigError(*(f"{path}: {describe_problem(each)}" for each in error.errors())) from None


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    values, problems = [], []
    for override in overrides:
        key, equals, text = override.partition("=")
        value, errors = read(text)
        if not equals or not all(key.split(".")):
            problems.append(f"command line: '{override}' is not an override. Write key=value, as in workers=2.")
        problems += [f"command line: {key}: {error}." for error in errors]
        values.append((key, value))
    if problems:
        raise ConfigError(*problems)
    return make_layer("command line", values).tree


def describe_problem(error: ErrorDetails) -> str:
    """`key: what is wrong. How to fix it.`"""
    loc = [part for part in error["loc"] if part not in UNION_TAGS]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    bound = next((f"{words} {context[name]:.15g}" for name, words in BOUNDS.items() if name in context), None)
    if kind == "extra_forbidden":
        siblings = keys_at(loc[:-1])
        near = did_you_mean(str(loc[-1]), siblings)
        return f"{key}: unknown key. " + (f"Did you mean {near}?" if near else f"Known: {', '.join(siblings)}.")
    if kind == "missing":
        return f"{key}: missing. Set it in the file, or as {key}=... on the command line."
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        near = did_you_mean(str(value), choices, cutoff=0.5)
        return f"{key}: expected {' or '.join(choices)}, got {value!r:.40}.{f' Did you mean {near}?' if near else ''}"
    if bound:
        return f"{key}: must be {bound}, got {value!r:.40}."
    return f"{key}: {f'expected {TYPES[kind]}' if kind in TYPES else error['msg']}, got {value!r:.40}."


def keys_at(loc: list[Any]) -> list[str]:
    """The keys of the section at this location."""
    section: type[Section] = Preparation
    for part in loc:
        if isinstance(part, str):
            (section, *_) = sections_within(section.model_fields[part])
    return [*section.model_fields]
