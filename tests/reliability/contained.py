"""`spmd-lm` in this process, within limits: of time, of memory, and of where it writes.

An audit hook cannot be removed, so there is one, which is deaf outside of `watching`.  It hears Python alone: what
orbax's C++ writes shows in the working directory, which has to stay empty."""

import contextlib
import faulthandler
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spmd_lm.cli import main
from spmd_lm.data.tokenizers import trial
from spmd_lm.errors import Exit
from spmd_lm.runtime.outputs import CONTROL_CHARACTERS

SECONDS, BYTES = 10, 2 * 2**30
CODES = {int(code) for code in Exit}

WRITES = {  # audit events, and which of their arguments are paths
    "os.mkdir": [0],
    "os.rename": [0, 1],
    "os.remove": [0],
    "os.rmdir": [0],
    "os.link": [1],
    "os.symlink": [1],
    "os.truncate": [0],
    "os.chmod": [0],
    "os.chown": [0],
    "os.utime": [0],
    "os.setxattr": [0],
    "os.removexattr": [0],
}
RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pickle.find_class")
"""Calls that reading a file must never lead to, except TRIAL, to which a tokenizer.json is given to try."""
TRIAL = [sys.executable, "-P", trial.__file__]


@dataclass
class Watch:
    """roots: where may be written; None while nobody watches.  seen: what happened elsewhere."""

    roots: tuple[str, ...] | None = None
    seen: list[str] = field(default_factory=list)

    def hear(self, event: str, arguments: tuple) -> None:
        if self.roots is None:
            return
        if event == "open":
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                self._check(event, path)
        elif event in WRITES:
            for index in WRITES[event]:
                self._check(event, arguments[index])
        elif (event in RUNS or event.startswith("socket.connect")) and TRIAL not in arguments:
            self.seen.append(f"{event}{arguments!r:.200}")

    def _check(self, event: str, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):  # a file that is open already
            return
        where = os.path.abspath(os.fsdecode(path))
        if where != os.devnull and "__pycache__" not in where and not where.startswith(self.roots):
            self.seen.append(f"{event} {where}")


WATCH = Watch()
sys.addaudithook(WATCH.hear)


@contextlib.contextmanager
def watching(*roots: Path) -> Iterator[None]:
    """Fails after the block if something was written outside of `roots`, or ran."""
    WATCH.roots, WATCH.seen = tuple(f"{root}" for root in roots), []
    try:
        yield
    finally:
        WATCH.roots = None
    assert not WATCH.seen, WATCH.seen


class Hang(BaseException):
    """Passes every `except Exception`."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raises Hang after six times SECONDS, in which other tests run too; if the interpreter does not get to it, the
    process ends.  MemoryError beyond BYTES."""

    is_over = False

    def hang(*_: object) -> None:
        if not is_over:
            raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, hard))
    faulthandler.dump_traceback_later(9 * SECONDS, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    try:
        yield
    finally:
        is_over = True  # a signal that comes now must not keep what follows from being done
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def run(*line: object, limited: bool = True) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of one command line, which behaves, whatever it is given.

    limited: what starts jax's devices, or compiles, takes more time, and address space for its threads."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace")]
    start, problem = time.thread_time(), ""
    with (
        limits() if limited else contextlib.nullcontext(),
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        try:
            code = main([os.fspath(each) if isinstance(each, Path) else str(each) for each in line])
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        except (Hang, Exception):
            code, problem = -1, traceback.format_exc(limit=-8)
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    what = f"spmd-lm {' '.join(map(str, line))}: {code}\n{err[-2000:]}\n{problem}"
    assert not problem and code in CODES, what
    assert "Traceback" not in out + err, what
    assert not CONTROL_CHARACTERS.search(err), repr(what)
    assert code == 0 or err.strip() or (code == Exit.CHECK_FAILED and out.strip()), what
    assert not limited or time.thread_time() - start < SECONDS, what
    return code, out, err
