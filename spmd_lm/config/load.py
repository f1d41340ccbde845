"""Makes one checked RunConfig from a YAML file, the base files it extends, and `section.key=value` overrides.

A configuration is a stack of layers, each a mapping of sections and its origin: the root of the `base:` chain first,
the command line last.  All problems are reported at once, each with the layer that set the key: unknown keys are
dropped, sections are validated separately, and every check runs whose sections are valid."""

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from spmd_lm.config import checks, suggest, syntax
from spmd_lm.config.schema import Data, RunConfig, Section, valid_path, variants, with_default_kind, yaml_keys
from spmd_lm.errors import ConfigError

COMMAND_LINE = "command line"
FIELDS = RunConfig.model_fields

CONFIG_FILE = "config.yaml"
TOKENIZER_DIR = "tokenizer"
"""The names, in a run's directory, of its configuration and of its copy of the tokenizer's files."""

VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""The file names of a vocabulary; the first that a directory has is used."""

SHARED_KEYS = {"data": ("tokenizer",), "optim": ("warmup", "decay", "decay_steps", "clip", "freeze")}
"""Keys that stay when the kind of their section changes: a model's token ids mean the same words in any text, and the
shape of a learning rate schedule suits any optimizer.  Its lr does not."""


@dataclass(frozen=True)
class Layer:
    origin: str
    tree: dict[str, Any]


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration in the file at `path`, changed by `overrides`.

    Raises ConfigError with one line per problem: `origin: section.key: what is wrong. How to fix it.`"""
    command_line, problems = _parse_overrides(overrides)
    layers = _read_chain(path, problems)
    if not layers:  # there is nothing to check the overrides against
        raise ConfigError(*problems)
    return _resolve(*_add_init_from([*layers, command_line], problems), problems)


def load_layers(under: Layer, path: str | Path | None, over: Layer, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of `under`, then the file at `path` if there is one, then `over`, then `overrides`; raises as
    `load` does."""
    command_line, problems = _parse_overrides(overrides)
    files = _read_chain(path, problems) if path is not None else []
    if path is not None and not files:
        raise ConfigError(*problems)
    return _resolve(*_add_init_from([under, *files, over, command_line], problems), problems)


def saved_tokenizer(directory: Path) -> Path | None:
    """The run's own copy of its tokenizer's files, if it has one."""
    copy = directory / TOKENIZER_DIR
    return copy if any(os.path.isfile(copy / name) for name in VOCABULARY_FILES) else None


def load_run(directory: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of the run in `directory`, which may have been moved, changed by `overrides`; raises as `load`
    does, and if the overrides name another tokenizer than the run's own."""
    if not os.path.exists(directory / CONFIG_FILE):
        raise ConfigError(f"{directory}: {_not_a_run(directory)}, or a YAML file.")
    command_line, problems = _parse_overrides(overrides)
    layers = _read_chain(directory / CONFIG_FILE, problems)
    if not layers:
        raise ConfigError(*problems)
    here: dict[str, Any] = {"run": {"dir": str(directory)}}
    tokenizer = saved_tokenizer(directory)
    if _section(_merge_layers(layers), "data").get("tokenizer", "bytes") == "bytes":
        tokenizer = None
    if tokenizer is not None:
        here["data"] = {"tokenizer": str(tokenizer)}
    config = _resolve([*layers, Layer(str(directory), here), command_line], False, problems)
    if tokenizer is not None and isinstance(config.data, Data) and config.data.tokenizer != str(tokenizer):
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}: the model in {directory} was trained with the run's own "
            "tokenizer, and knows no other token ids. Remove this key."
        )
    return config


def dump(config: RunConfig) -> str:
    """YAML that `load` reads back as an equal configuration."""
    return syntax.write(config.model_dump(by_alias=True))


def _not_a_run(directory: Path) -> str:
    runs = sorted(found.parent for found in directory.glob(f"*/{CONFIG_FILE}"))
    way = f"Give one of the runs in it, such as {runs[0]}" if runs else "Give the directory of a run"
    return f"no {CONFIG_FILE} in this directory, so it is not a run. {way}"


