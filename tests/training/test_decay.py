"""Warmup, stable, decay: a decay that begins at any checkpoint of a run with a constant rate."""

import json
import math
import shutil

import pytest

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import Exit
from spmd_lm.training.loop import train
from tests.helpers import FLOAT32, make_config

BRANCH, END = 4, 8


def run_config(directory, steps: int, **optim) -> RunConfig:
    sizes = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    optim = {"lr": 1e-2, "min_lr": 1e-3, "warmup": 2} | optim
    loop = {"steps": steps, "batch": 8, "log_every": 1}
    checkpoint = {"every": 1, "keep": 9}
    sections = {"model": sizes, "precision": FLOAT32, "optim": optim, "train": loop, "checkpoint": checkpoint}
    sections |= {"parallel": {"data": 8}}
    return make_config(run={"dir": str(directory)}, **sections)


def measured(directory) -> dict[int, tuple[float, float]]:
    """(loss, learning rate) by step, as written."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["loss"], line["lr"]) for line in lines}


@pytest.mark.slow
def test_a_decay_begins_at_any_checkpoint(tmp_path, capsys):
    """The run that decays from the start's configuration on, and one that is branched off a longer stable one: the
    same bits."""
    decay = {"decay": "sqrt", "decay_start": BRANCH}
    planned, stable, branch = (tmp_path / name for name in ("planned", "stable", "branch"))
    assert train(run_config(planned, END, **decay)) is Exit.DONE
    assert train(run_config(stable, BRANCH + 2, decay="constant")) is Exit.DONE
    (branch / "checkpoints").mkdir(parents=True)
    shutil.copy(stable / "config.yaml", branch)
    shutil.copytree(stable / "checkpoints" / str(BRANCH), branch / "checkpoints" / str(BRANCH))
    capsys.readouterr()
    assert train(run_config(branch, END, **decay)) is Exit.DONE
    said = capsys.readouterr().out
    assert "optim.decay: constant -> sqrt" in said
    assert f"The learning rate of step {BRANCH + 1} is 0.01, as it was to be; later ones may differ." in said

    want = measured(planned)
    assert all(measured(stable)[step] == want[step] for step in range(1, BRANCH + 1))
    assert {step: want[step] for step in range(BRANCH + 1, END + 1)}.items() <= measured(branch).items()
    assert measured(stable)[BRANCH + 2] != want[BRANCH + 2]
    for step, (_, lr) in want.items():
        done = max(0, step - 1 - BRANCH) / (END - BRANCH)  # updates before this one
        assert lr == pytest.approx(5e-3 if step == 1 else 1e-2 - 9e-3 * math.sqrt(done), rel=1e-6)
