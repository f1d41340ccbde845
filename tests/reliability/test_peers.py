"""Processes of one job: one is killed or stopped, and the others leave with a code that says so, within 30 s.
Supervised, all start again, and the run is the one that nobody disturbed."""

import json
import os
import signal
import time

import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.errors import Exit
from tests.reliability.jobs import Job, child, losses

WATCHFUL = ["train.watchdog.minimum=8", "train.watchdog.factor=3"]
# jax calls a stopped process dead 7.5 to 15 s later, for it sends a heartbeat every half of HEARTBEAT_SECONDS; the
# watchdog takes up to 11.5 s to name it.
SLOW_HEARTBEATS = (
    "import spmd_lm.cli, spmd_lm.runtime.processes as p, sys; p.HEARTBEAT_SECONDS = 60; sys.exit(spmd_lm.cli.main())"
)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", ["in a step", "in a save"])
def test_a_killed_process_is_seen_by_the_other(tmp_path, victim, moment):
    run = tmp_path / "run"
    with Job(run, "train.steps=100000") as job:
        job.wait_for("step 12/")
        while moment == "in a save" and not [*(run / "checkpoints").glob("*.saving")]:
            time.sleep(0.001)
        job.processes[victim].kill()
        assert job.processes[1 - victim].wait(30) == Exit.PEER_LOST
        assert "another process of the job is gone" in job.outputs[1 - victim].read_text()
    if moment == "in a save":
        newest = Checkpointer(run / "checkpoints").latest_step() or 0
        with Job(run, f"train.steps={newest + 1}") as job:
            assert job.exit_codes() == [0, 0]
        assert [step for step, *_ in losses(run)] == [*range(1, newest + 2)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named(tmp_path, victim):
    with Job(tmp_path / "run", "train.steps=100000", *WATCHFUL, program=SLOW_HEARTBEATS) as job:
        job.wait_for("step 12/")
        job.processes[victim].send_signal(signal.SIGSTOP)
        assert job.processes[1 - victim].wait(30) == Exit.HANG
        output = job.outputs[1 - victim].read_text()
        assert "Current thread" in output or "Thread 0x" in output  # the stacks
        assert ("process 0 does not answer" if victim == 0 else "process 1 (last step") in output


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_heartbeats_of_a_stopped_process_end_before_a_patient_watchdog(tmp_path, victim):
    with Job(tmp_path / "run", "train.steps=100000") as job:
        job.wait_for("step 12/")
        job.processes[victim].send_signal(signal.SIGSTOP)
        assert job.processes[1 - victim].wait(30) == Exit.PEER_LOST
        output = job.outputs[1 - victim].read_text()
        assert "another process of the job is gone" in output and "(train.watchdog)" not in output


@pytest.mark.slow
def test_supervised_processes_start_again(tmp_path):
    """The processes are killed in turn."""
    with Job(tmp_path / "alone", "train.steps=40") as alone:
        assert alone.exit_codes() == [0, 0]
    with Job(tmp_path / "run", "train.steps=40", before=("supervise", "--")) as job:
        for victim, step in ((1, 15), (0, 25)):
            job.wait_for(f"step {step}/")
            os.kill(child(job.processes[victim]), signal.SIGKILL)
        assert job.exit_codes() == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["restarts"] == 2 == status["recovery"]["count"]
    assert status["goodput"]["idle"] > 0
