"""Runs another program, which may be missing, hang, or print too much."""

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from spmd_lm.runtime.outputs import escape_controls

MOST_OUTPUT = 1_000_000  # bytes of output; SLURM prints a tenth for 10,000 jobs


def ask(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit code, and stdout and stderr as one text.  Raises OSError, the reason in `strerror`, if it cannot start,
    takes longer than `seconds`, or prints too much."""
    null, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=both, start_new_session=True)
    answers: list[tuple[int, bytes]] = []

    def read() -> None:
        assert process.stdout is not None
        text = process.stdout.read(MOST_OUTPUT)
        answers.append((0 if len(text) == MOST_OUTPUT else process.wait(), text))

    thread = threading.Thread(target=read, daemon=True)  # no signal ends a process that hangs in a driver
    thread.start()
    thread.join(seconds)
    code, text = answers[0] if answers else (0, None)
    if text is not None and len(text) < MOST_OUTPUT:
        return code, escape_controls(text.decode(errors="replace"))
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if text is not None:
        raise OSError(errno.EFBIG, f"it says more than {MOST_OUTPUT:,} bytes", command[0])
    raise TimeoutError(errno.ETIMEDOUT, f"it does not end in {seconds:g} s", command[0])
