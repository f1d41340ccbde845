"""Cells that are submitted to a SLURM whose commands do not say what they should."""

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.runtime import programs
from spmd_lm.sweeps import jobs
from spmd_lm.sweeps.cells import Cell
from spmd_lm.sweeps.jobs import JOB_FILE, SlurmJobs
from tests.sweeps.test_runner import config_of


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Installs these scripts in the place of SLURM's commands, and returns the jobs and a cell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(jobs, "SLURM_SECONDS", 0.5)
    monkeypatch.setattr(programs, "MOST_OUTPUT", 10_000)

    def set_up(**scripts: str) -> tuple[SlurmJobs, Cell]:
        for name, script in ({"sbatch": "echo 17", "squeue": "", "scontrol": ""} | scripts).items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        (tmp_path / "slurm.sbatch").write_text("")
        cell = Cell("a", {}, config_of(tmp_path / "cells" / "a"))
        cell.directory.mkdir(parents=True, exist_ok=True)
        return SlurmJobs(tmp_path / "slurm.sbatch", 0.0), cell

    return set_up


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exec sleep 60", "sbatch: it does not end in 0.5 s"),
        ("exec yes 17x", "sbatch: it says more than 10,000 bytes"),
        ("echo hello", "does not say a job's number, but: hello"),
        ("true", "does not say a job's number, but: "),
        ("echo ../../x", "does not say a job's number"),
        ("echo -1", "does not say a job's number"),
        (r"printf '\377\376\033[2J'", "does not say a job's number, but: ..\\\\x1b\\[2J"),
        (r"printf 'bad \033[31mpartition\a\n' >&2; exit 1", r"refused the job: bad \\x1b\[31mpartition\\x07\. Edit"),
        ("kill -9 $$", "refused the job"),
    ],
)
def test_an_sbatch_that_submits_nothing_is_reported(slurm, script, problem):
    each, cell = slurm(sbatch=script)
    with pytest.raises(ConfigError, match=problem) as told:
        each.start(cell, 0)
    assert "\x1b" not in str(told.value) and not (cell.directory / JOB_FILE).exists()


@pytest.mark.parametrize("script", ["echo 17", "echo '17;cluster'", "echo 'sbatch: warning: x' >&2; echo 17"])
def test_a_job_s_number_is_read(slurm, script):
    each, cell = slurm(sbatch=script, squeue="echo 17")
    each.start(cell, 0)
    assert (cell.directory / JOB_FILE).read_text() == "17\n" and each.poll(cell) is None


@pytest.mark.parametrize("script", ["exec sleep 60", "exec yes", "exit 1", "kill -9 $$"])
def test_a_job_of_which_nothing_is_known_goes_on(slurm, script):
    each, cell = slurm(squeue=script)
    each.start(cell, 0)
    assert each.poll(cell) is None


@pytest.mark.parametrize("script", ["exec sleep 60", "exec yes", r"printf '\377'", "exit 1"])
def test_a_job_that_slurm_has_forgotten_ended_as_its_run_says(slurm, script):
    each, cell = slurm(scontrol=script)
    each.start(cell, 0)
    assert each.poll(cell) == 1
