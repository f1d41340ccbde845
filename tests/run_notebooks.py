"""Runs notebooks/ from top to bottom, as a reader would, each in a kernel and a copy of the repository of its own:
`make notebooks`.

    python -m tests.run_notebooks             all of them, two at a time
    python -m tests.run_notebooks --part 1/2  every second one, from the second on

A notebook passes if no cell raises, and some cell shows a picture.  It may take as long as it gets on."""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from tests.processes import ROOT, Progress

PATIENT = {"startup_timeout": 3600, "iopub_timeout": 3600}  # seconds: `execute` looks whether there is progress

# As in tests/conftest.py: most of the time goes to compiling, and what LLVM optimizes changes no collective.
ENVIRONMENT = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
}


def copy_repository(to: Path) -> None:
    """Copies the files of the working tree that git tracks or would track."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes((ROOT / name).read_bytes())


async def execute(client: NotebookClient) -> None:
    """Raises TimeoutError once the kernel, the only child process, makes no progress."""
    running, progress = asyncio.ensure_future(client.async_execute(cleanup_kc=True)), Progress(os.getpid())
    while not (await asyncio.wait([running], timeout=5))[0]:
        if problem := progress.problem():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise TimeoutError(problem)
    await running


def run(path: Path) -> str | None:
    """Runs a notebook; returns its error, or None."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    with tempfile.TemporaryDirectory() as folder:
        copy_repository(Path(folder))
        where = {"metadata": {"path": str(Path(folder, path.parent.name))}}
        # Over sockets beside the connection file: no port, which another program may have.
        connection = str(Path(folder, "kernel.json"))
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=connection)
        try:
            client = NotebookClient(notebook, km=kernel, resources=where, timeout=None, **PATIENT)
            asyncio.run(execute(client))
        except (CellExecutionError, DeadKernelError, TimeoutError) as error:
            return str(error)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return None if any("image/png" in output.get("data", {}) for output in outputs) else "no cell shows a picture"


def report(path: Path) -> bool:
    """Runs a notebook and prints the outcome; True if it passed."""
    start = time.perf_counter()
    problem = run(path)
    print(f"{path.name:32} {time.perf_counter() - start:4.0f} s  {problem or 'passed'}", flush=True)
    return problem is None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", metavar="K/N", default="0/1", help="run every N-th notebook, from the K-th on")
    parser.add_argument("--workers", type=int, metavar="N", default=2, help="notebooks that run at once")
    arguments = parser.parse_args()
    first, step = map(int, arguments.part.split("/"))
    os.environ.update(ENVIRONMENT)
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))[first::step]
    with ProcessPoolExecutor(arguments.workers) as pool:  # the last ones take longest, so they start first
        return 0 if all([*pool.map(report, reversed(paths))]) else 1


if __name__ == "__main__":
    sys.exit(main())
