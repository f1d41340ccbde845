"""Makes one checked RunConfig from a YAML file, the base files it extends, and `section.key=value` overrides.

A configuration is a stack of layers, each a mapping of sections and its origin: the root of the `base:` chain first,
the command line last.  All problems are reported at once, each with the layer that set the key: unknown keys are
dropped, sections are validated separately, and every check whose sections are valid runs."""

import functools
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from spmd_lm.addresses import address_of, bucket_problem, elsewhere, is_bucket
from spmd_lm.buckets.copies import copy_small_files, directory_of
from spmd_lm.config import checks, own_modules, suggest, syntax
from spmd_lm.config.data_sections import TRAINED_TOKENIZERS, Data, Synthetic
from spmd_lm.config.schema import DEFAULT_KINDS, RunConfig
from spmd_lm.config.section import Section
from spmd_lm.config.types import valid_path
from spmd_lm.errors import ConfigError
from spmd_lm.files import write_atomically

COMMAND_LINE = "command line"
FIELDS = RunConfig.model_fields
VALIDATORS = {name: TypeAdapter(cast(Any, Annotated[field.annotation, field])) for name, field in FIELDS.items()}

CONFIG_FILE = "config.yaml"
TOKENIZER_DIR = "tokenizer"  # a run's copy of its tokenizer's files

VOCABULARY_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")  # the first one found is used

CHAT_TEMPLATE_FILE = "chat_template.jinja"  # beside the vocabulary

SHARED_KEYS = {
    "data": ("tokenizer", "bos"),
    "optim": ("warmup", "decay", "decay_start", "decay_steps", "clip", "freeze"),
}
"""Keys that survive a change of their section's kind: a model's token ids mean the same words in any text, and the
shape of a learning rate schedule suits any optimizer; its lr does not."""

RECIPE_KEYS = {"sources", "out"}  # required in a recipe of `spmd-lm prepare`

SHIPPED = Path(__file__).parents[1] / "configs"
"""The configurations that come with the package; in the repository, a link to its configs/."""

MAX_CHARACTERS = 2**20  # in a configuration file
MAX_FILES = 20  # in a chain of bases; the longest shipped has 3
MAX_UNKNOWN = 20  # unknown keys of a section that get a sentence each


@dataclass(frozen=True)
class Layer:
    origin: str
    tree: dict[str, Any]


def load(
    path: str | Path | None,
    overrides: Iterable[str] = (),
    under: Layer | None = None,
    over: Layer | None = None,
    cell: Layer | None = None,
) -> RunConfig:
    """The configuration in the file at `path`, or the shipped one of that name, changed by `overrides`.

    under, over: layers below and above the file.  `over` holds the whole model, so run.init_from is not read.
    cell: the keys that a sweep sets.

    Raises ConfigError with one line per problem: `origin: section.key: what is wrong. How to fix it.`"""
    problems: list[str] = []
    command_line = _parse_overrides(overrides, problems)
    files = [] if path is None else _read_chain(locate(path), problems)
    if path is not None and not files:  # there is nothing to check the overrides against
        raise ConfigError(*problems)
    if any(file.tree.keys() >= RECIPE_KEYS for file in files):
        raise ConfigError(f"{path}: this is a recipe of `spmd-lm prepare`. Run `spmd-lm prepare {path}`.")
    layers = [layer for layer in (under, *files, over, cell, command_line) if layer]
    inherited = Layer("", {}) if over else _inherit(layers, problems)
    layers = [_tokenizer_of_data(layers), *([inherited] if inherited else []), *layers]
    return _resolve(layers, inherited is None, problems)


def given_value(path: str | Path | None, overrides: Iterable[str], *keys: str) -> Any:
    """The unchecked value of a key in the file at `path` or in `overrides`; `...` if unset."""
    problems: list[str] = []
    files = [] if path is None else _read_chain(locate(path), problems)
    return _get(_merge_layers([*files, _parse_overrides(overrides, problems)]), *keys)


