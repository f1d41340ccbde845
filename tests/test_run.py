"""Whole runs through the command, in processes of their own: layouts, a SIGTERM, a resume on another mesh."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from spmd_lm.errors import Exit
from tests import processes
from tests.published import published

FLOAT64 = [f"precision.{key}=float64" for key in ("params", "compute", "reduce")]
SMALL = ["model.layers=2", "model.dropout=0.1", "model.attention_dropout=0.1", "train.log_every=1"]


def start(directory: Path, devices: int, *overrides: str) -> subprocess.Popen:
    line = ["train", "configs/debug.yaml", "--devices", str(devices), f"run.dir={directory}"]
    return processes.start(*line, *SMALL, *overrides)


def run(directory: Path, devices: int, *overrides: str) -> dict[int, dict]:
    """The records of metrics.jsonl by step, once the command has succeeded."""
    processes.wait(start(directory, devices, *overrides))
    return records(directory)


def records(directory: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1))  # each step once, resumes included
    return dict(zip(steps, lines, strict=True))


def largest_difference(got: dict[int, dict], want: dict[int, dict]) -> float:
    """The largest relative difference of a loss or a gradient norm."""
    assert got.keys() == want.keys()
    return max(abs(got[s][key] / want[s][key] - 1) for s in want for key in ("loss", "grad_norm"))


def metrics(records: dict[int, dict]) -> list[tuple]:
    return [(step, r["loss"], r["grad_norm"], r["lr"], r["tokens"]) for step, r in records.items()]


LAYOUTS = [
    ["parallel.data=8"],
    ["parallel.data=4", "parallel.model=2"],
    ["parallel.data=2", "parallel.model=4", "parallel.microbatches=4"],
    ["parallel.data=1", "parallel.model=8", "parallel.microbatches=2"],
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance, layouts", [("float64", 1e-9, LAYOUTS), ("float32", 2e-5, LAYOUTS[2:3])])
def test_every_layout_logs_the_run_of_one_device(tmp_path, dtype, tolerance, layouts):
    precision = [f"precision.{key}={dtype}" for key in ("params", "compute", "reduce")]
    one = run(tmp_path / "one", 1, "train.steps=5", *precision)
    for number, layout in enumerate(layouts):
        assert (
            largest_difference(run(tmp_path / str(number), 8, "train.steps=5", *precision, *layout), one) <= tolerance
        ), layout


@pytest.mark.slow
def test_a_terminated_run_resumes_as_if_it_had_not_stopped(tmp_path):
    """Bits agree on its own mesh, numbers to rounding on another.  Slow steps let the signal arrive in time."""
    layout = ["parallel.data=4", "parallel.model=2", "train.steps=20", "train.batch=64", *FLOAT64]
    reference = run(tmp_path / "reference", 8, *layout)

    stopped = tmp_path / "stopped"
    process = start(stopped, 8, *layout)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 7/"):
            process.send_signal(signal.SIGTERM)
            break
    processes.wait(process, code=Exit.PREEMPTED)
    at = json.loads((stopped / "status.json").read_text())
    assert at["state"] == "preempted" and 7 <= at["step"] < 20

    other = tmp_path / "other"
    shutil.copytree(stopped, other)
    assert metrics(run(stopped, 8, *layout)) == metrics(reference)
    moved = run(other, 8, *layout, "parallel.data=2", "parallel.model=4", "parallel.microbatches=2")
    assert largest_difference(moved, reference) <= 1e-9
    assert json.loads((other / "status.json").read_text())["restarts"] == 1


@pytest.mark.slow
def test_text_is_learned_evaluated_and_generated(tmp_path):
    """The standard library becomes a checkpoint, an evaluation and a continuation, on a mesh."""
    directory, start = tmp_path / "run", time.perf_counter()
    overrides = ["parallel.model=4", "train.steps=60", "train.eval_every=30", "checkpoint.every=30", "optim.lr=3e-3"]
    losses = [record["loss"] for record in run(directory, 8, *overrides, "train.log_every=1").values()]
    assert losses[0] > 5 and losses[-1] < 3.6, time.perf_counter() - start

    evaluated = json.loads(processes.run("eval", directory, "--json", "-"))
    logged = records(directory)[60]
    assert evaluated["step"] == 60 and evaluated["eval_loss"] == pytest.approx(logged["eval_loss"], rel=1e-6)
    asked = ["--prompt", "import ", "--tokens", "100", "--seed", "1"]
    text = processes.run("generate", directory, *asked)
    assert text.startswith("import ") and text == processes.run("generate", directory, "parallel.model=1", *asked)
    for name in ("config.yaml", "metrics.jsonl", "status.json", "samples.txt", "loss.png", "tensorboard"):
        assert (directory / name).exists()


@pytest.mark.slow
def test_the_published_loss_on_tinyshakespeare(tmp_path):
    """nanoGPT's small CPU setting, published at 1.88 (of 20 random batches; here the whole validation text)."""
    text = f"data.path={published('tinyshakespeare.txt')}"
    line = ["train", "configs/tinyshakespeare.yaml", "--devices", "1", text, f"run.dir={tmp_path}"]
    processes.run(*line, "train.log_every=1000")
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2000 and last["eval_loss"] <= 1.90
