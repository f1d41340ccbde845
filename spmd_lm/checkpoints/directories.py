"""The directories beside each other in checkpoints/: which are checkpoints, and what becomes of the others.

STEP            a checkpoint: it was renamed to this name when it was complete
STEP.saving     a save in progress, or one that was killed
STEP.deleting   one of the oldest, on its way out
STEP.corrupt    a damaged checkpoint, which training moved aside
STEP.foreign    what was in the way of a checkpoint"""

import errno
import os
import shutil
from pathlib import Path

from spmd_lm.checkpoints.record import RECORD_FILE
from spmd_lm.errors import CheckpointError
from spmd_lm.runtime.formatting import parse_count

SAVING, DELETING, CORRUPT, FOREIGN = ".saving", ".deleting", ".corrupt", ".foreign"

BEING_WRITTEN = ".orbax-checkpoint-tmp"  # orbax's own ending, before all processes have written


def entries(directory: Path) -> list[Path]:
    """What is in a directory; nothing if it is not there.  CheckpointError if that cannot be seen: glob finds nothing
    then either."""
    try:
        return sorted(directory / name for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}. Mend that, and try again.") from error


def parse_step(name: str) -> int | None:
    """The step of the checkpoint whose directory has this name; None if no checkpoint has it."""
    step = parse_count(name)
    return step if str(step) == name else None


def is_checkpoint(path: Path) -> bool:
    """Whether it is one, or was: it may be damaged."""
    try:
        return not {RECORD_FILE, "state"}.isdisjoint(os.listdir(path))
    except OSError as error:
        nothing = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        return error.errno not in nothing  # reading it will tell why it cannot be read


def foreign_names(directory: Path) -> list[str]:
    """The names of files and directories that could be a checkpoint's, but are none."""
    names = [path.name for path in entries(directory) if path.name.isdecimal()]
    return sorted(name for name in names if parse_step(name) is None or not is_checkpoint(directory / name))


def say_damaged(directory: Path) -> str:
    """Which checkpoints were damaged, and moved aside; '' if none were."""
    names = [path.name for path in entries(directory) if CORRUPT in path.name]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} damaged" if names else ""


def move_aside(path: Path, suffix: str) -> Path:
    """Renames STEP to STEP.corrupt, or to STEP.corrupt.2 if there is one, and so on."""
    names = (path.with_name(f"{path.name}{suffix}{number}") for number in ("", *(f".{n}" for n in range(2, 10_000))))
    free = next(name for name in names if not os.path.lexists(name))
    path.rename(free)
    return free


def remove_unfinished(directory: Path) -> list[str]:
    """Deletes what a killed process was saving or deleting.  Messages about what cannot be deleted."""
    messages = []
    for path in entries(directory):
        number, dot, rest = path.name.partition(".")
        ours = dot + rest in (SAVING, DELETING) or rest.startswith(f"{SAVING[1:]}{BEING_WRITTEN}")
        if parse_step(number) is not None and ours:
            messages.append(delete(path))
    return [*filter(None, messages)]


def delete(path: Path) -> str:
    """A message if it cannot be deleted, as on NFS while somebody reads it: the next save tries again."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:  # a link alone, not what it leads to
            path.unlink()
    except OSError as error:
        return f"{error.filename or path} cannot be deleted: {error.strerror}. It takes room on the disk."
    return ""