def checked(config: RunConfig, where: str) -> RunConfig:
    """Returns `config`.  Raises ConfigError, prefixed by `where`, if its sections contradict one another."""
    if problems := checks.problems(dict(config)):
        raise ConfigError(*(f"{where}: {problem}" for problem in problems))
    return config


def load_run(directory: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The configuration of the run in `directory`, which may have been moved, changed by `overrides`.  Raises like
    `load`, and if the overrides name another tokenizer than the run's own."""
    file, tokenizer = directory / CONFIG_FILE, saved_tokenizer(directory)
    if not os.path.exists(file):
        problem = elsewhere(str(directory)) or f"{_not_a_run(directory)}, or a YAML file"
        raise ConfigError(f"{directory}: {problem}.")
    here: dict[str, Any] = {"run": {"dir": address_of(directory) or str(directory)}}
    tree = _merge_layers(_read_chain(file, []))
    if _get(tree, "data", "tokenizer") in (..., "bytes"):
        tokenizer = None
    if tokenizer:
        here["data"] = {"tokenizer": str(tokenizer)}
    template = saved_chat_template(directory)
    if template and _get(tree, "data", "chat_template") not in (..., None):
        here.setdefault("data", {})["chat_template"] = str(template)
    config = load(file, overrides, over=Layer(str(directory), here))
    if tokenizer and isinstance(config.data, Data) and config.data.tokenizer != str(tokenizer):
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}: the model in {directory} was trained with the run's own "
            "tokenizer, and knows no other token ids. Remove this key."
        )
    return config


def saved_tokenizer(directory: Path) -> Path | None:
    """The run's copy of its tokenizer's files, or None."""
    copy = directory / TOKENIZER_DIR
    return copy if any(os.path.isfile(copy / name) for name in VOCABULARY_FILES) else None


def saved_chat_template(directory: Path) -> Path | None:
    """The run's copy of its chat template, or None."""
    copy = directory / TOKENIZER_DIR / CHAT_TEMPLATE_FILE
    return copy if os.path.isfile(copy) else None


def data_of_run(config: RunConfig) -> Data | Synthetic:
    """The section `data`, with the path of a tokenizer that the run has trained."""
    data, saved = config.data, saved_tokenizer(config.run.directory)
    if isinstance(data, Data) and data.tokenizer in TRAINED_TOKENIZERS and saved:
        return data.model_copy(update={"tokenizer": str(saved)})
    return data


def dump(config: RunConfig) -> str:
    """YAML that `load` reads back as an equal configuration."""
    return syntax.write(config.model_dump(by_alias=True))


def write_config(config: RunConfig, directory: Path) -> None:
    """Writes the config.yaml of the run in `directory`, and copies of the user's modules."""
    own_modules.keep_copies(config, directory)
    write_atomically(directory / CONFIG_FILE, dump(own_modules.as_saved(config)))


def _not_a_run(directory: Path) -> str:
    what = f"no {CONFIG_FILE} in this directory" if directory.is_dir() else "no such directory"
    runs = sorted(found.parent for cells in ("", "cells/") for found in directory.glob(f"{cells}*/{CONFIG_FILE}"))
    way = f"Give one of the runs in it, such as {runs[0]}" if runs else "Give the directory of a run"
    return f"{what}, so it is not a run. {way}"


def _inherit(layers: Sequence[Layer], problems: list[str]) -> Layer | None:
    """The model and tokenizer that a run takes from `run.init_from`; None, with a problem reported, if that run cannot
    be read.  A configuration with a whole model, such as a run's own file, inherits nothing."""
    tree = _merge_layers(layers)
    init_from = _get(tree, "run", "init_from")
    if not isinstance(init_from, str) or _get(tree, "model", "layers") is not ...:
        return Layer("", {})
    where = f"{_origin(layers, 'run', 'init_from')}: run.init_from={init_from}"
    try:
        directory = Path(valid_path(init_from)).expanduser()
        if not os.path.exists(directory / CONFIG_FILE):
            raise ConfigError(f"{_not_a_run(directory)}.")
        config = load_run(directory)
    except PydanticCustomError:  # validating the section reports it
        return None
    except ConfigError as error:
        problems += (f"{where}: {line}" for line in error.problems)
        return None
    taken: dict[str, Any] = {"model": config.model.model_dump()}
    if isinstance(config.data, Data) and _get(tree, "data", "source") != "synthetic":
        taken["data"] = {"tokenizer": config.data.tokenizer, "bos": config.data.bos}
    return Layer(str(Path(init_from) / CONFIG_FILE), taken)


