"""Directories in checkpoints/, by their names.

STEP            a complete checkpoint, renamed to this name
STEP.saving     a save in progress, or one that was killed
STEP.deleting   an old checkpoint, being deleted
STEP.corrupt    a damaged checkpoint, which training moved aside
STEP.foreign    another file or directory that was in the way of a checkpoint"""

import errno
import os
import shutil
from pathlib import Path

from spmd_lm.checkpoints.record import RECORD_FILE
from spmd_lm.errors import CheckpointError
from spmd_lm.runtime.formatting import parse_count

SAVING, DELETING, CORRUPT, FOREIGN = ".saving", ".deleting", ".corrupt", ".foreign"

BEING_WRITTEN = ".orbax-checkpoint-tmp"  # orbax's suffix until all processes have written


def entries(directory: Path) -> list[Path]:
    """Sorted contents of a directory, empty if it does not exist.  Raises CheckpointError if it cannot be read, where
    glob would find nothing."""
    try:
        return sorted(directory / name for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}. Mend that, and try again.") from error


def parse_step(name: str) -> int | None:
    """The step in a checkpoint's directory name; None for other names."""
    step = parse_count(name)
    return step if str(step) == name else None


def is_checkpoint(path: Path) -> bool:
    """True for a checkpoint, even a damaged one."""
    try:
        return not {RECORD_FILE, "state"}.isdisjoint(os.listdir(path))
    except OSError as error:
        nothing = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
        return error.errno not in nothing  # reading it reports why


def foreign_names(directory: Path) -> list[str]:
    """Names that could be a checkpoint's, but are not."""
    names = [path.name for path in entries(directory) if path.name.isdecimal()]
    return sorted(name for name in names if parse_step(name) is None or not is_checkpoint(directory / name))


def describe_damage(directory: Path) -> str:
    """A sentence about the damaged checkpoints that were moved aside; '' if none were."""
    names = [path.name for path in entries(directory) if CORRUPT in path.name]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} damaged" if names else ""


def move_aside(path: Path, suffix: str) -> Path:
    """Renames STEP to STEP.corrupt, or to STEP.corrupt.2 if that exists, and so on."""
    names = (path.with_name(f"{path.name}{suffix}{number}") for number in ("", *(f".{n}" for n in range(2, 10_000))))
    free = next(name for name in names if not os.path.lexists(name))
    path.rename(free)
    return free


def remove_unfinished(directory: Path) -> list[str]:
    """Deletes unfinished saves and deletions of a killed process; returns messages about failures."""
    messages = []
    for path in entries(directory):
        number, dot, rest = path.name.partition(".")
        ours = dot + rest in (SAVING, DELETING) or rest.startswith(f"{SAVING[1:]}{BEING_WRITTEN}")
        if parse_step(number) is not None and ours:
            messages.append(delete(path))
    return [*filter(None, messages)]


def delete(path: Path) -> str:
    """Deletes a file or directory; returns a message on failure, as on NFS while somebody reads it: the next save
    retries."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:  # only a link, not its target
            path.unlink()
    except OSError as error:
        return f"{error.filename or path} cannot be deleted: {error.strerror}. It takes room on the disk."
    return ""
