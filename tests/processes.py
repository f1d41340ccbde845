"""Runs in processes of their own, as users start them: without the flags by which the suite compiles faster."""

import os
import subprocess
import sys
from pathlib import Path

from spmd_lm.errors import Exit

ROOT = Path(__file__).parents[1]


def started(*line: str | Path, **environment: str) -> subprocess.Popen:
    """`spmd-lm` with this line, under way."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.Popen(
        [sys.executable, "-m", "spmd_lm", *line],
        cwd=ROOT,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*processes: subprocess.Popen, code: Exit = Exit.DONE) -> list[str]:
    """What each of them wrote to its standard output, once all have ended with this exit code."""
    said = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return [output for output, _ in said]


def run(*line: str | Path) -> str:
    return ended(started(*line))[0]