def _tokenizer_of_data(layers: Sequence[Layer]) -> Layer:
    """The tokenizer that made the token ids, stored beside them; in a bucket, it is looked for only if it is needed."""
    tree = _merge_layers(layers)
    blend = _get(tree, "data", "blend")
    path = _get(blend[0], "path") if isinstance(blend, list) and blend else _get(tree, "data", "path")
    if _get(tree, "data", "source") != "tokens" or not isinstance(path, str):
        return Layer("", {})
    directory = os.path.join(os.path.expanduser(path), TOKENIZER_DIR)
    if is_bucket(path):
        is_needed = _get(tree, "data", "tokenizer") is ... and not bucket_problem(path)
        if not is_needed or not copy_small_files(path, TOKENIZER_DIR).objects:
            return Layer("", {})
        directory = str(directory_of(path) / TOKENIZER_DIR)
    return Layer(path, {"data": {"tokenizer": directory}} if os.path.isdir(directory) else {})


def _resolve(layers: Sequence[Layer], model_is_unknown: bool, problems: list[str]) -> RunConfig:
    """The configuration of the layers.  Raises ConfigError with `problems` and those found here.
    model_is_unknown: the model's values are not validated."""
    tree = _merge_layers(layers)
    valid: dict[str, Section] = {}

    def report(problem: str, *keys: str) -> None:
        problems.append(f"{_origin(layers, *keys)}: {problem}")

    unknown = [name for name in tree if name not in FIELDS]
    for name in unknown[:MAX_UNKNOWN]:
        report(suggest.unknown_section(name, tree[name]), name)
    if len(unknown) > MAX_UNKNOWN:
        report(f"and {len(unknown) - MAX_UNKNOWN} more unknown sections.")
    for name, field in FIELDS.items():
        section = tree.get(name, {})
        if name not in tree and not field.is_required():
            valid[name] = field.default
            continue
        if not isinstance(section, dict):
            report(f"{name}: expected a mapping of keys, got {section!r:.40}.", name)
            continue
        kind = _kind(name, section)
        known = suggest.keys_of_kind(name, kind)
        unknown = [key for key in section if key not in known]
        for key in unknown[:MAX_UNKNOWN]:
            report(suggest.unknown_key(name, str(key), kind), name, key)
        if len(unknown) > MAX_UNKNOWN:
            report(f"{name}: and {len(unknown) - MAX_UNKNOWN} more unknown keys.", name)
        if name == "model" and model_is_unknown:
            continue
        try:
            valid[name] = VALIDATORS[name].validate_python({key: section[key] for key in known if key in section})
        except ValidationError as error:
            for key, problem in suggest.wrong_values(name, error):
                report(problem, name, key)
            continue
        if module := getattr(valid[name], "module", None):
            try:
                valid[name] = valid[name].model_copy(update={"module": own_modules.sealed(module)})
            except ConfigError as error:
                report(f"{name}.module: {error}", name, "module")
    for problem in checks.problems(valid):
        in_conflict = re.findall(r"\b([a-z]+)\.(\w+)=", problem.split(". ")[0])
        origins = dict.fromkeys(_origin(layers, *keys) for keys in in_conflict)
        problems.append(f"{', '.join(origins)}: {problem}")
    if problems:
        raise ConfigError(*problems)
    return RunConfig(**valid)  # type: ignore[arg-type]


