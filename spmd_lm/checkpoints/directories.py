"""The directories beside each other in checkpoints/: which are checkpoints, and what becomes of the others.

STEP            a checkpoint: it was renamed to this name when it was complete
STEP.saving     a save in progress, or one that was killed
STEP.deleting   one of the oldest, on its way out
STEP.corrupt    a damaged checkpoint, which training moved aside
STEP.foreign    what was in the way of a checkpoint"""

import os
import shutil
from pathlib import Path

from spmd_lm.checkpoints.record import RECORD_FILE
from spmd_lm.errors import CheckpointError
from spmd_lm.runtime.formatting import parse_count

SAVING, DELETING, CORRUPT, FOREIGN = ".saving", ".deleting", ".corrupt", ".foreign"


def parse_step(name: str) -> int | None:
    """The step of the checkpoint whose directory has this name; None if no checkpoint has it."""
    step = parse_count(name)
    return step if str(step) == name else None


def is_checkpoint(path: Path) -> bool:
    """Whether it is one, or was: it may be damaged."""
    return any((path / name).exists() for name in (RECORD_FILE, "state"))


def foreign_names(directory: Path) -> list[str]:
    """The names of files and directories that could be a checkpoint's, but are none."""
    names = [path.name for path in directory.glob("*") if path.name.isdecimal()]
    return sorted(name for name in names if parse_step(name) is None or not is_checkpoint(directory / name))


def move_aside(path: Path, suffix: str) -> Path:
    """Renames STEP to STEP.corrupt, or to STEP.corrupt.2 if there is one, and so on."""
    names = (path.with_name(f"{path.name}{suffix}{number}") for number in ("", *(f".{n}" for n in range(2, 10_000))))
    free = next(name for name in names if not os.path.lexists(name))
    path.rename(free)
    return free


def remove_unfinished(directory: Path) -> None:
    """Deletes what a killed process was saving or deleting."""
    for path in directory.glob("*"):
        number, _, rest = path.name.partition(".")
        if parse_step(number) is not None and f".{rest}".startswith((SAVING, DELETING)):
            delete(path)


def delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:  # a link alone, not what it leads to
            path.unlink()
    except OSError as error:
        what = f"{error.filename or path} cannot be deleted: {error.strerror}"
        raise CheckpointError(f"{what}. Delete it: newer checkpoints are complete.") from error