def _resolve(layers: Sequence[Layer], model_is_unreadable: bool, problems: list[str]) -> RunConfig:
    """model_is_unreadable: whether the model comes from a run that cannot be read, which is already among the
    problems."""
    tree = _merge_layers(layers)
    valid: dict[str, Section] = {}
    for name in tree:
        if name not in FIELDS:
            problems.append(f"{_origin(layers, name)}: {suggest.unknown_section(name, tree[name])}")
    for name, field in FIELDS.items():
        if name not in tree and not field.is_required():
            valid[name] = field.default
            continue
        section = tree.get(name, {})
        if isinstance(section, dict):
            section = _drop_unknown_keys(name, section, layers, problems)
        if name != "model" or not model_is_unreadable:
            _validate(name, section, layers, problems, valid)
    for problem in checks.problems(valid):
        origins = dict.fromkeys(_origin(layers, *keys) for keys in checks.conflicting_keys(problem))
        problems.append(f"{', '.join(origins)}: {problem}")

    if problems:
        raise ConfigError(*problems)
    return RunConfig(**valid)  # type: ignore[arg-type]


def _add_init_from(layers: list[Layer], problems: list[str]) -> tuple[list[Layer], bool]:
    """The layers, on top of what they take from the run in `run.init_from`: its model, and the tokenizer that this
    model was trained with.  Also whether that run cannot be read.

    A configuration that has the whole model, as a run's own file does, takes nothing."""
    tree = _merge_layers(layers)
    init_from = _section(tree, "run").get("init_from")
    if not isinstance(init_from, str) or "layers" in _section(tree, "model"):
        return layers, False
    where = f"{_origin(layers, 'run', 'init_from')}: run.init_from={init_from}"
    try:
        directory = Path(valid_path(init_from)).expanduser()
        if not os.path.exists(directory / CONFIG_FILE):
            problems.append(f"{where}: {_not_a_run(directory)}.")
            return layers, True
        config = load_run(directory)
    except PydanticCustomError:  # validating the section reports it
        return layers, True
    except ConfigError as error:
        problems += (f"{where}: {line}" for line in error.problems)
        return layers, True
    taken: dict[str, Any] = {"model": config.model.model_dump()}
    if isinstance(config.data, Data) and _section(tree, "data").get("source") != "synthetic":
        taken["data"] = {"tokenizer": config.data.tokenizer}
    return [Layer(str(Path(init_from) / CONFIG_FILE), taken), *layers], False


# --- reading layers ---------------------------------------------------------------------------------------------------


def _read_chain(path: str | Path, problems: list[str]) -> list[Layer]:
    """The layers of a file and its bases, root first; none if one of them cannot be read."""
    layers: list[Layer] = []
    seen: list[str] = []
    name, parent = os.path.normpath(path), ""
    while True:
        if name in seen:
            problems.append(
                f"{seen[-1]}: base: circular chain: {' -> '.join([*seen, name])}. Remove one of these bases."
            )
            return []
        seen.append(name)
        tree = _read_file(name, parent, problems)
        if tree is None:
            return []
        base = tree.pop("base", None)
        layers.insert(0, Layer(name, tree))
        if base is None:
            return layers
        if not isinstance(base, str):
            problems.append(f"{name}: base: expected the name of one file, got {base!r}. Let each file name one base.")
            return []
        parent, name = name, os.path.normpath(os.path.join(os.path.dirname(name), base))


def _read_file(name: str, parent: str, problems: list[str]) -> dict[str, Any] | None:
    """The sections of one file, and its `base`; None if it cannot be read.  parent: the file whose base it is."""
    origin = f"{parent}: base: {name}" if parent else name
    try:
        text = Path(name).read_text("utf-8")
    except FileNotFoundError:
        problems.append(f"{origin}: no such file{_suggest_file(name)}")
    except UnicodeDecodeError as error:
        problems.append(f"{origin}: byte {error.start} is not UTF-8. Save the file as UTF-8 text.")
    except OSError as error:
        problems.append(f"{origin}: cannot be read: {error.strerror}. Give the path of a YAML file.")
    else:
        value, errors = syntax.read(text)
        problems += [f"{name}: {error}." for error in errors]
        if value is None:
            return None if errors else {}
        if isinstance(value, dict):
            return _sections(value)
        problems.append(f"{name}: expected sections of keys, got {value!r:.40}. Known: {', '.join(FIELDS)}.")
    return None


def _suggest_file(missing: str) -> str:
    """The YAML files and runs that may have been meant; completes the sentence 'no such file'."""
    directory, or_run = Path(missing).parent, "" if Path(missing).suffix else " or run"
    if not directory.is_dir():
        return f"{or_run}: there is no directory {directory}."
    found = sorted([*directory.glob("*.y*ml"), *(file.parent for file in directory.glob(f"*/{CONFIG_FILE}"))])
    paths = {path.name: str(path) for path in found}
    if near := suggest.did_you_mean(Path(missing).name, paths):
        return f"{or_run}. Did you mean {paths[near]}?"
    if not paths:
        return f"{or_run}. There is none in {'this directory' if directory == Path() else directory}."
    return f"{or_run}. There is {', '.join([*paths.values()][:6])}{' and more' if len(paths) > 6 else ''}."


