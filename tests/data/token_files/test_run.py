"""Runs on a blend of prepared data: the same on any number of data shards, in two processes, after kills."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.errors import Exit
from tests import processes
from tests.data.token_files.conftest import write_dataset
from tests.launch.test_local import end, launch

FLOAT64 = [f"precision.{key}=float64" for key in ("params", "compute", "reduce")]
SMALL = ["model.layers=1", "model.width=32", "model.heads=4", "model.context=32", "model.vocab=256", "train.steps=12"]
SMALL += ["train.batch=16", "train.log_every=1", "train.eval_every=6", "checkpoint.every=3", "checkpoint.async=false"]


def train(directory: Path, blend: str, devices: int, *overrides: str) -> list[str]:
    line = ["train", "configs/debug.yaml", "--devices", str(devices), f"run.dir={directory}", "parallel.model=1"]
    return [*line, "data.source=tokens", blend, "parallel.data=-1", *SMALL, *FLOAT64, *overrides]


def losses(directory: Path) -> dict[int, float]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.fixture
def blend(tmp_path):
    rng = np.random.default_rng(0)
    for i, name in enumerate("ab"):
        splits = {split: [[rng.integers(97, 123, 300 + 50 * i).tolist()] * 2] for split in ("train", "validation")}
        write_dataset(tmp_path / name, splits, vocab=256, eos=0)
    return f"data.blend=[{{path: {tmp_path}/a, weight: 0.7}}, {{path: {tmp_path}/b, weight: 0.3}}]"


@pytest.mark.slow
def test_every_mesh_and_two_processes_see_the_same_samples(tmp_path, blend):
    for devices in (1, 2, 4, 8):
        processes.run(*train(tmp_path / str(devices), blend, devices))
    job = launch(2, *train(tmp_path / "two", blend, 8))
    code, output = end(job)
    assert code == Exit.DONE, output
    want = losses(tmp_path / "1")
    assert list(want) == list(range(1, 13))
    for name in ("2", "4", "8", "two"):
        assert losses(tmp_path / name) == pytest.approx(want, rel=1e-9), name


@pytest.mark.slow
def test_killed_runs_go_on_with_the_next_sample(tmp_path, blend):
    processes.run(*train(tmp_path / "reference", blend, 4))
    line = train(tmp_path / "killed", blend, 4)
    for step in (4, 8):
        process = processes.start(*line)
        for text in process.stdout:
            if re.match(rf"step {step}/", text):
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
    processes.run(*line)
    assert losses(tmp_path / "killed") == losses(tmp_path / "reference")
    scored = json.loads(processes.run("eval", tmp_path / "killed", "--task", "validation", "--json", "-"))
    assert scored["tasks"]["validation"]["n"] == 2 * (300 + 1) + 2 * (350 + 1) - 1  # of both corpora


@pytest.mark.slow
def test_changed_data_is_refused_on_resume(tmp_path, blend):
    line = train(tmp_path / "run", blend, 1, "train.steps=3")
    processes.run(*line)
    changed = [each.replace("weight: 0.3", "weight: 0.4").replace("steps=3", "steps=4") for each in line]
    process = processes.start(*changed)
    _, said = process.communicate()
    assert process.returncode == Exit.DATA and "its data is not what it was trained on so far" in said
    processes.run(*changed, "data.allow_change=true")
