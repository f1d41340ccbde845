"""Reads a run's newest checkpoint, and checks that today's config, vocabulary and data still fit it."""

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from flax.traverse_util import flatten_dict
from pydantic import ValidationError

from spmd_lm.checkpoints.checkpointer import Checkpointer, Config
from spmd_lm.checkpoints.directories import describe_damage
from spmd_lm.checkpoints.record import Meta
from spmd_lm.config.data_sections import RULES, TRAINED_TOKENIZERS, Data
from spmd_lm.config.load import TOKENIZER_DIR, data_of_run, saved_chat_template, saved_tokenizer
from spmd_lm.config.own_modules import ModuleRef
from spmd_lm.config.schema import Checkpoint as CheckpointOptions
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import Dataset, load_data
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, fitting_tokenizer
from spmd_lm.data.tokenizers.vocabulary import vocabulary_hash
from spmd_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, DataError
from spmd_lm.runtime.metrics import Status
from spmd_lm.runtime.outputs import print_line
from spmd_lm.runtime.processes import allgather_objects

Result = TypeVar("Result")

# Sections and keys that define the model: if they differ, a saved state is meaningless.
MODEL_KEYS = (
    *("model", "objective", "adapter"),
    *("precision.params", "precision.frozen", "precision.quantized", "precision.quantized_group"),
)

# Keys among them that define how a layer is computed and regularized; they leave the meaning of the arrays unchanged.
COMPUTATION_KEYS = (
    *("model.scan", "model.attention", "model.dropout", "model.attention_dropout", "adapter.dropout"),
    *("model.mlp.capacity", "model.mlp.group", "model.mlp.balance_loss", "model.mlp.z_loss"),
)

# Keys of `run` that may change the bits that a step computes.
COMPILED_KEYS = ("run.compiler_options", "run.deterministic")


def warn(line: str) -> None:
    print_line(f"warning: {line}", sys.stderr)


def open_checkpoints(run: Path, options: CheckpointOptions | None = None) -> Checkpointer:
    """Checkpoints of the run_id in status.json; all if it has none."""
    run_id = ""
    with suppress(CheckpointError):  # a status of another version
        status = Status.read(run)
        run_id = status.run_id if status else ""
    return Checkpointer(run / "checkpoints", options, run_id, log=warn)


def newest_readable(
    checkpoints: Checkpointer, read: Callable[[int], Result], fallback: bool, attempts: int = 5
) -> Result:
    """Result of `read` for the newest step; with fallback, the newest undamaged.  Raises CheckpointError if none.
    attempts: retries when a running job deletes it."""
    steps = sorted(set.intersection(*map(set, allgather_objects("steps", checkpoints.steps()))))
    if not steps:
        damaged = describe_damage(checkpoints.directory)
        advice = damaged or "Train first, with checkpoint.every > 0"
        raise CheckpointError(f"{checkpoints.directory} holds no checkpoint. {advice}.")
    for step in reversed(steps):
        try:
            result = read(step)
            if step != steps[-1]:
                warn(f"step {step} is used, of steps {steps}.")
            return result
        except DamagedCheckpointError as damage:
            is_gone = any(allgather_objects("deleted", not checkpoints.path(step).exists()))  # by a running job
            if is_gone and attempts:
                return newest_readable(checkpoints, read, fallback, attempts - 1)
            if not fallback:
                raise CheckpointError(f"{damage} {_advice(checkpoints, step)}") from damage
            warn(f"{damage}")
    raise CheckpointError(f"{checkpoints.directory}: all its checkpoints are damaged: steps {steps}.")


def _advice(checkpoints: Checkpointer, damaged: int) -> str:
    older = [step for step in checkpoints.intact_steps() if step < damaged]
    if not older:
        return "There is no older one."
    return f"Use --fallback for step {older[-1]}; training resumes from there."


