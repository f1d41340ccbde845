"""Restores a state, including the base of a run with adapters, which its checkpoint does not hold.

The base is the frozen parameters before the first step.  Checkpoints record its origin and fingerprint, so many
adapters can share one base, and none is used with a different one."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.init_from import PretrainedRun
from spmd_lm.checkpoints.record import Meta
from spmd_lm.checkpoints.saved_run import (
    check_compatible,
    check_vocabulary,
    checked_meta,
    newest_readable,
    open_checkpoints,
    warn,
)
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.fingerprint import fingerprints
from spmd_lm.parallel.trees import Tree, from_paths, leaves_by_path, merge
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState

BASE_KEY = "base"  # in a checkpoint's meta


class SavedBase(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    directory: str  # of its run; '' if it was initialized from train.seed
    step: Annotated[int, Field(ge=0)]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]

    @classmethod
    def of(cls, meta: Meta, run: Path) -> Self:
        """The base in the meta of this run's checkpoint.  Raises CheckpointError if it has none."""
        try:
            return cls.model_validate(meta.get(BASE_KEY))
        except ValidationError:
            what = "its checkpoint does not say which model it has adapters of"
            raise CheckpointError(f"{run}: {what}. Restore the checkpoint from a copy.") from None


def meta_of_base(
    saved: Meta, program: Program, pretrained: PretrainedRun | None, make_params: Callable[[], Tree]
) -> Meta:
    """A checkpoint's metadata about its base; {} for a run without adapters.

    saved: the meta that the run resumes from.
    make_params: returns the canonical parameters, perhaps a copy; called only for a new base."""
    if BASE_KEY in saved:
        return {BASE_KEY: saved[BASE_KEY]}
    if program.config.adapter.kind == "none":
        return {}
    directory, step = (str(pretrained.directory.absolute()), pretrained.step) if pretrained else ("", 0)
    fingerprint = _fingerprint(program.plan.untrained(make_params()))
    return {BASE_KEY: SavedBase(directory=directory, step=step, fingerprint=fingerprint).model_dump()}


def restore_state(checkpoints: Checkpointer, step: int, program: Program) -> TrainState:
    """The canonical state of `step`, with LaterLeafs for what is offloaded.  Raises like Checkpointer.restore, and
    CheckpointError if its base is missing."""
    abstract = program.saved_part(program.abstract_canonical())
    state = checkpoints.restore(step, abstract, on_host_later=True)
    return dataclasses.replace(state, params=_with_base(state.params, checkpoints.agreed_record(step).meta, program))


def restore_run(config: RunConfig, fallback: bool = False) -> tuple[Program, Tree, int]:
    """The program, the newest canonical parameters in the shardings of `config`'s layout, and their step.
    fallback: take the newest undamaged step.  Raises CheckpointError if there is no checkpoint, or it is damaged, of
      another model or without its base, and ConfigError for another vocabulary."""
    return _restore(config, fallback, with_base=True)


def restore_trained(config: RunConfig, fallback: bool = False) -> tuple[Program, Tree, int]:
    """`restore_run`, but only the parameters in the checkpoint, without the base of adapters."""
    return _restore(config, fallback, with_base=False)


def open_run(config: RunConfig, fallback: bool = False) -> tuple[Program, Tree, int]:
    """`restore_run`, with parameters laid out for the program's compiled functions."""
    program, params, step = restore_run(config, fallback)
    return program, program.params_from_canonical(params), step


def _restore(config: RunConfig, fallback: bool, *, with_base: bool) -> tuple[Program, Tree, int]:
    checkpoints = open_checkpoints(config.run.directory, config.checkpoint)

    def read(step: int) -> tuple[Program, Tree, int]:
        meta = checked_meta(checkpoints, step)
        check_compatible(meta["config"], config.model_dump(by_alias=True), config.run.directory)
        check_vocabulary(config, config.run.directory, meta if step else None)
        program = Program(config, trains=False)
        params = checkpoints.restore_params(step, program.saved_part(program.abstract_canonical()).params)
        return program, _with_base(params, meta, program) if with_base else params, step

    return newest_readable(checkpoints, read, fallback)


def _with_base(trained: Tree, meta: Meta, program: Program) -> Tree:
    """Adds the base to the checkpoint's parameters.  Raises CheckpointError if the base is gone, or has changed."""
    if program.config.adapter.kind == "none":
        return trained
    saved = SavedBase.of(meta, program.config.run.directory)
    frozen = program.plan.untrained(program.abstract_canonical().params)
    if directory := _directory_of_base(program.config, saved):
        base = program.plan.untrained(PretrainedRun(program, directory, step=saved.step).initial_params())
    else:
        leaves = program.initial_params(leaves_by_path(frozen).keys())
        base = from_paths(leaves, frozen)
    if (found := _fingerprint(base)) != saved.fingerprint:
        where = f"step {saved.step} of {directory}" if directory else "what train.seed draws"
        raise CheckpointError(
            f"{program.config.run.directory} holds adapters of another model than {where} is now: fingerprint "
            f"{saved.fingerprint} when it was trained, {found} now. "
            + ("Bring that back, or choose another run.init_from." if directory else "Set train.seed back.")
        )
    return merge(base, trained)


def _directory_of_base(config: RunConfig, saved: SavedBase) -> Path | None:
    """The base's run: run.init_from, or its path when the run began; None if the base was initialized."""
    given = config.run.init_from and Path(config.run.init_from).expanduser()
    if not saved.directory:
        if given:
            raise CheckpointError(
                f"{config.run.directory} holds adapters of what train.seed drew, not of run.init_from={given}. Leave "
                "run.init_from out."
            )
        return None
    directories = [each for each in (given, Path(saved.directory)) if each]
    found = next((each for each in directories if (each / "checkpoints").is_dir()), None)
    if found is None:
        raise CheckpointError(
            f"{config.run.directory} holds adapters of the model in {directories[-1]}, where no run is. Set "
            "run.init_from to where it is now."
        )
    if given and found != given:
        warn(f"run.init_from={given} is no run: {config.run.directory} holds adapters of {found}, which is used.")
    return found


def _fingerprint(params: Tree) -> str:
    lines = "\n".join(f"{path} {each}" for path, each in sorted(fingerprints(params)[0].items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
