"""A Hugging Face directory to import: config.json, tensors and tokenizer files, and the configuration of the new run.
Does not import jax, so errors come at once."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_lm.config.data_sections import Data
from spmd_lm.config.load import TOKENIZER_DIR, VOCABULARY_FILES, Layer, load
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.vocabulary import COMPANION_FILES, CONFIG_JSON, put_by_name, read_end_ids
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.files import write_atomically
from spmd_lm.huggingface.config_json import ParsedConfig, outside_training, parse_config
from spmd_lm.huggingface.families.bert import BERT
from spmd_lm.huggingface.safetensors_io import SafetensorsReader, read_file, read_json

ADDED_FILES = ("tokenizer.json", "added_tokens.json")  # list tokens that were added to a vocabulary
CHAT_TEMPLATES = "additional_chat_templates"  # a directory of NAME.jinja, besides chat_template.jinja

# Defaults of an imported run, below --config and the command line.
DEFAULTS = {
    # Defaults of Hugging Face's Trainer.
    "optim": {"lr": 5e-5, "decay": "linear", "b2": 0.999, "weight_decay": 0.0},
    "train": {"steps": 1000, "batch": 32},
    "checkpoint": {"every": 500},
}

# Keys of section `model` that leave the meaning of parameters unchanged.
OVERRIDABLE = ("dropout", "attention_dropout", "scan", "attention")


@dataclass(frozen=True)
class ModelDirectory:
    path: Path
    config: ParsedConfig
    reader: SafetensorsReader
    tokenizer_files: list[str]  # copied unchanged to the run and its exports
    tokens_beyond: list[str]  # added tokens with ids that the model lacks, as in a tokenizer shared by several models


def tokenizer_files(directory: Path) -> list[str]:
    """Names of the files in a model's directory that belong to its tokenizer."""
    names = [name for name in (*VOCABULARY_FILES, *COMPANION_FILES) if os.path.lexists(directory / name)]
    templates = directory / CHAT_TEMPLATES
    if templates.is_symlink():  # listed like a file, and then refused
        return [*names, CHAT_TEMPLATES]
    return [*names, *sorted(f"{CHAT_TEMPLATES}/{path.name}" for path in templates.glob("*.jinja"))]


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copies small files of a model's directory."""
    for name in names:
        content = read_file(source / name)
        (target / name).parent.mkdir(exist_ok=True)
        write_atomically(target / name, content)


def open_directory(path: Path) -> ModelDirectory:
    """Raises ConfigError with every problem found, one per line."""
    config_file = path / CONFIG_JSON
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory. Give one with a {CONFIG_JSON} and .safetensors files.")
    if not os.path.lexists(config_file):
        raise ConfigError(f"{path}: not a model: no {CONFIG_JSON} in it. Give a directory with one.")
    hf_config = read_json(config_file)
    problems: list[str] = []
    try:
        read_end_ids(path)
    except DataError as error:
        problems.append(str(error))
    try:
        config = parse_config(hf_config)
    except ConfigError as error:
        problems += (f"{config_file}: {problem}" for problem in error.problems)
    try:
        reader = SafetensorsReader(path)
    except ConfigError as error:
        problems += error.problems
    if not problems:
        layers, num_tensors = config.model["layers"], len(reader.tensors)
        if layers > num_tensors:  # we would loop up to any number that a config.json has
            (key,) = (key.hf_key for key in config.architecture.config_keys if key.model_key == "layers")
            problems.append(
                f"{config_file}: {key}={layers}, but the files have {num_tensors} tensors in all. Download both again."
            )
        if (experts := config.model["mlp"].get("experts", 0)) > num_tensors:
            problems.append(
                f"{config_file} has {experts} experts, but the files have {num_tensors} tensors in all. Download both "
                f"again."
            )
        beyond, wrong = _check_vocabulary(path, config.model["vocab"])
        problems += wrong
        problems += _unreadable(path / name for name in tokenizer_files(path))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    # The original BERT checkpoints name BertForMaskedLM, although their files have the next-sentence head as well.
    if config.architecture is BERT and "cls.seq_relationship.weight" in reader.tensors:
        config.objective["sentence_order"] = True
    return ModelDirectory(path, config, reader, tokenizer_files(path), beyond)