def check_compatible(saved: Config, config: Config, directory: Path) -> list[str]:
    """Compares the saved config of the run in `directory` with today's; returns a line per allowed difference.  Raises
    CheckpointError if the model differs, and ConfigError if a user's module was changed."""
    changes = _changes(saved, config)
    _check_modules(saved, config, changes.keys(), directory)
    if config.get("data", {}).get("tokenizer") == str(saved_tokenizer(directory)):
        changes.pop("data.tokenizer", None)  # the run's own copy: check_vocabulary compares its contents
    if config.get("data", {}).get("chat_template") == str(saved_chat_template(directory)):
        changes.pop("data.chat_template", None)  # likewise: the resulting data is compared
    if other_model := _select(changes, MODEL_KEYS, COMPUTATION_KEYS):
        header = f"{directory} holds a run of another model (saved -> configured):"
        advice = "Choose another run.dir, or restore these values. Nothing was changed."
        raise CheckpointError("\n".join([header, *other_model, advice]))
    return [line for key, line in changes.items() if not _is_under(key, ("run",)) or key in COMPILED_KEYS]


def _check_modules(saved: Config, config: Config, changed: Collection[str], directory: Path) -> None:
    may_change = {"data"} if config.get("data", {}).get("allow_change") else set()
    for section in sorted(config.keys() - may_change):
        old, new = (each.get(section, {}).get("module") for each in (saved, config))
        if f"{section}.module" in changed and old and new:
            copy, ref = (ModuleRef.parse(text) for text in (old, new))
            raise ConfigError(
                f"{section}.module={ref.path}:{ref.name} is not what {directory} was trained with: its hash is "
                f"{ref.hash}, and that of {copy.name} in {directory / copy.path} is {copy.hash}. Bring that file back, "
                "or choose another run.dir. Nothing was changed."
            )


def check_vocabulary(config: RunConfig, directory: Path, meta: Meta | None) -> None:
    """Raises ConfigError if config's vocabulary is not the one that the run in `directory` was trained with.
    meta: of the checkpoint; None before the first step.  Older versions do not store the vocabulary: then it is the one
      saved in `directory`, or bytes."""
    if not isinstance(config.data, Data):
        return
    name, saved = config.data.tokenizer, saved_tokenizer(directory)
    trained_with = meta["config"].get("data", {}).get("tokenizer") if meta else None
    own = meta["data"].get("vocabulary") if meta else None
    if not own and (saved or trained_with == "bytes"):
        own = vocabulary_hash(str(saved) if saved else "bytes")
    if name in TRAINED_TOKENIZERS and directory == config.run.directory and own:
        if trained_with not in (name, str(saved)):
            has = f"data.tokenizer={trained_with or saved or 'bytes'}"
            raise ConfigError(f"data.tokenizer={name}, but {directory} has {has}. Use {has}, or another run.dir.")
        if not saved:
            raise ConfigError(f"{directory}: the tokenizer that it trained is gone. Bring {TOKENIZER_DIR}/ back.")
        name = str(saved)
    if not own or name == own or (not {"bytes", *TRAINED_TOKENIZERS} & {name, own} and vocabulary_hash(name) == own):
        return
    advice = f"Use data.tokenizer={saved or trained_with or 'bytes'}, or another run."
    if saved and vocabulary_hash(str(saved)) != own:
        advice = f"Nor is {saved}, which was changed: bring the vocabulary back."
    raise ConfigError(
        f"data.tokenizer={name} is not the vocabulary of {directory}, whose ids its model was trained on. {advice}"
    )


READ_KEYS = (("model.width", int), ("model.context", int), ("objective.kind", str), ("train.log_every", int))
"""Keys that a saved config must have, and their types, because code reads them; 0 and '' count as missing."""


def check_saved_config(saved: Config, directory: Path) -> None:
    """Raises CheckpointError if this is not the config of a run."""
    flat = flatten_dict(saved, sep=".")
    wrong = [key for key, kind in READ_KEYS if not isinstance(flat.get(key), kind) or flat[key] <= kind()]
    wrong += [section for section in ("run", "data", "parallel") if section not in saved]
    if wrong:
        what = f"the configuration in its newest checkpoint has no {', '.join(wrong)}"
        raise CheckpointError(f"{directory}: {what}. Restore the checkpoint from a copy, or choose another run.")


