"""One run per directory: an operating system lock on the directory's file `.lock`, which names the holder.

The lock ends with its process, however that ends; the file that a killed process leaves behind means nothing."""

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import jax

from spmd_lm.errors import ConfigError


@contextmanager
def lock_directory(directory: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Creates the directory and keeps every other run out of it.  ConfigError if another run holds it, or it cannot be
    written.

    At the end the lock file is removed, and so are the created directories if they are empty: a run that is refused
    later leaves no trace."""
    created = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        with _open_locked(directory, log) as file:
            is_first_process = jax.process_index() == 0
            try:
                yield
            finally:
                if is_first_process:
                    with suppress(OSError):
                        os.unlink(file.name)
    finally:
        for path in created:
            with suppress(OSError):  # fails once the run has files
                path.rmdir()


def _open_locked(directory: Path, log: Callable[[str], None]) -> TextIO:
    """The lock file, locked until it is closed."""
    while True:
        file = _open_lock_file(directory)
        if jax.process_index() > 0:  # the first process locks for the whole job
            return file
        try:
            _lock(file, directory, log)
            if os.path.exists(file.name) and os.path.samestat(os.stat(file.name), os.fstat(file.fileno())):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # its former holder removed it between our open and our lock


def _open_lock_file(directory: Path) -> TextIO:
    """Opens the file to lock.  ConfigError if the run cannot write to its directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory, directory / "checkpoints"):
            if os.path.exists(path):
                with tempfile.TemporaryFile(dir=path):
                    pass
        return open(directory / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
        raise ConfigError(
            f"run.dir={directory}: cannot be written: {error.strerror}. {existing} belongs to {_owner(existing)} "
            f"({stat.filemode(existing.stat().st_mode)}). Choose another run.dir, or get write permission."
        ) from error


def _lock(file: TextIO, directory: Path, log: Callable[[str], None]) -> None:
    """Locks the file and writes this process's name into it.  ConfigError if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise ConfigError(
            f"run.dir={directory}: {holder} is training there. Wait for it, stop it, or choose another run.dir."
        ) from None
    except OSError as error:  # some network file systems have no locks
        log(f"{file.name} cannot be locked ({error.strerror}): make sure that no second run uses {directory}.")
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, NotImplementedError):  # a user without a name, a system without users
        return f"user {path.stat().st_uid}"
