"""From a YAML file, the files it builds on and `section.key=value` overrides to one checked RunConfig.

A configuration is a pile of layers, each a mapping of sections with its origin: the root of the `base:` chain first,
the command line last.  All that is wrong is told at once, each problem with the layer that set the key: unknown keys
are set aside, sections are validated apart, and every check runs whose sections are sound."""

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from spmd_lm.config import checks, messages, syntax
from spmd_lm.config.schema import Data, RunConfig, Section, possible_path
from spmd_lm.errors import ConfigError

COMMAND_LINE = "command line"
FIELDS = RunConfig.model_fields

CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
"""What a run's directory calls its configuration, and the copy that it keeps of its vocabulary."""

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Of a directory's files the first of these is its vocabulary."""

LASTING = {"data": ("tokenizer",)}
"""Keys that outlive a change of their section's variant: the ids of a model's words are the same in any text."""


@dataclass(frozen=True)
class Layer:
    origin: str
    tree: dict[str, Any]


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration in the file at `path`, changed by `overrides`.

    Raises ConfigError with one line per problem: `origin: section.key: what. How to mend it.`"""
    command, problems = _command(overrides)
    layers = _chain(path, problems)
    if not layers:  # nothing to judge keys against
        raise ConfigError(*problems)
    return _resolve(*_begun([*layers, command], problems), problems)


def load_layers(under: Layer, path: str | Path | None, over: Layer, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of `under`, then the file at `path` if there is one, then `over`, then `overrides`; raises as
    `load` does."""
    command, problems = _command(overrides)
    files = _chain(path, problems) if path is not None else []
    if path is not None and not files:
        raise ConfigError(*problems)
    return _resolve(*_begun([under, *files, over, command], problems), problems)


def kept_vocabulary(directory: Path) -> Path | None:
    """Where the run in `directory` keeps its vocabulary, if it does."""
    kept = directory / TOKENIZER
    return kept if any(os.path.isfile(kept / name) for name in VOCABULARIES) else None


def load_run(directory: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of the run in `directory`, which may have been moved, changed by `overrides`; raises as `load`
    does, and for another vocabulary than the run's own."""
    if not os.path.exists(directory / CONFIG):
        raise ConfigError(f"{directory}: {_no_run(directory)}, or a YAML file.")
    command, problems = _command(overrides)
    layers = _chain(directory / CONFIG, problems)
    if not layers:
        raise ConfigError(*problems)
    here: dict[str, Any] = {"run": {"dir": str(directory)}}
    kept = kept_vocabulary(directory)
    said = functools.reduce(_lay, (layer.tree for layer in layers)).get("data")
    own = kept and isinstance(said, dict) and said.get("tokenizer", "bytes") != "bytes"
    if own:
        here["data"] = {"tokenizer": str(kept)}
    config = _resolve([*layers, Layer(str(directory), here), command], False, problems)
    if own and isinstance(config.data, Data) and config.data.tokenizer != str(kept):
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}: {directory} has a vocabulary of its own, whose ids its model "
            f"knows. Leave it out."
        )
    return config


def _no_run(directory: Path) -> str:
    runs = sorted(found.parent for found in directory.glob(f"*/{CONFIG}"))
    way = f"Give one of those in it, such as {runs[0]}" if runs else "Give the directory of one"
    return f"no {CONFIG} in this directory, so it is no run. {way}"


def _resolve(layers: Sequence[Layer], lost: bool, problems: list[str]) -> RunConfig:
    """lost: whether the model was to come from a run that cannot be read, which is a problem already."""
    tree = functools.reduce(_lay, (layer.tree for layer in layers))
    sections: dict[str, Section] = {}
    for name in (name for name in tree if name not in FIELDS):
        problems.append(f"{_origin(layers, name)}: {messages.unknown_section(name, tree[name])}")
    for name in FIELDS:
        if name not in tree and not FIELDS[name].is_required():
            sections[name] = FIELDS[name].default  # of several kinds, one
            continue
        section = tree.get(name, {})
        if isinstance(section, dict):
            section = _set_aside(name, section, layers, problems)
        if name == "model" and lost:
            continue
        _validate(name, section, layers, problems, sections)
    for message in checks.problems(sections):
        problems.append(f"{_origins(layers, checks.subjects(message))}: {message}")

    if problems:
        raise ConfigError(*problems)
    return RunConfig(**sections)  # type: ignore[arg-type]


