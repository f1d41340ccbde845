"""A directory that appears whole, or not at all: filled beside its place under another name, and renamed when it is
whole."""

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


def refuse_taken(target: Path) -> None:
    """Raises ConfigError if there is anything at `target` but an empty directory."""
    if os.path.lexists(target) and not target.is_dir():
        raise ConfigError(f"{target}: is there, and no directory. Choose another name.")
    try:
        first = next(iter(sorted(target.iterdir())), None) if target.exists() else None
    except OSError as error:
        raise ConfigError(f"{target}: cannot be read: {error.strerror}. Choose another name.") from error
    if first is not None:
        raise ConfigError(f"{target}: is there, with {first.name} in it, and nothing is written over. Choose another.")


@contextmanager
def fresh(target: Path) -> Iterator[Path]:
    """A new directory to fill, which becomes `target` at the end of the block.

    What ends the block early, an interrupt or SIGTERM included, removes it, with what was made to hold it.  Raises
    ConfigError if `target` is taken, now or by then, or cannot be written."""
    refuse_taken(target)
    place = target.resolve()
    made = [path for path in place.parents if not path.exists()]
    filling = place.with_name(f".{place.name:.100}.{secrets.token_hex(4)}")
    with ExitStack() as afterwards, stoppable():
        for path in reversed(made):
            afterwards.callback(_unless_impossible, path)
        try:
            filling.mkdir(parents=True)
            afterwards.callback(shutil.rmtree, filling, ignore_errors=True)  # after the rename there is none
            yield filling
            refuse_taken(target)
            os.rename(filling, place)
        except OSError as error:
            where = error.filename or target
            raise ConfigError(
                f"{where}: {error.strerror}. Nothing was made of {target}: make room, mend it, or choose another place."
            ) from error


def _unless_impossible(path: Path) -> None:
    with suppress(OSError):  # something is in it
        path.rmdir()


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM are exceptions, so that what was begun can be cleared away."""

    def stop(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)  # as a shell calls it

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
