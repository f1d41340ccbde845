"""One run to a directory: a lock on its file `.lock`, in which stands who holds it.

The lock is the operating system's and ends with the process, however that ends; a file that a killed process left means
nothing."""

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import jax

from spmd_lm.errors import ConfigError


@contextmanager
def claimed(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps every other run out of the directory.  Raises ConfigError if one is there, or nothing can be written.

    What was made for the claim goes with it, so that a run that is refused later leaves no trace."""
    made = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    with ExitStack() as afterwards:
        for path in reversed(made):
            afterwards.callback(unless_impossible, path.rmdir)  # impossible once the run has files
        file = afterwards.enter_context(take_lock(directory, say))
        if jax.process_index() == 0:
            afterwards.callback(unless_impossible, Path(file.name).unlink)
        yield


def unless_impossible(change: Callable[[], None]) -> None:
    with suppress(OSError):
        change()


def take_lock(directory: Path, say: Callable[[str], None]) -> TextIO:
    """The lock file, locked until it is closed."""
    file = open_lock(directory)
    if jax.process_index() > 0:  # the first process locks, for the whole job
        return file
    try:
        lock(file, directory, say)
        if os.path.exists(file.name) and os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
            return file
    except BaseException:
        file.close()
        raise
    file.close()  # a run that ended took it away between our opening and our locking it
    return take_lock(directory, say)


def open_lock(directory: Path) -> TextIO:
    """The file to lock; ConfigError if the run cannot write in its directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for place in (directory, directory / "checkpoints"):
            if os.path.exists(place):
                with tempfile.TemporaryFile(dir=place):
                    pass
        return open(directory / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        there = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
        raise ConfigError(
            f"run.dir={directory}: cannot be written: {error.strerror}. {there} belongs to {owner(there)} "
            f"({stat.filemode(there.stat().st_mode)}). Choose another run.dir, or have it given to you."
        ) from error


def lock(file: TextIO, directory: Path, say: Callable[[str], None]) -> None:
    """Locks it until it is closed, at the latest by the end of the process, however that comes."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise ConfigError(
            f"run.dir={directory}: {holder} is training there. Wait for it, stop it, or choose another run.dir."
        ) from None
    except OSError as error:  # some network file systems have no locks
        say(f"{file.name} cannot be locked ({error.strerror}): see to it that no second run uses {directory}.")
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, NotImplementedError):  # a user without a name, a system without users
        return f"user {path.stat().st_uid}"
