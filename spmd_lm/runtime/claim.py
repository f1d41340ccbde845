"""One run to a directory: a lock on its file `.lock`, in which stands who holds it.

The lock is the operating system's and ends with the process, however that ends; the file stays and means nothing."""

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import jax

from spmd_lm.errors import ConfigError


@contextmanager
def claimed(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps every other run out of the directory.  Raises ConfigError before minutes go into compiling."""
    with open_lock(directory) as file:
        if jax.process_index() == 0:  # for the whole job
            lock(file, directory, say)
        yield


def open_lock(directory: Path) -> TextIO:
    """The file to lock; ConfigError if the run cannot write in its directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for place in (directory, directory / "checkpoints"):
            if place.exists():
                with tempfile.TemporaryFile(dir=place):
                    pass
        return open(directory / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
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
