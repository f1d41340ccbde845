"""A run's newest checkpoint: opened to use its model without training, and only where it fits the config; the saved
config is compared with today's, key by key."""

from contextlib import suppress
from pathlib import Path

from flax.traverse_util import flatten_dict
from pydantic import ValidationError

from spmd_lm.checkpoints.checkpointer import Checkpointer, Config
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.program import Program

# Sections and keys that define the model: where they differ, a saved state is meaningless.
MODEL_KEYS = ("model", "objective", "precision.params")

# Keys among them that define how a layer is computed and regularized: the saved arrays mean the same.
COMPUTATION_KEYS = ("model.scan", "model.attention", "model.dropout", "model.attention_dropout")


def restore_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """The program, the newest parameters in canonical shapes, in the shardings of `config`'s layout, and their step.

    Raises CheckpointError if there is no checkpoint, or it is of another model."""
    checkpointer = Checkpointer(config.run.directory / "checkpoints")
    step = checkpointer.latest_step()
    if step is None:
        raise CheckpointError(f"{checkpointer.directory} holds no checkpoint. Train first, with checkpoint.every > 0.")
    check_compatible(checkpointer.meta(step)["config"], config.model_dump(by_alias=True), checkpointer.directory)
    program = Program(config)
    return program, checkpointer.restore_params(step, program.abstract_canonical().params), step


def open_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """As `restore_run`, with the parameters as the program's compiled functions take them."""
    program, params, step = restore_run(config)
    return program, program.params_from_canonical(params), step


def check_compatible(saved: Config, config: Config, directory: Path) -> list[str]:
    """The differences between a run's saved config and today's that leave its state usable, a line each.

    Raises CheckpointError if the model differs."""
    changes = _changes(saved, config)
    if other_model := _select(changes, MODEL_KEYS, COMPUTATION_KEYS):
        header = f"{directory} holds a run of another model (saved -> configured):"
        advice = "Choose another run.dir, or restore these values. Nothing was changed."
        raise CheckpointError("\n".join([header, *other_model, advice]))
    return [line for key, line in changes.items() if not _is_under(key, ("run",))]


def check_warm_start(saved: Config, config: Config, directory: Path) -> None:
    """Raises CheckpointError if a run cannot be initialized from the one in `directory`.

    Its context may be shorter and its objective another one; the rest of the model must be the same."""
    changes = _changes(saved, config)
    differ = _select(changes, ("model",), (*COMPUTATION_KEYS, "model.context"))
    if saved["model"]["context"] < config["model"]["context"]:
        differ.append(changes["model.context"])
    if differ:
        header = f"run.init_from={directory} is another model (saved -> configured):"
        advice = "Remove these keys from the config to take that run's values."
        raise CheckpointError("\n".join([header, *differ, advice]))


def _changes(saved: Config, config: Config) -> dict[str, str]:
    """The keys that differ, and a line about each."""
    with suppress(ValidationError):  # keys newer than `saved` are at their defaults, unless today's schema refuses it
        saved = RunConfig.model_validate(saved).model_dump(by_alias=True)
    old, new = flatten_dict(saved, sep="."), flatten_dict(config, sep=".")
    old_sizes, new_sizes = _derived_sizes(old), _derived_sizes(new)
    return {
        key: f"  {key}: {old.get(key, 'not set')} -> {new.get(key, 'not set')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not (key in old_sizes and old_sizes[key] == new_sizes[key])
    }


def _derived_sizes(config: Config) -> Config:
    """Sizes that follow from others unless they are set, as an imported model's config.json sets them."""
    return {
        "model.mlp_width": config.get("model.mlp_width") or 4 * config.get("model.width", 0),
        "model.kv_heads": config.get("model.kv_heads") or config.get("model.heads"),
    }


def _select(changes: dict[str, str], sections: tuple[str, ...], but_not: tuple[str, ...]) -> list[str]:
    return [line for key, line in changes.items() if _is_under(key, sections) and not _is_under(key, but_not)]


def _is_under(key: str, sections: tuple[str, ...]) -> bool:
    return f"{key}.".startswith(tuple(f"{section}." for section in sections))
