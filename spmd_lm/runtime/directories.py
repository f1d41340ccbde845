"""Directories that appear atomically, and directories that only one run at a time writes to.

The first are filled under a temporary name and renamed at the end.  For the second, a process locks the file `.lock`
(flock) and writes its name there.  The lock ends with the process; a file that stays behind locks nothing."""

import errno
import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TextIO

from spmd_lm.errors import ConfigError
from spmd_lm.files import open_regular, read_bytes
from spmd_lm.runtime.signals import STOP_SIGNALS, handle_signals, not_ignored

MAX_NAME = 1000  # bytes of `.lock`
LONGEST_INSIDE = 256  # bytes of a path within a run's directory


def require_absent_or_empty(target: Path) -> None:
    """Raises ConfigError if `target` exists and is not an empty directory."""
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigError(f"{target}: exists and is not a directory. Choose another name.")
    try:
        entries = sorted(os.listdir(target)) if target.exists() else []
    except OSError as error:
        raise ConfigError(f"{target}: cannot be read: {error.strerror}. Choose another name.") from error
    if entries:
        what = f"{target}: exists and is not empty (it contains {entries[0]})"
        raise ConfigError(f"{what}. Nothing is overwritten; choose another name.")


@contextmanager
def remove_if_empty(directory: Path) -> Iterator[None]:
    """After the block, removes the directory and its parents if they are empty and new."""
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary directory, renamed to `target` at the end of the block.  If the block fails or a signal stops
    it, that directory and its new parents are removed.  Raises ConfigError if `target` is not absent or empty, before
    or after the block, and for any OSError in the block."""
    require_absent_or_empty(target)
    final = target.resolve()
    temporary = final.with_name(f".{final.name:.100}.{secrets.token_hex(4)}")
    with handle_signals(not_ignored(*STOP_SIGNALS), _exit), remove_if_empty(final.parent):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            require_absent_or_empty(target)
            os.rename(temporary, final)
        except OSError as error:
            what = f"{error.filename or target}: {error.strerror}. {target} was not created"
            raise ConfigError(f"{what}: free some space, change the permissions, or choose another name.") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # already gone if it was renamed


def _exit(number: int, _: FrameType | None) -> None:
    """Turns the signal into an exception, so that cleanup runs."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def lock_directory(
    directory: Path, log: Callable[[str], None], is_first_process: bool, key: str = "run.dir"
) -> Iterator[None]:
    """Creates the directory and keeps other runs out during the block; the job's first process locks for all.  A file
    system without locks gets only a `log` line.  key: the directory's name in messages.  Raises ConfigError if another
    run holds it or it cannot be written.  At the end, removes the lock file and new empty directories."""
    with remove_if_empty(directory):
        while True:
            with _open_lock_file(directory, key) as file:
                if is_first_process:
                    _lock(file, directory, log, key)
                    if not os.path.exists(file.name) or not os.path.samefile(file.name, file.fileno()):
                        continue  # its former holder removed it between our open and our lock
                try:
                    yield
                finally:
                    if is_first_process:
                        with suppress(OSError):  # another run's, if the directory was moved and made again
                            if os.path.samefile(file.name, file.fileno()):
                                os.unlink(file.name)
                return


def is_locked(directory: Path) -> bool:
    try:
        with open(directory / ".lock", opener=open_regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # none, or a file system without locks
        return False
    return False


def was_killed(directory: Path) -> bool:
    """True if the lock's last holder, on this host, ended without removing its lock file."""
    return f" on {socket.gethostname()} since " in lock_holder(directory) and not is_locked(directory)


def lock_holder(directory: Path) -> str:
    """Contents of the lock file: its present or last holder's pid, host and time of locking; '' if none."""
    try:
        return read_bytes(directory / ".lock", MAX_NAME).decode(errors="replace").strip()
    except OSError:
        return ""


def _open_lock_file(directory: Path, key: str) -> TextIO:
    """Creates the directory and opens its `.lock`.  Raises ConfigError if it, or checkpoints/, is not writable."""
    most = os.pathconf("/", "PC_PATH_MAX") - LONGEST_INSIDE
    if (length := len(os.fsencode(directory.absolute()))) > most:
        what = f"{key}={directory!s:.40}..: its path has {length:,} bytes, of at most {most:,}"
        raise ConfigError(f"{what}: files in it could not be opened. Choose another {key}.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory, directory / "checkpoints"):
            if os.path.exists(path):
                tempfile.TemporaryFile(dir=path).close()
        return open(directory / ".lock", "a+", encoding="utf-8", errors="replace", opener=open_regular)
    except OSError as error:
        raise ConfigError(_why_unwritable(directory, key, error)) from error


def _why_unwritable(directory: Path, key: str, error: OSError) -> str:
    if error.filename == str(directory / ".lock") and error.errno in (errno.ELOOP, errno.EINVAL):  # no regular file
        return f"{error.filename}: cannot be written: {error.strerror}. Choose another {key}, or remove that file."
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        return f"{key}={directory}: {existing} is no directory. Choose another {key}."
    try:
        owner = existing.owner()
    except (KeyError, NotImplementedError):  # a user without a name, a system without users
        owner = f"user {existing.stat().st_uid}"
    return (
        f"{key}={directory}: cannot be written: {error.strerror}. {existing} belongs to {owner} "
        f"({stat.filemode(existing.stat().st_mode)}). Choose another {key}, or get write permission."
    )


def _lock(file: TextIO, directory: Path, log: Callable[[str], None], key: str) -> None:
    """Locks the file and names this process in it; only logs if it cannot.  Raises ConfigError if another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(MAX_NAME).strip() or "another process"
        what = f"{key}={directory}: {holder} is writing there"
        raise ConfigError(f"{what}. Wait for it, stop it, or choose another {key}.") from None
    except OSError as error:  # some network file systems have no locks
        log(f"{file.name} cannot be locked ({error.strerror}): make sure that no second run uses {directory}.")
        return
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(file.fileno(), 0)
        now = datetime.now(UTC).isoformat()
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
