"""Jobs of two processes, started by hand to see each exit code; and what their runs have logged."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests import processes

RUN = [
    "train",
    str(processes.ROOT / "configs/debug.yaml"),
    "--devices",
    "4",
    "model.layers=1",
    "train.log_every=1",
    "checkpoint.every=10",
]


class Job:
    """A job of two processes, each with its own output.  program: Python, in place of the command line's.  apart:
    each sees an own run.dir."""

    def __init__(
        self,
        directory: Path,
        *overrides: str,
        before: tuple[str, ...] = (),
        program: str = "",
        apart: bool = False,
        **environment: str,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.directory, self.outputs = directory, [directory.with_suffix(f".{number}") for number in range(2)]
        start = ["-c", program] if program else ["-m", "spmd_lm"]
        run_dir = directory.name if apart else directory
        command = [sys.executable, "-u", *start, *before, *RUN, f"run.dir={run_dir}", *overrides]
        self.processes = []
        for number, output in enumerate(self.outputs):
            job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
            if apart:
                (cwd := directory / str(number)).mkdir(parents=True)
            with open(output, "w") as file:
                process = subprocess.Popen(
                    command,
                    cwd=cwd if apart else processes.ROOT,
                    env=os.environ | job | environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def wait_for(self, text: str) -> None:
        read = self.outputs[0].read_text
        processes.wait_until(lambda: text in read(), *self.processes, told=read)

    def exit_codes(self) -> list[int]:
        return processes.exit_codes(*self.processes)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def losses(directory: Path) -> list[tuple]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def child(process: subprocess.Popen) -> int:
    """A supervisor's child, once it has one."""
    while True:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if pids := (task / "children").read_text().split():
                return int(pids[0])
        time.sleep(0.1)
