"""A run that is killed again and again ends with the bits of one that was left alone.

SOAK_KILLS kills, at random times: `make soak` takes 50 of them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_lm.cli import main
from spmd_lm.errors import Exit
from tests import processes
from tests.reliability.jobs import child, losses

KILLS = int(os.environ.get("SOAK_KILLS", "5"))
STEPS, EVERY = 60 * (KILLS + 1), 10
RUN = [
    *("train", "configs/debug.yaml", "--devices", "2", "model.layers=1", "model.dropout=0.1", "train.log_every=1"),
    *(f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "parallel.zero=3"),
]


def start(directory: Path, *before: str, offload: str = "none") -> subprocess.Popen:
    command = [sys.executable, "-m", "spmd_lm", *before, *RUN, f"run.dir={directory}", f"optim.offload={offload}"]
    optimized = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # the suite's are not
    with open(directory.with_suffix(".out"), "w") as output:
        return subprocess.Popen(command, cwd=processes.ROOT, env=optimized, stdout=output, stderr=subprocess.STDOUT)


def steps_done(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_a_run_killed_at_random_loses_nothing(offload, tmp_path, capsys):
    """Also if it keeps state in files, and the run that was left alone does not."""
    assert processes.exit_codes(start(tmp_path / "alone")) == [Exit.DONE]
    rng, run = random.Random(KILLS), tmp_path / "run"
    supervisor = start(run, "supervise", "--attempts", "99", "--", offload=offload)
    for _ in range(KILLS):
        goal = steps_done(run) + rng.randint(1, 2 * EVERY)
        processes.wait_until(lambda goal=goal: steps_done(run) >= goal or supervisor.poll() is not None, supervisor)
        time.sleep(rng.uniform(0.0, 1.0))  # into a step, a save, or what a start does
        if supervisor.poll() is None:
            os.kill(child(supervisor), signal.SIGKILL)
    assert processes.exit_codes(supervisor) == [Exit.DONE], run.with_suffix(".out").read_text()[-2000:]

    assert losses(run) == losses(tmp_path / "alone")  # every step once: no sample is lost or repeated
    assert main(["ckpt", "diff", f"{run}@{STEPS}", f"{tmp_path / 'alone'}@{STEPS}"]) == Exit.DONE
    status = json.loads((run / "status.json").read_text())
    assert status["restarts"] >= KILLS - 1
    spent, recovery = status["goodput"], status["recovery"]
    seconds = sum(spent.values())
    with capsys.disabled():
        print(
            f"\n{status['restarts']} restarts in {seconds:.0f} s: goodput {spent['step'] / seconds:.0%}, "
            f"lost {spent['lost']:.1f} s, idle {spent['idle']:.1f} s; "
            f"recovery p50 {recovery['p50']:.1f} s, max {recovery['max']:.1f} s; "
            f"a save stalls training for {1000 * spent['checkpoint'] / (STEPS / EVERY):.0f} ms"
        )