def _check_vocabulary(directory: Path, vocab_size: int) -> tuple[list[str], list[str]]:
    """Added tokens in tokenizer files with ids that the model lacks, and problems of these files, such as other ids
    that it lacks.  Models often have more ids than the files, as room to grow."""
    beyond, problems = dict[str, None](), list[str]()
    for path in (directory / name for name in (*ADDED_FILES, "vocab.json", "vocab.txt")):
        if not os.path.lexists(path):
            continue
        try:
            tokens, added = _read_ids(path)
        except ConfigError as error:
            problems += error.problems
        except (AttributeError, KeyError, TypeError, ValueError):
            problems.append(f"{path}: not a known tokenizer format. Download it again.")
        else:
            put = put_by_name({*tokens, *added})
            required = [*tokens.values(), *(number for token, number in added.items() if token in put)]
            if (highest := max(required, default=-1)) >= vocab_size:
                problems.append(
                    f"{path} has ids up to {highest}, more than vocab_size={vocab_size} of {CONFIG_JSON}. One of the "
                    f"two files belongs to another model: download both again."
                )
            beyond |= dict.fromkeys(token for token, number in added.items() if number >= vocab_size)
    return [*beyond], problems


def _unreadable(files: Iterable[Path]) -> Iterator[str]:
    """Problems of files that are only copied, found before the tensors are read."""
    for file in files:
        try:
            read_file(file)
        except ConfigError as error:
            yield from error.problems


def _read_ids(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Ids of a vocabulary's tokens, and of tokens added to it, as the file numbers them."""
    if path.suffix == ".txt":  # one token per line
        lines = read_file(path).removesuffix(b"\n").count(b"\n")
        return {"": lines}, {}
    content = read_json(path)
    if path.name == "tokenizer.json":
        vocab = content["model"]["vocab"]
        tokens = vocab if isinstance(vocab, dict) else {str(piece): number for number, (piece, _) in enumerate(vocab)}
        added = [(token["content"], token["id"]) for token in content.get("added_tokens") or []]
    else:
        tokens, added = ({}, [*content.items()]) if path.name in ADDED_FILES else (content, [])
    numbers = [*tokens.values(), *(number for _, number in added)]
    if not all(type(number) is int and 0 <= number < 2**32 for number in numbers):
        raise ValueError
    return tokens, {str(token): max(number, tokens.get(token, 0)) for token, number in added}


def make_run_config(
    model_dir: ModelDirectory, run_dir: str, config_file: str | None, overrides: Sequence[str]
) -> RunConfig:
    """The configuration of a run of this model in `run_dir`: DEFAULTS, `config_file`, config.json, then `overrides`.

    Raises ConfigError, also if an override would change the model."""
    path, parsed, tokenizer_dir = model_dir.path / CONFIG_JSON, model_dir.config, str(Path(run_dir) / TOKENIZER_DIR)
    has_tokenizer = any(name in VOCABULARY_FILES for name in model_dir.tokenizer_files)
    # Text for the model's own tokenizer.  Without one a GPT gets synthetic ids, and a BERT bytes.
    synthetic = not has_tokenizer and parsed.objective["kind"] == "causal_lm"
    data = {"source": "synthetic" if synthetic else "python-stdlib"}
    data |= {"tokenizer": tokenizer_dir} if has_tokenizer else {}
    imported = {"run": {"dir": run_dir}, "model": parsed.model, "objective": parsed.objective}
    defaults = Layer("defaults of import", DEFAULTS | {"data": data})
    config = load(config_file, overrides, under=defaults, over=Layer(str(path), imported))
    model = config.model.model_dump()
    problems = []
    for key, value in parsed.model.items():
        # Rotary positions have no table, so rows may be shorter than the model's context.
        shorter = key == "context" and model["positions"] == "rotary" and model["context"] <= value
        same = outside_training(model[key]) == outside_training(value) if key == "mlp" else model[key] == value
        if not same and key not in OVERRIDABLE and not shorter:
            problems.append(f"model.{key}={model[key]}: {path} sets {value}. Leave it out, or import another model.")
    if has_tokenizer and isinstance(config.data, Data) and config.data.tokenizer == "bytes":
        problems.append(
            f"data.tokenizer=bytes, but {model_dir.path} has the tokenizer whose ids the model knows. "
            f"Use data.tokenizer={tokenizer_dir}."
        )
    if config.run.dir != run_dir:
        problems.append(f"run.dir={config.run.dir}: the run is created in {run_dir}. Leave it out.")
    if problems:
        raise ConfigError(*problems)
    return config
