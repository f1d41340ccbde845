"""launch/slurm.sbatch under a SLURM of this machine's own, with two virtual nodes: `make test-slurm`."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(
        not shutil.which("slurmctld"), reason="no slurmctld here: make test-slurm INSTALL=1 installs it"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons need root"),
]
SCRIPT = processes.ROOT / "launch" / "slurm.sbatch"
STEPS = 40

# No munge, so no key; a requeued job waits until its credentials have expired.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/ctld.log
SlurmdLogFile={root}/slurmd.%n.log
SlurmctldPort={port}
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 State=UNKNOWN
PartitionName=low Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[0-1] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A cluster in a directory: its configuration, logs and jobs' output."""

    def __init__(self, root: Path):
        self.root = root
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"SLURM_CONF": str(root / "slurm.conf"), "PATH": path, "PYTHONPATH": str(processes.ROOT)}
        self.environment = os.environ | processes.UNCACHED | own

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(command, env=self.environment, cwd=processes.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def wait_until_idle(self) -> None:
        """Both nodes are in both partitions."""
        command, end = ["sinfo", "--noheader", "--Node", "--format=%T"], time.monotonic() + 60
        while True:
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
            if done.stdout.split() == ["idle"] * 4:
                return
            logs = [path.read_text()[-2000:] for path in self.root.glob("*.log")]
            assert time.monotonic() < end, (done.stdout, done.stderr, *logs)
            time.sleep(0.5)

    def submit(self, *arguments: str | Path) -> str:
        """The new job's number."""
        return self.run("sbatch", "--parsable", f"--output={self.root}/%j.log", *arguments)

    def job(self, number: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def log(self, number: str) -> str:
        path = self.root / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, number: str, what: Callable[[dict[str, str]], bool], seconds: float = 240) -> dict[str, str]:
        """Waits until this holds of the job."""
        end = time.monotonic() + seconds
        while not what(job := self.job(number)):
            assert time.monotonic() < end, (job, self.log(number))
            time.sleep(0.5)
        return job

    def wait_for_log(self, number: str, text: str) -> None:
        self.wait(number, lambda job: text in self.log(number))


def in_state(*states: str) -> Callable[[dict[str, str]], bool]:
    return lambda job: job["JobState"] in states


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    (slurm.root / "state").mkdir()
    port = processes.free_port()
    ports = {"port": port, "first": port + 1, "last": port + 2}
    (slurm.root / "slurm.conf").write_text(CONF.format(root=slurm.root, host=socket.gethostname(), **ports))
    commands = [["slurmctld", "-D"], ["slurmd", "-D", "-N", "n0"], ["slurmd", "-D", "-N", "n1"]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [subprocess.Popen(command, env=slurm.environment, **quiet) for command in commands]
    try:
        slurm.wait_until_idle()
        yield slurm
    finally:
        subprocess.run(["scancel", "--signal=KILL", "--user=root"], env=slurm.environment)
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def train(directory: Path, *overrides: str) -> list[str | Path]:
    config = [SCRIPT, "train", "configs/debug.yaml", "--devices", "8", f"run.dir={directory}", "model.layers=2"]
    return [*config, "checkpoint.every=0", f"train.steps={STEPS}", "optim.decay_steps=40", *overrides]


def losses(directory: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return {record["step"]: record["loss"] for record in records}


def status(directory: Path) -> dict:
    return json.loads((directory / "status.json").read_text())


def test_a_preempted_job_is_requeued_and_ends_as_if_it_had_not_been(slurm, tmp_path):
    number = slurm.submit(*train(tmp_path / "preempted"))
    slurm.wait_for_log(number, "step 5/")
    slurm.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    slurm.wait(number, lambda job: job["Restarts"] == "1")
    assert status(tmp_path / "preempted")["state"] == "preempted" and "saved" in slurm.log(number)

    whole = slurm.submit(*train(tmp_path / "whole"))  # while the requeued job waits
    job = slurm.wait(number, in_state("COMPLETED", "FAILED"))
    assert (job["JobState"], job["ExitCode"], status(tmp_path / "preempted")["restarts"]) == ("COMPLETED", "0:0", 1)
    slurm.wait(whole, in_state("COMPLETED"))
    assert losses(tmp_path / "preempted") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == STEPS


def test_a_cancelled_job_saves_and_stays_cancelled(slurm, tmp_path):
    number = slurm.submit(*train(tmp_path / "run", "train.steps=100000"))
    slurm.wait_for_log(number, "step 3/")
    slurm.run("scancel", number)
    job = slurm.wait(number, in_state("CANCELLED"))
    slurm.wait(number, lambda job: "saved. The same command" in slurm.log(number))
    time.sleep(3)
    assert slurm.job(number)["JobState"] == "CANCELLED" and job["Restarts"] == "0"
    step = status(tmp_path / "run")["step"]
    assert status(tmp_path / "run")["state"] == "preempted" and step >= 3
    assert (tmp_path / "run" / "checkpoints" / str(step) / "commit_success.txt").exists()


def test_a_sweep_goes_through_slurm_and_may_be_left_alone(slurm, tmp_path):
    """Four cells on one node each; the sweep is stopped while they are queued, and the next one waits for the same
    jobs."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "slurm.sbatch").write_text(SCRIPT.read_text().replace("--nodes=2", "--nodes=1"))
    (tmp_path / "sweep.yaml").write_text(
        f"name: queued\nconfig: {processes.ROOT}/configs/debug.yaml\n"
        "grid: {parallel.zero: [0, 1, 2, 3], run.simulate_devices: 2, model.layers: 1, train.steps: 6}\n"
    )
    command = [sys.executable, "-m", "spmd_lm", "sweep", "sweep.yaml", "--submit", "slurm"]
    pipes = {"env": slurm.environment, "cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, stderr=subprocess.STDOUT, **pipes)
    for _ in range(4):
        assert "starting on SLURM" in first.stdout.readline()
    first.terminate()
    assert first.wait(30) == 3 and "4 cells stay in the queue of SLURM" in first.stdout.read()
    cells = tmp_path / "runs/sweeps/queued/cells"
    jobs = {path.parent.name: path.read_text() for path in cells.glob("*/slurm_job")}
    assert sorted(jobs) == ["zero-0", "zero-1", "zero-2", "zero-3"]

    second = subprocess.run(command, timeout=400, stderr=subprocess.STDOUT, **pipes)
    assert second.returncode == 0 and "(4 of 4 done)" in second.stdout, second.stdout
    assert {path.parent.name: path.read_text() for path in cells.glob("*/slurm_job")} == jobs
    last = [losses(cell)[6] for cell in cells.iterdir()]
    assert max(last) - min(last) < 1e-4 and all(status(cell)["restarts"] == 0 for cell in cells.iterdir())
