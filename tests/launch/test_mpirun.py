"""Open MPI's mpirun with two processes, which run as they do on GPU hosts: `make test-slurm`."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from spmd_lm.errors import Exit
from tests import processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun here: make test-slurm INSTALL=1 installs it"),
]
# On this host alone, which needs no ssh.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm": "isolated"}
TINY = ["model.layers=1", "model.width=16", "model.heads=2", "train.batch=8", "checkpoint.every=0", "train.log_every=1"]


def of_mpirun(pid: int) -> list[int]:
    """The processes that an mpirun has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_processes_under_mpirun_train_as_one_and_save_together(tmp_path):
    """SIGTERM to one of them saves and stops both.  Their output has no codes of a terminal, though mpirun shows them
    one."""
    verb = [sys.executable, "-m", "spmd_lm", "train", "configs/debug.yaml", "--devices", "8"]
    keys = [*TINY, "train.steps=1000", f"run.dir={tmp_path}/run"]
    process = processes.start_command(
        ["mpirun", "--oversubscribe", "-np", "2", *verb, *keys], **processes.UNCACHED, **OPEN_MPI
    )
    text = ""  # up to the fifth step
    for line in process.stdout:
        text += line
        if re.search(r"step 5/", line):
            os.kill(of_mpirun(process.pid)[1], signal.SIGTERM)
            break
    rest, _ = processes.communicate(process)
    assert process.returncode == Exit.PREEMPTED, text + rest
    assert "mesh    pipe 1 x replica 1 x data 8 x model 1 = 8 devices (cpu)" in text
    (stopped,) = re.findall(r"stopped after step (\d+) of 1000, saved", rest)
    assert (tmp_path / "run/checkpoints" / stopped).is_dir() and "\x1b" not in text + rest
