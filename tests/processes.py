"""spmd-lm in processes of its own, as users start it: without the flags that make the suite compile faster."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from spmd_lm.errors import Exit

ROOT = Path(__file__).parents[1]

# For several processes of a job: only the first finds its program in the suite's cache, and gives up when the others,
# which compile it, are not there after 30 s.
UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "0"}


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


def wait(*processes: subprocess.Popen, code: Exit = Exit.DONE) -> list[str]:
    """Waits until all have ended with this exit code, and returns the standard output of each."""
    outputs = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return [output for output, _ in outputs]


def run(*arguments: str | Path) -> str:
    return wait(start(*arguments))[0]
