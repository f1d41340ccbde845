"""Processes of one job: one is killed or stopped, and the others leave with a code that says so, within 30 s.
Supervised, all start again, and the run is the one that nobody disturbed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_lm.errors import Exit
from tests import processes

RUN = ["train", "configs/debug.yaml", "--devices", "4", "model.layers=1", "train.log_every=1", "checkpoint.every=10"]
WATCHFUL = ["train.watchdog.minimum=5", "train.watchdog.factor=3"]


class Job:
    """Two processes of one job, each with its own output."""

    def __init__(self, directory: Path, *overrides: str, before: tuple[str, ...] = ()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.directory, self.outputs = directory, [directory.with_suffix(f".{number}") for number in range(2)]
        command = [sys.executable, "-u", "-m", "spmd_lm", *before, *RUN, f"run.dir={directory}", *overrides]
        self.processes = []
        for number, output in enumerate(self.outputs):
            job = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
            with open(output, "w") as file:
                process = subprocess.Popen(
                    command, cwd=processes.ROOT, env=os.environ | job, stdout=file, stderr=subprocess.STDOUT
                )
            self.processes.append(process)

    def wait_for(self, text: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.outputs[0].read_text():
            assert time.monotonic() < deadline, self.outputs[0].read_text()
            assert any(process.poll() is None for process in self.processes), self.outputs[0].read_text()
            time.sleep(0.1)

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


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_seen_by_the_other(tmp_path, victim):
    with Job(tmp_path / "run", "train.steps=100000") as job:
        job.wait_for("step 12/")
        job.processes[victim].kill()
        assert job.processes[1 - victim].wait(30) == Exit.PEER_LOST
        assert "another process of the job is gone" in job.outputs[1 - victim].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named(tmp_path, victim):
    with Job(tmp_path / "run", "train.steps=100000", *WATCHFUL) as job:
        job.wait_for("step 12/")
        job.processes[victim].send_signal(signal.SIGSTOP)
        assert job.processes[1 - victim].wait(30) == Exit.HANG
        output = job.outputs[1 - victim].read_text()
        assert "Current thread" in output or "Thread 0x" in output  # the stacks
        assert ("process 0 does not answer" if victim == 0 else "process 1 (last step") in output


def child(process: subprocess.Popen) -> int:
    """Of a supervisor, once it has one."""
    while True:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            if pids := (task / "children").read_text().split():
                return int(pids[0])
        time.sleep(0.1)


@pytest.mark.slow
def test_supervised_processes_start_again(tmp_path):
    """One is killed, then the other."""
    with Job(tmp_path / "alone", "train.steps=40") as alone:
        assert [process.wait(120) for process in alone.processes] == [0, 0]
    with Job(tmp_path / "run", "train.steps=40", before=("supervise", "--")) as job:
        for victim, step in ((1, 15), (0, 25)):
            job.wait_for(f"step {step}/")
            os.kill(child(job.processes[victim]), signal.SIGKILL)
        assert [process.wait(240) for process in job.processes] == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["restarts"] == 2 == status["recovery"]["count"]
    assert status["goodput"]["idle"] > 0
