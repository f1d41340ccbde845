"""`spmd-lm sweep` as a command, with real processes."""

import csv
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_lm.cli import main
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.runtime.directories import lock_directory
from spmd_lm.sweeps import sweep
from spmd_lm.sweeps.cells import make_cells
from spmd_lm.sweeps.local_gpus import share_gpus
from spmd_lm.sweeps.sweep_file import read_sweep
from tests import processes

TINY = """
model: {layers: 1, width: 8, heads: 2, context: 8, vocab: 16, dropout: 0, attention_dropout: 0}
data: {source: synthetic}
optim: {lr: 0.1}
train: {steps: 4, batch: 8, eval_every: 2, eval_batches: 2, log_every: 1}
checkpoint: {every: 2}
run: {simulate_devices: 2}
"""
SWEEP = "name: two\nconfig: tiny.yaml\ngrid: {parallel.zero: [0, 1]}\n"


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A directory with a sweep of two cells, done."""
    root = tmp_path_factory.mktemp("sweep")
    (root / "tiny.yaml").write_text(TINY)
    (root / "sweep.yaml").write_text(SWEEP)
    command = [sys.executable, "-m", "spmd_lm", "sweep", "sweep.yaml", "--jobs", "2", "--json", "result.json"]
    process = processes.start_command(command, cwd=root, PYTHONPATH=str(processes.ROOT))
    output, _ = processes.communicate(process)
    assert process.returncode == Exit.DONE, output
    (root / "output").write_text(output)
    return root


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The working directory, with the sweep's files."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(root: Path, name: str = "two") -> list[dict[str, str]]:
    with open(root / "runs" / "sweeps" / name / "cells.csv") as file:
        return [*csv.DictReader(file)]


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def test_a_sweep_runs_its_cells_and_keeps_their_figures(done):
    cells = table(done)
    assert [(cell["id"], cell["status"], cell["exit_code"]) for cell in cells] == [("zero-0", "done", "0"),
                                                                                   ("zero-1", "done", "0")]  # fmt: skip
    assert cells[0]["run_dir"] == "runs/sweeps/two/cells/zero-0" and cells[0]["devices"] == "2"
    assert float(cells[0]["eval_loss"]) == pytest.approx(float(cells[1]["eval_loss"]), rel=1e-5)
    result = json.loads((done / "result.json").read_text())
    assert result["exit_code"] == 0 and [cell["id"] for cell in result["cells"]] == ["zero-0", "zero-1"]
    assert {path.name for path in (done / "runs/sweeps/two").iterdir()} == {
        "cells", "cells.csv", "cells.parquet", "report.html", "sweep.yaml"
    }  # fmt: skip
    output = (done / "output").read_text()
    assert "zero-0: starting on this machine\nzero-1: starting on this machine\n" in output
    assert "(2 of 2 done)" in output


def test_a_finished_sweep_starts_nothing_again(done, monkeypatch, capsys):
    monkeypatch.chdir(done)
    before = files(done / "runs/sweeps/two/cells")
    assert main(["sweep", str(done / "sweep.yaml")]) == Exit.DONE
    assert capsys.readouterr().out.startswith("2 of 2 cells are done already\n")
    assert files(done / "runs/sweeps/two/cells") == before


def test_another_sweep_in_the_same_directory_is_refused(done, monkeypatch, capsys):
    monkeypatch.chdir(done)
    before = files(done / "runs")
    (done / "other.yaml").write_text("name: two\nconfig: tiny.yaml\ngrid: {parallel.model: [1, 2]}\n")
    assert main(["sweep", "other.yaml"]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert "is another sweep's: keys ['parallel.zero'], not ['parallel.model']. Choose another name" in error
    assert main(["sweep", "sweep.yaml", "train.steps=5"]) == Exit.CONFIG
    assert "zero-0:  train.steps: 4 -> 5" in capsys.readouterr().err
    with lock_directory(done / "runs/sweeps/two", print, True):
        command = [sys.executable, "-m", "spmd_lm", "sweep", "sweep.yaml"]
        second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == Exit.CONFIG and "is writing there. Wait for it" in second.stderr
    assert files(done / "runs") == before


def test_a_dry_run_lists_the_cells_and_writes_nothing(here, capsys):
    assert main(["sweep", "sweep.yaml", "--dry-run"]) == Exit.DONE
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split("  ")[0] == "cell" and [line.split()[:4] for line in lines] == [
        ["zero-0", "pending", "4", "data"], ["zero-1", "pending", "4", "data"]
    ]  # fmt: skip
    assert sorted(path.name for path in here.iterdir()) == ["sweep.yaml", "tiny.yaml"]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["missing.yaml"], "missing.yaml: no such file. Did you mean"),
        (["tiny.yaml"], "tiny.yaml: model: unknown key"),
        (["sweep.yaml", "grid.x=1"], "grid: this is a sweep's file"),
        (["sweep.yaml", "parallel.model=3"], "parallel.model=3 does not divide 2 devices"),
        (["sweep.yaml", "parallel.modle=3"], "unknown key 'modle'"),
        (["sweep.yaml", "--submit", "slurm"], "--submit slurm: no launch/slurm.sbatch here"),
        (["sweep.yaml", "--submit", "pbs"], "invalid choice"),
        (["sweep.yaml", "--jobs", "0"], "a whole number from 1 to"),
        (["sweep.yaml", "--jobs", "10001"], "a whole number from 1 to 10,000"),
        (["sweep.yaml", "--jobs", str(2**31 - 1)], "a whole number from 1 to 10,000"),
        (["sweep.yaml", "--jobs", str(10**30)], "a whole number from 1 to 10,000"),
        (["sweep.yaml", "--jobs", "1e3"], "a whole number from 1 to 10,000"),
        ([], "no SWEEP given"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(here, arguments, problem, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/sbatch")
    assert main(["sweep", *arguments]) == Exit.CONFIG
    assert problem in capsys.readouterr().err
    assert sorted(path.name for path in here.iterdir()) == ["sweep.yaml", "tiny.yaml"]


def test_without_slurm_the_message_says_so(here, capsys, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["sweep", "sweep.yaml", "--submit", "slurm"]) == Exit.CONFIG
    assert "there is no sbatch here. Run this on a login node" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_cell_is_shown_with_its_reason(here):
    (here / "tiny.yaml").write_text(
        TINY.replace("source: synthetic", "source: text").replace("vocab: 16", "vocab: 256")
    )
    (here / "text.txt").write_text("some text to read, again and again\n" * 200)
    (here / "sweep.yaml").write_text("name: mixed\nconfig: tiny.yaml\ngrid: {data.path: [missing.txt, text.txt]}\n")
    process = processes.start_command(
        [sys.executable, "-m", "spmd_lm", "sweep", "sweep.yaml"], cwd=here, PYTHONPATH=str(processes.ROOT)
    )
    output, _ = processes.communicate(process)
    assert process.returncode == Exit.CHECK_FAILED, output
    failed, good = table(here, "mixed")
    assert (failed["status"], failed["exit_code"], good["status"]) == ("failed", "4", "done")
    assert "missing.txt" in failed["reason"] and f"exit code 4: {failed['reason']} (0 of 2 done)" in output


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_random_loses_and_repeats_nothing(here):
    """Killed three times: no finished cell starts again, interrupted ones resume, and the tables are complete."""
    (here / "tiny.yaml").write_text(TINY.replace("steps: 4", "steps: 60"))
    (here / "sweep.yaml").write_text("name: killed\nconfig: tiny.yaml\ngrid: {train.seed: [0, 1, 2, 3]}\n")
    command = [sys.executable, "-m", "spmd_lm", "sweep", "sweep.yaml", "--jobs", "2"]
    cells, finished = here / "runs/sweeps/killed/cells", {}
    waits = random.Random(os.environ.get("PYTEST_SEED", "7"))
    for _ in range(3):
        process = processes.start_command(command, cwd=here, PYTHONPATH=str(processes.ROOT))
        time.sleep(waits.uniform(6, 14))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert {path: mtime for path, mtime in files(cells).items() if path in finished} == finished
        statuses = {path: json.loads(path.read_text()) for path in cells.glob("*/status.json")}
        done_cells = [path.parent for path, status in statuses.items() if status["state"] == "done"]
        finished = {path: mtime for cell in done_cells for path, mtime in files(cell).items()}
    process = processes.start_command(command, cwd=here, PYTHONPATH=str(processes.ROOT))
    output, _ = processes.communicate(process)
    assert process.returncode == Exit.DONE, output
    assert {path: mtime for path, mtime in files(cells).items() if path in finished} == finished
    rows = table(here, "killed")
    assert [(row["id"], row["status"], row["step"]) for row in rows] == [(f"seed-{i}", "done", "60") for i in range(4)]
    for i in range(4):
        records = (cells / f"seed-{i}" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(record)["step"] for record in records] == [*range(1, 61)]
    assert "4 cells: 4 done" in (here / "runs/sweeps/killed/report.html").read_text()


@pytest.mark.parametrize(
    "machine, at_once, told",
    [
        (("gpu", 8), 4, [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]),
        (("gpu", 8), 3, "--jobs 3 on 8 GPUs"),
        (("tpu", 4), 2, "--jobs 2: one process has all of a host's TPUs"),
        (("tpu", 4), 1, []),
        (("gpu", 1), 1, "parallel.model=2 makes 2 devices, but there are 1"),
    ],
)
def test_cells_share_the_accelerators_of_a_machine(machine, at_once, told, monkeypatch, here):
    monkeypatch.setattr(sweep, "probe", lambda: sweep.Machine(*machine))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    path = here / "sweep.yaml"
    path.write_text(
        "name: a\nconfig: tiny.yaml\n"
        "grid: {parallel.model: [1, 2], parallel.data: DATA, run.simulate_devices: 0}\n".replace(
            "DATA", "1" if machine[0] == "gpu" else "-1"
        )
    )
    cells = make_cells(read_sweep(path), here / "out")
    if isinstance(told, str):
        with pytest.raises(ConfigError, match=re.escape(told)):
            sweep.local_jobs(cells, at_once, print)
        return
    jobs = sweep.local_jobs(cells, at_once, print)
    seen = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: seen.append(env.get("CUDA_VISIBLE_DEVICES")))
    one, two = cells
    for cell in cells:
        cell.prepare()
    jobs.start(one, 0)  # a fixed layout takes no more than it needs
    for slot in range(at_once):
        jobs.start(two, slot)
    assert seen == (["0", *map(",".join, told)] if told else [None] * 2)


LONG, OTHER = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-5a3b2c1d-0000-1111-2222-333344445555"


@pytest.fixture
def one_device_cells(here):
    (here / "sweep.yaml").write_text(
        "name: a\nconfig: tiny.yaml\n"
        "grid: {parallel.zero: [0, 1], parallel.data: 1, optim.lr: [0.1, 0.2], run.simulate_devices: 0}\n"
    )
    return make_cells(read_sweep(here / "sweep.yaml"), here / "out")


def started(cells, at_once, visible, devices, monkeypatch) -> tuple[list[dict[str, str]], list[str]]:
    """Environments of the cells' processes, and what is logged; jax finds `devices` GPUs."""
    monkeypatch.setattr(sweep, "probe", lambda: sweep.Machine("gpu" if devices else "cpu", devices or 1))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environments, logged = [], []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: environments.append(env))
    jobs = sweep.local_jobs(cells, at_once, logged.append)
    for slot, cell in enumerate(cells[:at_once]):
        cell.prepare()
        jobs.start(cell, slot)
    return environments, logged


