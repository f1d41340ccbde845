"""A Hugging Face directory to import: its config.json, tensors and tokenizer files, and the configuration of the new
run.  Does not import jax, so errors come at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmd_lm.config.load import TOKENIZER_DIR, VOCABULARY_FILES, Layer, load
from spmd_lm.config.schema import Data, RunConfig
from spmd_lm.data.tokenizers.vocabulary import COMPANION_FILES
from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import BERT
from spmd_lm.huggingface.config_json import ParsedConfig, parse_config
from spmd_lm.huggingface.json_files import read_json
from spmd_lm.huggingface.safetensors_io import SafetensorsReader

CONFIG_FILE = "config.json"
TOKENIZER_FILES = (*VOCABULARY_FILES, *COMPANION_FILES)

DEFAULTS = {
    # Fine-tuning as Hugging Face's Trainer does it by default.
    "optim": {"lr": 5e-5, "decay": "linear", "b2": 0.999, "weight_decay": 0.0},
    "train": {"steps": 1000, "batch": 32},
    "checkpoint": {"every": 500},
}
"""The configuration of an imported run where neither --config nor the command line sets a key."""

OVERRIDABLE = ("dropout", "attention_dropout", "scan", "attention")
"""Keys of section `model` that do not change what the parameters mean."""


@dataclass(frozen=True)
class ModelDirectory:
    """tokenizer_files: those that the run and its exports keep, unchanged."""

    path: Path
    config: ParsedConfig
    reader: SafetensorsReader
    tokenizer_files: list[Path]

    @property
    def has_tokenizer(self) -> bool:
        return any(path.name in VOCABULARY_FILES for path in self.tokenizer_files)


def tokenizer_files(directory: Path) -> list[Path]:
    return [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]


def open_directory(path: Path) -> ModelDirectory:
    """Raises ConfigError with every problem found, one per line."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Give one with a {CONFIG_FILE} and .safetensors files.")
    if not (path / CONFIG_FILE).exists():
        raise ConfigError(f"{path}: not a model: no {CONFIG_FILE} in it. Give a directory with one.")
    hf_config = read_json(path / CONFIG_FILE)
    problems: list[str] = []
    try:
        config = parse_config(hf_config)
    except ConfigError as error:
        problems += (f"{path / CONFIG_FILE}: {problem}" for problem in error.problems)
    try:
        reader = SafetensorsReader(path)
    except ConfigError as error:
        problems += error.problems
    if not problems:
        problems += _layer_count_errors(config, reader)
        problems += _vocabulary_errors(path, config.model["vocab"])
    if problems:
        raise ConfigError(*problems)
    return ModelDirectory(path, _with_stored_heads(config, reader), reader, tokenizer_files(path))


def _with_stored_heads(config: ParsedConfig, reader: SafetensorsReader) -> ParsedConfig:
    """The original BERT checkpoints name BertForMaskedLM, although their files have the next-sentence head as well."""
    if config.architecture is not BERT or "cls.seq_relationship.weight" not in reader.tensors:
        return config
    return replace(config, objective=config.objective | {"sentence_order": True})


def _layer_count_errors(config: ParsedConfig, reader: SafetensorsReader) -> Iterable[str]:
    """A layer count without tensors to match: we would loop up to any number that a config.json has."""
    layers, num_tensors = config.model["layers"], len(reader.tensors)
    if layers > num_tensors:
        (key,) = (key.hf_key for key in config.architecture.config_keys if key.model_key == "layers")
        path = reader.directory / CONFIG_FILE
        yield f"{path}: {key}={layers}, but the files have {num_tensors} tensors in all. Download both again."


# --- vocabulary -------------------------------------------------------------------------------------------------------


def _vocabulary_errors(directory: Path, vocab_size: int) -> Iterable[str]:
    """Tokenizer files with ids that the model lacks.  Fewer ids than the model has are common: room to grow."""
    for name, read_ids in (
        ("tokenizer.json", _tokenizer_json_ids),
        ("vocab.json", _vocab_json_ids),
        ("added_tokens.json", _vocab_json_ids),
        ("vocab.txt", _vocab_txt_ids),
    ):
        path = directory / name
        if not path.is_file():
            continue
        try:
            highest = max((id for id in read_ids(path) if isinstance(id, int)), default=-1)
        except ConfigError as error:
            yield from error.problems
            continue
        except (AttributeError, KeyError, TypeError):
            yield f"{path}: not a known tokenizer format. Download it again."
            continue
        if highest >= vocab_size:
            yield (
                f"{path} has ids up to {highest}, more than vocab_size={vocab_size} of {CONFIG_FILE}. One of the two "
                f"files belongs to another model: download both again."
            )


def _tokenizer_json_ids(path: Path) -> Iterable[Any]:
    tokenizer = read_json(path)
    vocab = tokenizer["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return [*ids, *(token["id"] for token in tokenizer.get("added_tokens") or [])]


def _vocab_json_ids(path: Path) -> Iterable[Any]:
    return read_json(path).values()


def _vocab_txt_ids(path: Path) -> Iterable[int]:
    """One token per line; the last id is enough."""
    return [path.read_bytes().removesuffix(b"\n").count(b"\n")]


# --- the run's configuration ------------------------------------------------------------------------------------------


def make_run_config(
    model_dir: ModelDirectory, run_dir: str, config_file: str | None, overrides: Sequence[str]
) -> RunConfig:
    """The configuration of a run of this model in `run_dir`: DEFAULTS, `config_file`, config.json, then `overrides`.

    Raises ConfigError, also if an override would change the model."""
    path, parsed = model_dir.path / CONFIG_FILE, model_dir.config
    defaults = Layer("defaults of import", DEFAULTS | {"data": _default_data(model_dir, run_dir)})
    imported = {"run": {"dir": run_dir}, "model": parsed.model, "objective": parsed.objective}
    config = load(config_file, overrides, under=defaults, over=Layer(str(path), imported))
    model = config.model.model_dump()
    problems = []
    for key, value in parsed.model.items():
        # Rotary positions have no table, so rows may be shorter than the model's context.
        shorter = key == "context" and model["positions"] == "rotary" and model["context"] <= value
        if model[key] != value and key not in OVERRIDABLE and not shorter:
            problems.append(f"model.{key}={model[key]}: {path} sets {value}. Leave it out, or import another model.")
    if model_dir.has_tokenizer and isinstance(config.data, Data) and config.data.tokenizer == "bytes":
        problems.append(
            f"data.tokenizer=bytes, but {model_dir.path} has the tokenizer whose ids the model knows. "
            f"Use data.tokenizer={Path(run_dir) / TOKENIZER_DIR}."
        )
    if config.run.dir != run_dir:
        problems.append(f"run.dir={config.run.dir}: the run is created in {run_dir}. Leave it out.")
    if problems:
        raise ConfigError(*problems)
    return config


def _default_data(model_dir: ModelDirectory, run_dir: str) -> dict[str, str]:
    """Text, read by the model's own tokenizer.  Without one a GPT gets synthetic ids, and a BERT bytes."""
    if model_dir.has_tokenizer:
        return {"source": "python-stdlib", "tokenizer": str(Path(run_dir) / TOKENIZER_DIR)}
    return {"source": "synthetic" if model_dir.config.objective["kind"] == "causal_lm" else "python-stdlib"}
