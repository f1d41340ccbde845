"""A Hugging Face directory, opened: what model its config.json describes, which tensors are in its files, and what is
wrong with it.  Without jax, so that a refusal does not wait for it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmd_lm.config.load import TOKENIZER_DIR, VOCABULARY_FILES, Layer, load_layers
from spmd_lm.config.schema import Data, RunConfig
from spmd_lm.data.tokenizers.vocabulary import BESIDE
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import BERT
from spmd_lm.huggingface.convert import Description, read_config
from spmd_lm.huggingface.safetensors_io import Tensors, read_json, some

CONFIG = "config.json"

DEFAULTS = {
    # As Hugging Face's own trainer tunes a model, unless it is told otherwise.
    "optim": {"lr": 5e-5, "decay": "linear", "b2": 0.999, "weight_decay": 0.0},
    "train": {"steps": 1000, "batch": 32},
    "checkpoint": {"every": 500},
}
"""What an imported run is, where neither --config nor the command line says otherwise."""

FREE = ("dropout", "attention_dropout", "scan", "attention")
"""Keys of section model that a model may be trained with as one likes: its parameters mean the same."""


@dataclass(frozen=True)
class Directory:
    """description: what config.json says.  carried: the files that travel with the model."""

    path: Path
    description: Description
    tensors: Tensors
    carried: list[Path]

    @property
    def has_tokenizer(self) -> bool:
        return any(path.name in VOCABULARY_FILES for path in self.carried)


def open_directory(path: Path) -> Directory:
    """What there is in a model's directory.  ConfigError with every problem found, a line each."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Give one with a {CONFIG} and .safetensors files.")
    if not (path / CONFIG).exists():
        raise ConfigError(f"{path}: no {CONFIG} in it, so it is no model. Give a directory with one.")
    said = read_json(path / CONFIG)
    problems: list[str] = []
    try:
        description = read_config(said)
    except ConfigError as error:
        problems += (f"{path / CONFIG}: {problem}" for problem in error.problems)
    try:
        tensors = Tensors(path)
    except ConfigError as error:
        problems += error.problems
    if not problems:
        problems += _too_large(description, tensors)
        problems += _vocabulary(path, description.model["vocab"])
    if problems:
        raise ConfigError(*problems)
    carried = [path / name for name in (*VOCABULARY_FILES, *BESIDE) if (path / name).is_file()]
    return Directory(path, _with_its_heads(description, tensors), tensors, carried)


def _with_its_heads(description: Description, tensors: Tensors) -> Description:
    """The first BERTs call themselves BertForMaskedLM, and have the other head in their files all the same."""
    if description.architecture is not BERT or "cls.seq_relationship.weight" not in tensors.stored:
        return description
    return replace(description, objective=description.objective | {"sentence_order": True})


def _too_large(description: Description, tensors: Tensors) -> Iterable[str]:
    """What would make us count to any number that a config.json says."""
    layers, there = description.model["layers"], len(tensors.stored)
    if layers > there:
        (key,) = (key.theirs for key in description.architecture.keys if key.ours == "layers")
        yield f"{tensors.directory / CONFIG}: {key}={layers}, and the files have {there} tensors in all. Fetch both."


# --- vocabulary -------------------------------------------------------------------------------------------------------


def _vocabulary(directory: Path, vocab: int) -> Iterable[str]:
    """Tokenizer files that have ids which the model has not; fewer are common, as room to grow."""
    for name, ids in (
        ("tokenizer.json", _ids_of_tokenizer),
        ("vocab.json", lambda path: read_json(path).values()),
        ("added_tokens.json", lambda path: read_json(path).values()),
        ("vocab.txt", lambda path: [path.read_bytes().removesuffix(b"\n").count(b"\n")]),
    ):
        path = directory / name
        if not path.is_file():
            continue
        try:
            last = max((id for id in ids(path) if isinstance(id, int)), default=-1)
        except ConfigError as error:
            yield from error.problems
            continue
        except (AttributeError, KeyError, TypeError):
            yield f"{path}: of a form that is not known. Fetch it again."
            continue
        if last >= vocab:
            yield (
                f"{path} has ids up to {last}, which vocab_size={vocab} of {CONFIG} does not hold. One of the two is "
                f"another model's: fetch both again."
            )


def _ids_of_tokenizer(path: Path) -> Iterable[int]:
    said = read_json(path)
    vocab = said["model"]["vocab"]
    pieces = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return [*pieces, *(token["id"] for token in said.get("added_tokens") or [])]


# --- the run that it becomes ------------------------------------------------------------------------------------------


def _data(found: Directory, run: str) -> dict[str, str]:
    """Text by the model's own tokenizer.  Without one it knows ids and no text, unless words are to be hidden in it."""
    if found.has_tokenizer:
        return {"source": "python-stdlib", "tokenizer": str(Path(run) / TOKENIZER_DIR)}
    return {"source": "synthetic" if found.description.objective["kind"] == "causal_lm" else "python-stdlib"}


def configure(found: Directory, run: str, base: str | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run in the directory `run` that has this model: defaults, then the file `base`, then
    config.json, then `overrides`.  ConfigError, and where these would make another model of it."""
    origin = str(found.path / CONFIG)
    what = found.description
    under = Layer("defaults of import", DEFAULTS | {"data": _data(found, run)})
    over = Layer(origin, {"run": {"dir": run}, "model": what.model, "objective": what.objective})
    config = load_layers(under, base, over, overrides)
    ours = config.model.model_dump()
    problems = [
        f"model.{key}={ours[key]}: {origin} makes it {value}. Leave it out, or import another model."
        for key, value in what.model.items()
        if ours[key] != value and key not in FREE and not (key == "context" and _shorter(ours, value))
    ]
    if found.has_tokenizer and isinstance(config.data, Data) and config.data.tokenizer == "bytes":
        problems.append(
            f"data.tokenizer=bytes, and {found.path} has a tokenizer of its own, whose ids the model knows. "
            f"Use data.tokenizer={Path(run) / TOKENIZER_DIR}."
        )
    if config.run.dir != run:
        problems.append(f"run.dir={config.run.dir}: the run is made in {run}. Leave it out.")
    if problems:
        raise ConfigError(*problems)
    return config


def _shorter(ours: dict[str, Any], context: int) -> bool:
    """Whether rows are shorter than the model's, which is free where no table has their positions."""
    return ours["positions"] == "rotary" and ours["context"] <= context


def differences(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """What is missing, too many or misshapen, a line each."""
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    other = [
        f"{name} {list(found[name])} and not {list(shape)}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    told = {"missing": missing, "of no use to this model": extra, "of another shape": other}
    return [f"{len(names)} {what}: {some(names)}" for what, names in told.items() if names]