def dump(config: RunConfig) -> str:
    """YAML that `load` reads back as an equal configuration."""
    return syntax.write(config.model_dump(by_alias=True))


def _begun(layers: list[Layer], problems: list[str]) -> tuple[list[Layer], bool]:
    """These layers, on that of the run that this one starts from, if it does: that one's model, and the vocabulary
    whose ids it knows; and whether that run cannot be read.  Who says the model in full needs nobody's."""
    tree = functools.reduce(_lay, (layer.tree for layer in layers))
    of = lambda name: section if isinstance(section := tree.get(name), dict) else {}  # noqa: E731
    run, data, model = of("run"), of("data"), of("model")
    said = run.get("init_from")
    if not isinstance(said, str) or "layers" in model:
        return layers, False
    where = f"{_origin(layers, 'run', 'init_from')}: run.init_from={said}"
    try:
        directory = Path(possible_path(said)).expanduser()
        if not os.path.exists(directory / CONFIG):
            problems.append(f"{where}: {_no_run(directory)}.")
            return layers, True
        config = load_run(directory)
    except PydanticCustomError:  # which is told with its section
        return layers, True
    except ConfigError as error:
        problems += (f"{where}: {line}" for line in error.problems)
        return layers, True
    under: dict[str, Any] = {"model": config.model.model_dump()}
    if isinstance(config.data, Data) and data.get("source") != "synthetic":
        under["data"] = {"tokenizer": config.data.tokenizer}
    return [Layer(str(Path(said) / CONFIG), under), *layers], False


# --- layers -----------------------------------------------------------------------------------------------------------


def _chain(path: str | Path, problems: list[str]) -> list[Layer]:
    """The layers of a file and its bases, root first; none if one of them cannot be read."""
    layers: list[Layer] = []
    seen: list[str] = []
    name, said_by = os.path.normpath(path), ""
    while True:
        if name in seen:
            problems.append(
                f"{seen[-1]}: base: goes round in a circle: {' -> '.join([*seen, name])}. Remove one of them."
            )
            return []
        seen.append(name)
        tree = _read(name, said_by, problems)
        if tree is None:
            return []
        base = tree.pop("base", None)
        layers.insert(0, Layer(name, tree))
        if base is None:
            return layers
        if not isinstance(base, str):
            problems.append(
                f"{name}: base: expected the name of one file, got {base!r}. Chain files by a base in each."
            )
            return []
        said_by, name = name, os.path.normpath(os.path.join(os.path.dirname(name), base))


def _read(name: str, said_by: str, problems: list[str]) -> dict[str, Any] | None:
    """One file's sections, `base` among them."""
    origin = f"{said_by}: base: {name}" if said_by else name
    try:
        text = Path(name).read_text("utf-8")
    except FileNotFoundError:
        problems.append(f"{origin}: no such file{_instead(name)}")
    except UnicodeDecodeError as error:
        problems.append(f"{origin}: byte {error.start} is not UTF-8. Save the file as UTF-8 text.")
    except OSError as error:
        problems.append(f"{origin}: cannot be read: {error.strerror}. Give the path of a YAML file.")
    else:
        value, faults = syntax.read(text)
        problems += [f"{name}: {fault}." for fault in faults]
        if value is None:
            return None if faults else {}
        if isinstance(value, dict):
            return _sections(value)
        problems.append(f"{name}: expected sections of keys, got {value!r:.40}. Known: {', '.join(FIELDS)}.")
    return None


def _instead(name: str) -> str:
    """Of a file that is not there: what it may have been meant for, a YAML file or a run's directory."""
    here, what = Path(name).parent, "" if Path(name).suffix else " or run"
    if not here.is_dir():
        return f"{what}, and no directory {here} to look for one."
    found = sorted([*here.glob("*.y*ml"), *(file.parent for file in here.glob("*/config.yaml"))])
    there = {path.name: str(path) for path in found}
    if near := messages.did_you_mean(Path(name).name, there):
        return f"{what}. Did you mean {there[near]}?"
    some = ", ".join([*there.values()][:6]) + (" and more" if len(there) > 6 else "")
    return f"{what}. " + (f"There is {some}." if there else f"Nothing else in {here} is one.")