def _parse_overrides(overrides: Iterable[str]) -> tuple[Layer, list[str]]:
    """All overrides as one layer, so that their order does not matter, as in `data.source=text data.path=x`."""
    tree: dict[str, Any] = {}
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.split(".")
        value, errors = syntax.read(text)
        if not equals or not all(keys):
            problems.append(f"{COMMAND_LINE}: '{override}' is not an override. Write section.key=value.")
        elif errors:
            problems += [f"{COMMAND_LINE}: {path}: {error}." for error in errors]
        else:
            for key in reversed(keys):
                value = {key: value}
            tree = _merge(tree, value)
    return Layer(COMMAND_LINE, _sections(tree)), problems


def _sections(tree: dict) -> dict[str, Any]:
    """`tree` with an empty section for each null: the value of a section whose keys are all commented out."""
    return {str(name): {} if section is None and name in FIELDS else section for name, section in tree.items()}


# --- merging layers ---------------------------------------------------------------------------------------------------


def _merge(under: dict, over: dict) -> dict:
    result = dict(under)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(under.get(key), dict)
        result[key] = _merge(under[key], value) if nested else value
    return result


def _merge_layers(layers: Iterable[Layer]) -> dict[str, Any]:
    """Later layers win.  A section whose kind changes loses the old kind's keys, except the SHARED_KEYS that the new
    kind has."""
    stacked: dict[str, Any] = {}
    for layer in layers:
        for name in sorted(stacked.keys() & layer.tree.keys() & FIELDS.keys()):
            old, new = _kind(name, stacked[name]), _explicit_kind(name, layer.tree[name])
            if old and new and old != new:
                new_keys = yaml_keys(variants(name)[new]) if new in variants(name) else []
                shared = [key for key in SHARED_KEYS.get(name, ()) if key in new_keys]
                stacked[name] = {key: value for key, value in stacked[name].items() if key in shared}
        stacked = _merge(stacked, layer.tree)
    return stacked


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """The section `name`; empty if it is missing or not a mapping."""
    section = tree.get(name)
    return section if isinstance(section, dict) else {}


def _explicit_kind(name: str, section: Any) -> str:
    """The value of the section's discriminator; '' if it has none."""
    value = section.get(FIELDS[name].discriminator) if isinstance(section, dict) else None
    return value if isinstance(value, str) else ""


def _kind(name: str, section: Any) -> str:
    """The section's kind, by default if it does not say; '' if unknown."""
    return _explicit_kind(name, with_default_kind(name, section))


def _origin(layers: Sequence[Layer], *path: str) -> str:
    """The last layer that sets the key at `path`; for a key that none sets, the file that was asked for."""
    for layer in reversed(layers):
        node: Any = layer.tree
        for key in path:
            node = node.get(key, ...) if isinstance(node, dict) else ...
        if node is not ...:
            return layer.origin
    return layers[-2].origin


# --- sections ---------------------------------------------------------------------------------------------------------


def _drop_unknown_keys(name: str, section: dict, layers: Sequence[Layer], problems: list[str]) -> dict:
    """The section without the keys that its type does not have, each of which is a problem."""
    kind = _kind(name, section)
    known = suggest.keys_of_kind(name, kind)
    for key in section:
        if key not in known:
            problems.append(f"{_origin(layers, name, key)}: {suggest.unknown_key(name, str(key), kind)}")
    return {key: value for key, value in section.items() if key in known}


@functools.cache
def _validator(name: str) -> TypeAdapter:
    annotation: Any = Annotated[FIELDS[name].annotation, FIELDS[name]]
    return TypeAdapter(annotation)


def _validate(name: str, section: Any, layers: Sequence[Layer], problems: list[str], valid: dict[str, Section]) -> None:
    """Adds the section to `valid`, or what is wrong with it to `problems`."""
    try:
        valid[name] = _validator(name).validate_python(with_default_kind(name, section))
    except ValidationError as error:
        if not isinstance(section, dict):
            problems.append(f"{_origin(layers, name)}: {name}: expected a mapping of keys, got {section!r:.40}.")
            return
        depth = 1 if FIELDS[name].discriminator else 0  # pydantic puts the kind before the key
        errors_by_key: dict[str, list] = {}
        for each in error.errors():
            key = each["loc"][depth] if len(each["loc"]) > depth else FIELDS[name].discriminator
            errors_by_key.setdefault(str(key), []).append(each)
        for key, errors in errors_by_key.items():
            problems.append(f"{_origin(layers, name, key)}: {suggest.wrong_value(name, key, errors)}")
