"""A step whose gradients are not finite is skipped whole: the run continues as if told to leave it out."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from spmd_lm.cli import main
from spmd_lm.data.loader import Loader
from spmd_lm.errors import Exit
from spmd_lm.step import guard
from spmd_lm.step.guard import WINDOW, LossWindow, is_spike

DEBUG = str(Path(__file__).parents[2] / "configs" / "debug.yaml")
SMALL = ["model.layers=2", "train.batch=8", "train.log_every=1", "data.source=synthetic", "train.eval_every=0"]
LAYOUTS = {
    "zero 3": ["parallel.data=4", "parallel.model=2", "parallel.zero=3"],
    "pipeline": ["parallel.pipe=2", "parallel.data=4", "parallel.microbatches=2"],
}


def train(directory: Path, *overrides: str) -> int:
    return main(["train", DEBUG, "--devices", "8", f"run.dir={directory}", *SMALL, *overrides])


def records(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def poison(monkeypatch):
    """Makes the losses of these steps NaN, wherever they are computed."""
    batch, steps = Loader.batch, set()

    def poisoned(self, step, shardings):
        read = batch(self, step, shardings)
        return dataclasses.replace(read, loss_weights=read.loss_weights * jnp.nan) if step + 1 in steps else read

    monkeypatch.setattr(Loader, "batch", poisoned)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUTS["zero 3"], LAYOUTS["pipeline"]])
def test_a_nan_is_skipped_bit_for_bit(tmp_path, poison, layout, capsys):
    arguments = [*layout, "train.steps=5", "checkpoint.every=5"]
    assert train(tmp_path / "excluded", *arguments, "train.guard.exclude=[3]") == Exit.DONE
    poison.add(3)
    assert train(tmp_path / "poisoned", *arguments) == Exit.DONE
    assert "step 3 was skipped, samples 16 to 23: loss or gradients are not finite" in capsys.readouterr().out
    assert main(["ckpt", "diff", f"{tmp_path}/excluded@5", f"{tmp_path}/poisoned@5"]) == Exit.DONE
    excluded, poisoned = records(tmp_path / "excluded"), records(tmp_path / "poisoned")
    skipped = poisoned.pop(2)
    assert (skipped["step"], skipped["skipped"], skipped["samples"]) == (3, True, [16, 23])
    assert "not finite" in skipped["reason"] and excluded.pop(2)["reason"] == "train.guard.exclude"
    assert [(r["step"], r["loss"], r["lr"]) for r in poisoned] == [(r["step"], r["loss"], r["lr"]) for r in excluded]


@pytest.mark.slow
def test_too_many_in_a_row_end_the_run(tmp_path, poison, capsys):
    poison |= {2, 3, 5, 6, 7}
    code = train(
        tmp_path / "run", "train.steps=9", "checkpoint.every=1", "checkpoint.keep=9", "train.guard.max_skips=2"
    )
    assert code == Exit.NON_FINITE
    assert "steps 5 to 7: loss or gradients are not finite; train.guard.max_skips=2" in capsys.readouterr().err
    assert [r["step"] for r in records(tmp_path / "run") if r.get("skipped")] == [2, 3, 5, 6, 7]
    assert main(["ckpt", "verify", str(tmp_path / "run")]) == Exit.DONE
    poison.clear()
    assert train(tmp_path / "run", "train.steps=9") == Exit.DONE  # its checkpoints are clean


def test_a_spike_is_far_above_the_last_losses():
    losses = jnp.linspace(3.1, 2.9, WINDOW)
    window = LossWindow(losses, jnp.int32(WINDOW))
    assert [bool(is_spike(window, jnp.float32(loss))) for loss in (2.0, 3.2, 30.0, jnp.inf)] == [
        False,
        False,
        True,
        True,
    ]
    few = LossWindow(losses, jnp.int32(10))
    assert not is_spike(few, jnp.float32(30.0))


@pytest.mark.slow
def test_spikes_are_skipped_and_their_window_is_saved(tmp_path, monkeypatch):
    """No other step has the spike's target."""
    monkeypatch.setattr(guard, "FEWEST", 4)
    read, spike = Loader.batch, {17}

    def batch(self, step, shardings):
        batch = read(self, step, shardings)
        return dataclasses.replace(batch, targets=0 * batch.targets + (2 if step + 1 in spike else 1))

    monkeypatch.setattr(Loader, "batch", batch)
    arguments = ["train.guard.spikes=true", "optim.lr=0.01", "optim.warmup=0", "checkpoint.every=16"]
    assert train(tmp_path / "run", *arguments, "train.steps=16") == Exit.DONE
    assert train(tmp_path / "run", *arguments, "train.steps=18") == Exit.DONE  # resumed before the spike
    skipped = [record for record in records(tmp_path / "run") if record.get("skipped")]
    assert [(record["step"], record["reason"]) for record in skipped] == [(17, "loss spike")]
