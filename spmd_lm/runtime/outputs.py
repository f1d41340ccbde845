"""Robust output: the terminal may be closed, and disks may fill up.

Progress lines then stop, and the run continues.  A file that cannot be written is an OutputError."""

import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from spmd_lm.errors import OutputError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline

QUIET_LOGGERS = ("absl", "asyncio", "matplotlib")
"""Loggers without useful information.  Orbax logs the traceback of every thread that a failed save ends, and asyncio
those of its tasks; the first of these errors is raised too, and our code explains it.  Matplotlib reports a cache
outside the home directory."""


class UnfailingStream:
    """A text stream that drops everything after the first error, and raises none."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[..., Any], *arguments: str) -> None:
        try:
            call(*arguments)
        except BlockingIOError:  # a slow reader of a pipe that our parent made non-blocking: only this text is lost
            pass
        except OSError:
            silence(self._stream)
        except ValueError:  # it is closed, or cannot encode the text
            if getattr(self._stream, "closed", True):
                silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def silence(stream: TextIO) -> None:
    """Redirects the stream to /dev/null, including its buffer, which Python would otherwise retry at exit, turning the
    exit code into 120."""
    with suppress(OSError, ValueError):  # it is closed, or no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def unfailing(stream: TextIO) -> TextIO:
    return cast(TextIO, UnfailingStream(stream))


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line at once, if the stream still works."""
    print(escape_controls(line), file=unfailing(stream), flush=True)


def escape_controls(text: str) -> str:
    r"""Escapes control characters, so that text of files, libraries or models cannot steer the terminal: \x1b."""
    return CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class LineFormatter(logging.Formatter):
    """Formats libraries' log records without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        unfailing(stream).flush()


def open_closed_streams() -> None:
    """Opens missing standard streams: a shell may start a process without standard output (`>&-`), and the next opened
    file would take its place.  Writing there then fails harmlessly."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, errors="backslashreplace", closefd=False))  # noqa: SIM115


def quiet_libraries() -> None:
    """Logs libraries' warnings and errors to standard error, except QUIET_LOGGERS', and hides unraisable exceptions
    without information."""
    handler = logging.StreamHandler()
    handler.addFilter(is_heard)
    handler.setFormatter(LineFormatter("%(levelname)s: %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    sys.unraisablehook = report_unraisable


def is_heard(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] not in QUIET_LOGGERS


def report_unraisable(unraisable: Any) -> None:
    """Python's hook, except for Ctrl-C (in a callback of the garbage collector) and for tensorstore's threads: each
    tells orbax that it failed, but orbax has already raised the first one's error."""
    error = unraisable.exc_value
    if not isinstance(error, KeyboardInterrupt) and str(error) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


@contextmanager
def writing(path: Path, size: int | None = None) -> Iterator[None]:
    """Raises OutputError, with advice, if the block cannot write to `path`.  size: required bytes."""
    try:
        yield
    except OSError as error:
        raise OutputError(describe_failure(error, path, size)) from error


def require_replaceable(option: str, path: Path, mark: str) -> None:
    """Raises OutputError, before the work, if the option's file cannot be written, or was not written by an earlier
    command.
    mark: the beginning of such files."""
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise OutputError(f"{option} {path}: cannot be written. Give a file in a writable directory.")
    if not path.exists():
        return
    start = ""
    if path.is_file() and os.access(path, os.R_OK):
        with path.open(errors="replace") as file:
            start = file.read(len(mark))
    if start != mark:
        raise OutputError(
            f"{option} {path}: is there, and not from an earlier {option}. Remove it, or name another file."
        )


def describe_failure(error: OSError, path: Path, size: int | None = None) -> str:
    if not path.parent.is_dir():
        return f"{path}: cannot be written: {path.parent} was moved or removed. Move it back."
    free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    needed = "" if size is None else f", {size:,} are needed"
    remedy = "Make room" if error.errno in NO_ROOM else "Make it writable"
    return f"{path}: cannot be written: {error.strerror or error}. {free}{needed}. {remedy}."