@pytest.mark.parametrize(
    ("visible", "devices", "own"),
    [
        (None, 2, ["0", "1"]),
        ("0,1", 2, ["0", "1"]),
        ("2, 5", 2, ["2", "5"]),
        (" 3 ,1,", 2, ["3", "1"]),
        ("4,5,-1,6", 2, ["4", "5"]),  # CUDA reads up to what is no device
        (f"{LONG},{OTHER}", 2, [LONG, OTHER]),
        ("GPU-8932, MIG-GPU-5a3b/1/0", 2, ["GPU-8932", "MIG-GPU-5a3b/1/0"]),
    ],
)
def test_each_job_has_a_gpu_of_its_own(visible, devices, own, one_device_cells, monkeypatch):
    environments, logged = started(one_device_cells, 2, visible, devices, monkeypatch)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == own
    assert logged == [f"--jobs 2 on 2 GPUs: 1 each, {own[0]} and {own[1]} of CUDA_VISIBLE_DEVICES"]
    assert all("XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment for environment in environments)


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "all", "none"])
def test_where_cuda_shows_no_gpu_cells_run_on_the_cpu_as_train_does(visible, one_device_cells, monkeypatch):
    environments, logged = started(one_device_cells, 2, visible, 0, monkeypatch)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == [visible] * 2 and not logged