def checked_meta(checkpoints: Checkpointer, step: int) -> Meta:
    """The meta of `step`, with a checked config."""
    meta = checkpoints.agreed_record(step).meta
    check_saved_config(meta["config"], checkpoints.directory)
    return meta


def rules_of(meta: Meta | None) -> int:
    """Version of the document rules in the meta, if its run has read data; else today's."""
    return meta["data"].get("rules", 1) if meta and meta["data"]["samples"] else RULES


def load_run_data(config: RunConfig) -> Dataset:
    """The run's training data and validation text, by the rules of its checkpoints."""
    rules, model = _rules_of_run(config), config.model
    return load_data(data_of_run(config), config.train.seed, model.vocab, rules, model.context)


def make_run_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of `load_run_data`, without loading its data."""
    return fitting_tokenizer(data_of_run(config), config.model.vocab, _rules_of_run(config))


def _rules_of_run(config: RunConfig) -> int:
    """The rules of the newest readable checkpoint; today's if there is none."""
    checkpoints = open_checkpoints(config.run.directory, config.checkpoint)
    for step in reversed(checkpoints.steps()):
        with suppress(CheckpointError):  # opening the run reports it
            return rules_of(checkpoints.meta(step))
    return RULES


def check_data(meta: Meta, config: RunConfig, fingerprint: str, name: str) -> list[str]:
    """A message if the data changed since the checkpoint; DataError instead, unless data.allow_change.  [] if no data
    was read, as after import.  fingerprint, name: today's data's."""
    saved = meta["data"]["fingerprint"]
    if not meta["data"]["samples"] or saved == fingerprint:
        return []
    problem = f"{config.run.directory}: its data is not what it was trained on so far: sha256 {saved[:12]} then, "
    problem += f"{fingerprint[:12]} now ({name})."
    if config.data.allow_change:
        return [f"{problem} It goes on with what is there now: data.allow_change=true."]
    raise DataError(f"{problem} Bring the old data back, or set data.allow_change=true to go on with the new.")


def check_warm_start(saved: Config, config: Config, directory: Path) -> None:
    """Raises CheckpointError if a run cannot be initialized from the one in `directory`.  Only `model` is compared: a
    shorter context and other COMPUTATION_KEYS are allowed."""
    changes = _changes(saved, config)
    differ = _select(changes, ("model",), (*COMPUTATION_KEYS, "model.context"))
    if saved["model"]["context"] < config["model"]["context"]:
        differ.append(changes["model.context"])
    if differ:
        header = f"run.init_from={directory} is another model (saved -> configured):"
        advice = "Remove these keys from the config to take that run's values."
        raise CheckpointError("\n".join([header, *differ, advice]))


def _changes(saved: Config, config: Config) -> dict[str, str]:
    """A line for each key that differs."""
    with suppress(ValidationError):  # keys newer than `saved` get defaults, unless today's schema refuses it
        saved = RunConfig.model_validate(saved).model_dump(by_alias=True)
    old, new = flatten_dict(saved, sep="."), flatten_dict(config, sep=".")
    old_values, new_values = _meant(old), _meant(new)
    return {
        key: f"  {key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not (key in old_values and old_values[key] == new_values.get(key))
    }


def _meant(config: Config) -> Config:
    """Effective values of some keys: sizes whose default is a multiple of another, and users' modules, by name and hash
    without the path."""
    modules = {key: ModuleRef.parse(text)[1:] for key, text in config.items() if key.endswith(".module") and text}
    return modules | {
        "model.mlp_width": config.get("model.mlp_width") or 4 * config.get("model.width", 0),
        "model.kv_heads": config.get("model.kv_heads") or config.get("model.heads"),
    }


def _select(changes: dict[str, str], sections: tuple[str, ...], but_not: tuple[str, ...]) -> list[str]:
    return [line for key, line in changes.items() if _is_under(key, sections) and not _is_under(key, but_not)]


def _is_under(key: str, sections: tuple[str, ...]) -> bool:
    return f"{key}.".startswith(tuple(f"{section}." for section in sections))
