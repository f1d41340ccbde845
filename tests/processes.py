"""spmd-lm in processes of its own, as users start it: without the flags that make the suite compile faster.

They are waited for as long as they get on.  How many seconds that takes says how busy the machine is."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

from spmd_lm.errors import Exit

ROOT = Path(__file__).parents[1]
TICKS = os.sysconf("SC_CLK_TCK")

STALLED_SECONDS = 120
"""A process that takes less than a second of CPU time in these hangs."""
MOST_CPU_SECONDS = 1800
"""A process that takes more is in an endless loop."""

# For several processes of a job: only the first finds its program in the suite's cache, and gives up when the others,
# which compile it, are not there after 30 s.
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "0"}


@contextmanager
def handled(number: signal.Signals, handler):
    """Sets a handler of a signal, which a background job's shell or nohup may have set, and restores it."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(*arguments: str | Path, **environment: str) -> subprocess.Popen:
    """Starts `spmd-lm` with these arguments."""
    return start_command([sys.executable, "-m", "spmd_lm", *arguments], stderr=subprocess.PIPE, **environment)


def start_command(
    command: list[str | Path], cwd: Path = ROOT, stderr: int = subprocess.STDOUT, **environment: str
) -> subprocess.Popen:
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=inherited | environment, **pipes)


def family(*pids: int) -> dict[int, float]:
    """CPU seconds of these processes and all their descendants, with those of children that they have waited for.  A
    session is that of the process that began it, which may have ended.  Empty without /proc."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    found: dict[int, float] = {}
    new = [pid for pid, fields in stats.items() if pid in pids or int(fields[3]) in pids]
    while new:
        found |= {pid: sum(map(int, stats[pid][11:15])) / TICKS for pid in new}
        new = [pid for pid, fields in stats.items() if pid not in found and int(fields[1]) in found]
    return found


class Progress:
    """Progress of processes and their descendants, by CPU time: however busy the machine is, they get some."""

    def __init__(self, *pids: int):
        self.pids = pids
        self.checked = self.since = time.monotonic()
        self.first = self.last = sum(family(*pids).values())

    def problem(self) -> str:
        """The reason to wait no longer; empty if there is none.  Looks once a second."""
        now = time.monotonic()
        if now < self.checked + 1:
            return ""
        self.checked, used = now, sum(family(*self.pids).values())
        if abs(used - self.last) >= 1:  # less: a process has ended, and nobody waited for it
            self.since, self.last = now, used
        if used - self.first > MOST_CPU_SECONDS:
            return f"no end after {used - self.first:.0f} s of CPU time"
        return f"no CPU time for {now - self.since:.0f} s" if now - self.since > STALLED_SECONDS else ""


def kill(*pids: int) -> None:
    for pid in family(*pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(happened: Callable[[], object], *processes: subprocess.Popen, told: Callable[[], str] = str) -> None:
    """Waits until this is true, as long as one of the processes lives and makes progress.  told: what they said."""
    pids = [process.pid for process in processes]
    progress = Progress(*pids)
    while not happened():
        assert any(process.poll() is None for process in processes) or happened(), f"all have ended: {told()}"
        if problem := progress.problem():
            kill(*pids)
            raise AssertionError(f"{problem}: {told()}")
        time.sleep(0.01)


def exit_codes(*processes: subprocess.Popen) -> list[int]:
    """Waits until all have ended.  Their output goes to files, or is less than a pipe holds."""
    wait_until(lambda: all(process.poll() is not None for process in processes), *processes)
    return [process.returncode for process in processes]


def communicate(process: subprocess.Popen) -> tuple:
    """Standard output and standard error, once they are closed."""
    progress = Progress(process.pid)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=1)
        if problem := progress.problem():
            kill(process.pid)
            raise AssertionError(f"{process.args}: {problem}: {process.communicate()}")


def finish(command: list[str | Path], **options: object) -> subprocess.CompletedProcess:
    """subprocess.run with its output captured as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **(pipes | options))
    output, error = communicate(process)
    return subprocess.CompletedProcess(command, process.returncode, output, error)


def wait(*processes: subprocess.Popen, code: Exit = Exit.DONE) -> list[str]:
    """Waits until all have ended with this exit code, and returns the standard output of each."""
    outputs = [communicate(process) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return [output for output, _ in outputs]


def run(*arguments: str | Path) -> str:
    return wait(start(*arguments))[0]
