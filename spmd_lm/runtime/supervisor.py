"""Restarts a command that exits with a restartable code, or is killed; with backoff, and not forever.

The command runs in a session of its own: signals to the supervisor are passed on once, and end it with the command."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from spmd_lm.errors import Exit
from spmd_lm.runtime.formatting import format_duration, pluralize
from spmd_lm.runtime.processes import PARENT
from spmd_lm.runtime.signals import STOP_SIGNALS, handle_signals, name_of_signal, not_ignored

RESTARTABLE = {Exit.PREEMPTED: "preempted", Exit.HANG: "a step hung", Exit.PEER_LOST: "another process was gone"}
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before a restart; they double
CHECK_SECONDS = 0.5
STOPPED_SECONDS = 30.0  # a process stopped for longer, by SIGSTOP or a debugger, is killed


class Supervisor:
    """saved_steps: returns the number of steps saved so far.
    attempts: most consecutive restarts without new ones."""

    def __init__(
        self, command: Sequence[str], saved_steps: Callable[[], int], attempts: int, log: Callable[[str], None]
    ):
        self._command, self._saved_steps, self._attempts, self._log = command, saved_steps, attempts, log
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None  # the first one received

    def run(self) -> int:
        """The exit code of the last start; 128 + the signal that killed it."""
        with handle_signals(not_ignored(*STOP_SIGNALS), self._pass_on):
            failures, saved = 0, self._saved_steps()
            while True:
                started = time.monotonic()
                code = self._run_once()
                reason = restart_reason(code)
                if not reason or self._signal is not None:
                    return shell_code(code)
                before, saved = saved, self._saved_steps()
                failures = 1 if saved > before else failures + 1
                lasted = format_duration(time.monotonic() - started)
                ended = f"{reason} after {lasted}, with {pluralize(saved, 'step')} saved"
                if failures > self._attempts:
                    self._log(f"{ended}: no progress in {pluralize(self._attempts, 'restart')}, so giving up.")
                    return shell_code(code)
                wait = min(FIRST_WAIT * 2 ** (failures - 1), LONGEST_WAIT)
                self._log(f"{ended}. Starting again in {format_duration(wait)}.")
                deadline = time.monotonic() + wait
                while self._signal is None and time.monotonic() < deadline:  # no lock: a second signal may come
                    time.sleep(min(wait, CHECK_SECONDS))
                if self._signal is not None:
                    return int(Exit.INTERRUPTED if self._signal == signal.SIGINT else Exit.PREEMPTED)

    def _run_once(self) -> int:
        """The exit code of one start; negative if a signal killed it."""
        environment = os.environ | {PARENT: str(os.getpid())}
        self._process = subprocess.Popen(self._command, env=environment, start_new_session=True)
        if self._signal is not None:  # it came before the process existed
            self._process.send_signal(self._signal)
        stopped = 0.0
        while True:
            try:
                return self._process.wait(CHECK_SECONDS)
            except subprocess.TimeoutExpired:
                stopped = stopped + CHECK_SECONDS if is_stopped(self._process.pid) else 0.0
            if stopped >= STOPPED_SECONDS:
                self._log(f"process {self._process.pid} was stopped for {format_duration(stopped)}: killed.")
                self._process.kill()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def restart_reason(code: int) -> str:
    """The reason to restart a command that exited with this code, or was killed by signal -code; '' if none."""
    if code < 0:
        return f"killed by {name_of_signal(-code)}"
    return next((reason for restartable, reason in RESTARTABLE.items() if code == restartable), "")


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, according to /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return False
    return state.startswith(("T", "t"))