def _read_chain(path: str | Path, problems: list[str], extended_by: tuple[str, ...] = ()) -> list[Layer]:
    """The layers of a file and its bases, root first; [] if one cannot be read.
    extended_by: the files that led here."""
    name = os.path.normpath(path)
    chain = (*extended_by, name)
    if name in extended_by:
        problems.append(f"{extended_by[-1]}: base: circular chain: {' -> '.join(chain)}. Remove one of these bases.")
        return []
    if len(chain) > MAX_FILES:
        problems.append(f"{name}: base: more than {MAX_FILES} files, each the base of another. Put some into one.")
        return []
    tree = read_yaml_file(name, f"{extended_by[-1]}: base: {name}" if extended_by else name, problems)
    if tree is None:
        return []
    base = tree.pop("base", None)
    if base is None:
        return [Layer(name, own_modules.located(tree, os.path.dirname(name)))]
    if not isinstance(base, str):
        problems.append(f"{name}: base: expected the name of one file, got {base!r}. Let each file name one base.")
        return []
    bases = _read_chain(locate(os.path.join(os.path.dirname(name), base), base), problems, chain)
    return [*bases, Layer(name, own_modules.located(tree, os.path.dirname(name)))] if bases else []


def locate(path: str | Path, name: str = "") -> Path:
    """`path` if it exists, else the shipped file of that `name`, by default `path` itself."""
    return Path(path) if os.path.lexists(path) else shipped().get(name or str(path), Path(path))


@functools.cache
def shipped() -> Mapping[str, Path]:
    """Files shipped with the package, by name: gpt2/124m, sweeps/layouts."""
    return {str(path.relative_to(SHIPPED).with_suffix("")): path for path in sorted(SHIPPED.rglob("*.yaml"))}


