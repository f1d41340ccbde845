"""A directory that appears complete or not at all: it is filled under a temporary name, and renamed at the end."""

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from spmd_lm.errors import ConfigError


def require_absent_or_empty(target: Path) -> None:
    """Raises ConfigError if `target` exists and is not an empty directory."""
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigError(f"{target}: exists and is not a directory. Choose another name.")
    try:
        entries = sorted(target.iterdir()) if target.exists() else []
    except OSError as error:
        raise ConfigError(f"{target}: cannot be read: {error.strerror}. Choose another name.") from error
    if entries:
        raise ConfigError(
            f"{target}: exists and is not empty (it contains {entries[0].name}). Nothing is overwritten; choose "
            f"another name."
        )


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A temporary directory to fill, which is renamed to `target` at the end of the block.

    If the block fails, or is stopped by Ctrl-C or SIGTERM, the directory and the parents created for it are removed.
    Raises ConfigError if `target` exists and is not empty, before or after the block, or cannot be written."""
    require_absent_or_empty(target)
    final = target.resolve()
    new_parents = [path for path in final.parents if not path.exists()]
    temporary = final.with_name(f".{final.name:.100}.{secrets.token_hex(4)}")
    with ExitStack() as cleanup, _signals_raise():
        for path in reversed(new_parents):
            cleanup.callback(_remove_if_empty, path)
        try:
            temporary.mkdir(parents=True)
            cleanup.callback(shutil.rmtree, temporary, ignore_errors=True)  # gone already, once it is renamed
            yield temporary
            require_absent_or_empty(target)
            os.rename(temporary, final)
        except OSError as error:
            path = error.filename or target
            raise ConfigError(
                f"{path}: {error.strerror}. {target} was not created: free some space, change the permissions, or "
                f"choose another name."
            ) from error


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):  # not empty
        path.rmdir()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """In the block, Ctrl-C and SIGTERM raise exceptions, so that cleanup runs."""

    def stop(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)  # as a shell reports it

    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                previous[number] = handler
    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