def _command(overrides: Iterable[str]) -> tuple[Layer, list[str]]:
    """All overrides as one layer, so that the order of `data.source=text data.path=x` does not matter."""
    tree: dict[str, Any] = {}
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.split(".")
        value, faults = syntax.read(text)
        if not equals or not all(keys):
            problems.append(f"{COMMAND_LINE}: '{override}' is not an override. Write section.key=value.")
        elif faults:
            problems += [f"{COMMAND_LINE}: {path}: {fault}." for fault in faults]
        else:
            tree = _merge(tree, functools.reduce(lambda inner, key: {key: inner}, reversed(keys), value))
    return Layer(COMMAND_LINE, _sections(tree)), problems


def _sections(tree: dict) -> dict[str, Any]:
    """A section whose keys are all commented out is read as null; it is an empty section."""
    return {str(name): {} if section is None and name in FIELDS else section for name, section in tree.items()}


def _merge(under: dict, over: dict) -> dict:
    merged = dict(under)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(under.get(key), dict)
        merged[key] = _merge(under[key], value) if nested else value
    return merged


def _lay(under: dict, over: dict) -> dict:
    """`over` merged onto `under`; a section whose variant changes is replaced, its old keys being the old variant's but
    for the LASTING ones that the new one has."""

    def left(name: str, section: Any) -> Any:
        if name not in FIELDS:
            return section
        old, new = _variant(name, section), _variant(name, over.get(name))
        if not old or not new or old == new:
            return section
        known = messages.keys(types[new]) if new in (types := messages.variants(name)) else []
        return {key: section[key] for key in LASTING.get(name, ()) if key in section and key in known}

    return _merge({name: left(name, section) for name, section in under.items()}, over)


def _variant(name: str, section: Any) -> str:
    """What the section's discriminator says; '' where it says nothing, or there is none."""
    value = section.get(FIELDS[name].discriminator) if isinstance(section, dict) else None
    return value if isinstance(value, str) else ""


def _origin(layers: Sequence[Layer], *path: str) -> str:
    """The last layer that sets the key at `path`; for a key that is nowhere, the file that was asked for."""
    for layer in reversed(layers):
        node: Any = layer.tree
        for key in path:
            node = node.get(key, ...) if isinstance(node, dict) else ...
        if node is not ...:
            return layer.origin
    return layers[-2].origin


def _origins(layers: Sequence[Layer], subjects: Iterable[tuple[str, str]]) -> str:
    return ", ".join(dict.fromkeys(_origin(layers, *subject) for subject in subjects))


# --- sections ---------------------------------------------------------------------------------------------------------


def _set_aside(name: str, section: dict, layers: Sequence[Layer], problems: list[str]) -> dict:
    """The section without the keys that its type does not have, each of which is a problem."""
    types = messages.variants(name)
    variant = _variant(name, section)
    owners = [types[variant]] if variant in types else types.values()
    known = {key for owner in owners for key in messages.keys(owner)}
    for key in (key for key in section if key not in known):
        problems.append(f"{_origin(layers, name, key)}: {messages.unknown_key(name, str(key), variant)}")
    return {key: value for key, value in section.items() if key in known}


@functools.cache
def _validator(name: str) -> TypeAdapter:
    kind: Any = Annotated[FIELDS[name].annotation, FIELDS[name]]
    return TypeAdapter(kind)


def _validate(name: str, section: Any, layers: Sequence[Layer], problems: list[str], sound: dict[str, Section]) -> None:
    try:
        sound[name] = _validator(name).validate_python(section)
    except ValidationError as error:
        if not isinstance(section, dict):
            problems.append(f"{_origin(layers, name)}: {name}: expected a mapping of keys, got {section!r:.40}.")
            return
        depth = 1 if FIELDS[name].discriminator else 0  # pydantic puts the variant before the key
        found: dict[str, list] = {}
        for each in error.errors():
            key = each["loc"][depth] if len(each["loc"]) > depth else FIELDS[name].discriminator
            found.setdefault(str(key), []).append(each)
        for key, errors in found.items():
            problems.append(f"{_origin(layers, name, key)}: {messages.wrong_value(name, key, errors)}")