@pytest.mark.parametrize(("visible", "devices"), [("all", 2), ("", 2), ("0,,1", 2), ("0", 2), ("all", 1), ("-1", 1)])
def test_a_list_that_does_not_name_the_gpus_is_refused(visible, devices, one_device_cells, monkeypatch):
    problem = f"CUDA_VISIBLE_DEVICES={visible!r} does not name the {devices} GPU"
    with pytest.raises(ConfigError, match=re.escape(problem) + ".*that jax finds.*0,1.*GPU-"):
        started(one_device_cells, devices, visible, devices, monkeypatch)


def test_gpus_that_jax_alone_selects_cannot_be_divided(one_device_cells, monkeypatch):
    monkeypatch.setenv("JAX_CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=r"JAX_CUDA_VISIBLE_DEVICES=1.*Use CUDA_VISIBLE_DEVICES"):
        started(one_device_cells, 1, None, 1, monkeypatch)


def test_more_jobs_than_gpus_share_them_and_say_so(one_device_cells, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # all of its share at once
    environments, logged = started(one_device_cells, 4, "6,7", 2, monkeypatch)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["6", "7", "6", "7"]
    assert {environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] for environment in environments} == {"0.37"}
    assert logged == [
        "--jobs 4 on 2 GPUs: 2 jobs share each, with 37% of its memory (XLA_PYTHON_CLIENT_MEM_FRACTION=0.37). Their "
        "speeds are not those of a GPU of one's own."
    ]
    with pytest.raises(ConfigError, match=r"--jobs 3 on 2 GPUs.* Choose 1, 2 or a multiple of 2\."):
        started(one_device_cells, 3, None, 2, monkeypatch)
    with pytest.raises(ConfigError, match=r"--jobs 76 on 1 GPU: 0% of a GPU's memory is too little"):
        share_gpus(1, 76)


def test_jobs_without_a_cell_get_no_gpu(one_device_cells, monkeypatch):
    environments, logged = started(one_device_cells, 8, "0,1,2,3", 4, monkeypatch)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0", "1", "2", "3"]
    assert logged == ["--jobs 4 on 4 GPUs: 1 each, 0, 1, 2 and 3 of CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(
    "setting",
    [
        ("XLA_CLIENT_MEM_FRACTION", ".2"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".2"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async"),
    ],
)
def test_jobs_that_share_a_gpu_keep_the_memory_that_the_caller_gives_them(setting, one_device_cells, monkeypatch):
    monkeypatch.setenv(*setting)
    environments, logged = started(one_device_cells, 2, None, 1, monkeypatch)
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["0", "0"]
    assert all(environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION") in (None, ".2") for environment in environments)
    assert logged[0].startswith("--jobs 2 on 1 GPU: 2 jobs share it. Their speeds")


def test_a_cell_of_several_devices_does_not_fit_a_shared_gpu(here, monkeypatch):
    (here / "sweep.yaml").write_text(
        "name: a\nconfig: tiny.yaml\ngrid: {parallel.model: [1, 2], parallel.data: 1, run.simulate_devices: 0}\n"
    )
    cells = make_cells(read_sweep(here / "sweep.yaml"), here / "out")
    with pytest.raises(ConfigError, match=r"parallel.model=2 makes 2 devices, but there are 1"):
        started(cells, 2, None, 1, monkeypatch)