def read_yaml_file(name: str, origin: str, problems: list[str]) -> dict[str, Any] | None:
    """The sections and other keys of one file; None if it cannot be read.
    origin: prefix of problems with the whole file."""
    if problem := elsewhere(name):
        problems.append(f"{origin}: {problem}.")
        return None
    try:
        if stat.S_IFMT(os.stat(name).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):  # a pipe or a device may never end
            problems.append(f"{origin}: no regular file. Give the path of a YAML file.")
            return None
        with open(name, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            problems.append(f"{origin}: longer than {MAX_CHARACTERS:,} characters. Give the path of a configuration.")
            return None
        value, errors = syntax.read(text)
    except FileNotFoundError:
        problems.append(f"{origin}: no such file{_suggest_file(name)}")
    except UnicodeDecodeError as error:
        problems.append(f"{origin}: byte {error.start} is not UTF-8. Save the file as UTF-8 text.")
    except OSError as error:
        problems.append(f"{origin}: cannot be read: {error.strerror}. Give the path of a YAML file.")
    except ValueError:
        problems.append(f"{origin!r}: no file can have this name. Give the path of a YAML file.")
    else:
        problems += [f"{name}: {error}." for error in errors]
        if value is None:
            return None if errors else {}
        if isinstance(value, dict):
            for key, text in value.items():  # base, and files named by a sweep or a recipe
                if isinstance(text, str) and (problem := elsewhere(text)):
                    problems.append(f"{name}: {key}: {text:.80}: {problem}.")
                    return None
            return _sections(value)
        problems.append(f"{name}: expected sections of keys, got {value!r:.40}. Known: {', '.join(FIELDS)}.")
    return None


def _suggest_file(missing: str) -> str:
    """Completes the sentence 'no such file' with files and runs that may have been meant."""
    directory, or_run = Path(missing).parent, "" if Path(missing).suffix else " or run"
    found = sorted([*directory.glob("*.y*ml"), *(file.parent for file in directory.glob(f"*/{CONFIG_FILE}"))])
    paths = {path.name: str(path) for path in found}
    if near := suggest.did_you_mean(Path(missing).name, paths):
        return f"{or_run}. Did you mean {paths[near]}?"
    names = {Path(name).name: name for name in shipped()} | {name: name for name in shipped()}
    if near := suggest.did_you_mean(missing.removeprefix("configs/").removesuffix(".yaml"), names):
        return f"{or_run}. Did you mean {names[near]}, which is shipped?"
    if not directory.is_dir():
        return f"{or_run}: there is no directory {directory}."
    if not paths:
        return f"{or_run}. There is none in {'this directory' if directory == Path() else directory}."
    return f"{or_run}. There is {', '.join([*paths.values()][:6])}{' and more' if len(paths) > 6 else ''}."


def _parse_overrides(overrides: Iterable[str], problems: list[str]) -> Layer:
    """One layer of all overrides, so that their order does not matter, as in `data.source=text data.path=x`."""
    values: list[tuple[str, Any]] = []
    for override in overrides:
        path, equals, text = override.partition("=")
        # YAML would take data.path='*.md' for an alias, and drop the second half of data.path='a #1'.
        is_text = text.startswith(("*", "#")) or (" #" in text and text[:1] not in ("'", '"', "[", "{"))
        value, errors = (cast(Any, text), []) if is_text else syntax.read(text)
        if not equals or not all(path.split(".")):
            problems.append(f"{COMMAND_LINE}: '{override}' is not an override. Write section.key=value.")
        elif errors:
            problems += [f"{COMMAND_LINE}: {path}: {error}." for error in errors]
        else:
            values.append((path, value))
    return make_layer(COMMAND_LINE, values)


def make_layer(origin: str, values: Iterable[tuple[str, Any]]) -> Layer:  # values: by section.key
    tree: dict[str, Any] = {}
    for path, value in values:
        for key in reversed(path.split(".")):
            value = {key: value}
        tree = merge_trees(tree, value)
    return Layer(origin, own_modules.located(_sections(tree), ""))


def _sections(tree: dict) -> dict[str, Any]:
    """`tree` with {} for each null section: YAML reads null if all keys are commented out."""
    return {str(name): {} if section is None and name in FIELDS else section for name, section in tree.items()}


def merge_trees(under: dict, over: dict, depth: int = 0) -> dict:
    """`under` updated by `over`, key by key; a mapping within a section is replaced if its kind differs."""
    result = dict(under)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(under.get(key), dict)
        if nested and depth:
            kinds = [each["kind"] for each in (under[key], value) if "kind" in each]
            nested = kinds[1:] in ([], kinds[:1])
        result[key] = merge_trees(under[key], value, depth + 1) if nested else value
    return result


def _merge_layers(layers: Iterable[Layer]) -> dict[str, Any]:
    """Merges layers; later ones win.  A section whose kind changes keeps only the SHARED_KEYS that the new kind has.
    For token ids on disk, a tokenizer to be trained gives way to the one set in a layer below."""
    given: dict[str, Any] = {}
    stacked: dict[str, Any] = {name: {"kind": kind} for name, kind in DEFAULT_KINDS.items()}
    for layer in layers:
        for name in sorted(stacked.keys() & layer.tree.keys() & FIELDS.keys()):
            old, new = _kind(name, stacked[name]), _kind(name, layer.tree[name])
            if old and new and old != new:
                shared = {*SHARED_KEYS.get(name, ())}.intersection(suggest.keys_of_kind(name, new))
                stacked[name] = {key: value for key, value in stacked[name].items() if key in shared}
                if new == "tokens" and stacked[name].get("tokenizer") in TRAINED_TOKENIZERS:
                    del stacked[name]["tokenizer"]
                    stacked[name] |= given
        tokenizer = _get(layer.tree, "data", "tokenizer")
        given = given if tokenizer in (..., *TRAINED_TOKENIZERS) else {"tokenizer": tokenizer}
        stacked = merge_trees(stacked, layer.tree)
    return stacked


def _kind(name: str, section: Any) -> str:
    """The value of the section's discriminator; '' if it has none."""
    kind = _get(section, FIELDS[name].discriminator)
    return kind if isinstance(kind, str) else ""


def _get(tree: Any, *path: Any) -> Any:
    """The value at `path`; `...` if there is none."""
    for key in path:
        tree = tree.get(key, ...) if isinstance(tree, dict) else ...
    return tree


def _origin(layers: Sequence[Layer], *path: str) -> str:
    """Origin of the last layer that sets the key at `path`; if none does, of the one below the command line."""
    origins = (layer.origin for layer in reversed(layers) if _get(layer.tree, *path) is not ...)
    return next(origins, layers[-2].origin)
