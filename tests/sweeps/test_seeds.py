"""Runs that differ in their seed, and the median of their metrics."""

import json
import shutil
import statistics
from pathlib import Path

import pytest

from spmd_lm.cli import main
from spmd_lm.config.load import load_run
from spmd_lm.errors import Exit
from spmd_lm.runtime.metrics import read_records
from spmd_lm.sweeps import seeds
from spmd_lm.sweeps.runner import Runner
from spmd_lm.training.loop import train

TINY = """
run: {name: tiny, dir: DIR}
model: {layers: 1, width: 8, heads: 1, context: 8, vocab: 16}
data: {source: synthetic}
optim: {lr: 0.1}
train: {steps: 4, batch: 8, seed: 5, eval_every: 2, eval_batches: 2}
checkpoint: {every: 4}
"""
METRICS = ["eval_loss", "eval_perplexity", "eval_accuracy"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory that holds a configuration and what two seeds of it left: runs/, and their metrics in two.json."""
    root = tmp_path_factory.mktemp("seeds")
    assert command(root, 2, "two.json") == Exit.DONE
    return root


@pytest.fixture
def again(two, tmp_path):
    """A copy of `two` to resume."""
    return Path(shutil.copytree(two, tmp_path / "again"))


def command(root: Path, count: int, result: str, *overrides: str) -> int:
    (root / "tiny.yaml").write_text(TINY.replace("DIR", str(root / "runs")))
    return main(["train", str(root / "tiny.yaml"), *overrides, "--seeds", str(count), "--json", str(root / result)])


def result_of(root: Path, result: str) -> dict:
    return json.loads((root / result).read_text())


def last(root: Path, seed: int) -> dict:
    return read_records(root / "runs" / "cells" / f"seed-{seed}" / "metrics.jsonl")[-1]


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in (root / "runs" / "cells").rglob("*") if path.is_file())
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
def test_each_seed_is_a_separate_run(two):
    assert {path.name for path in (two / "runs" / "cells").iterdir()} == {"seed-5", "seed-6"}
    for seed in (5, 6):
        directory = two / "runs" / "cells" / f"seed-{seed}"
        config = load_run(directory)
        assert (config.train.seed, config.run.name) == (seed, f"tiny-seed-{seed}")
        assert (directory / "checkpoints" / "4").is_dir() and last(two, seed)["step"] == 4
    assert last(two, 5)["eval_loss"] != last(two, 6)["eval_loss"]


@pytest.mark.slow
def test_a_seed_s_run_equals_train_with_that_seed(two, tmp_path):
    config = load_run(two / "runs" / "cells" / "seed-6")
    alone = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "alone")})})
    assert train(alone) == Exit.DONE
    record = read_records(tmp_path / "alone" / "metrics.jsonl")[-1]
    assert [record[name] for name in ("loss", *METRICS)] == [last(two, 6)[name] for name in ("loss", *METRICS)]


@pytest.mark.slow
def test_the_medians_are_of_the_last_evaluations(two):
    result = result_of(two, "two.json")
    assert list(result["median"]) == list(result["seeds"]) == METRICS
    for name in METRICS:
        values = [last(two, seed)[name] for seed in (5, 6)]
        assert result["seeds"][name] == dict(zip(("5", "6"), values, strict=True))
        assert result["median"][name] == statistics.median(values)
    assert (result["directory"], result["exit_code"]) == (str(two / "runs"), 0)


@pytest.mark.slow
def test_the_same_command_again_trains_nothing_and_reports_the_same(two, capsys):
    before = snapshot(two)
    assert command(two, 2, "again.json") == Exit.DONE
    assert snapshot(two) == before and result_of(two, "again.json") == result_of(two, "two.json")
    table = seeds.render(result_of(two, "two.json"))
    assert capsys.readouterr().out.endswith(f"{table}\n")
    first, *lines = table.split("\n")
    assert first.split() == ["median", "seed", "5", "seed", "6"] and [line.split()[0] for line in lines] == METRICS
    assert float(lines[0].split()[1]) == pytest.approx(result_of(two, "two.json")["median"]["eval_loss"], abs=5e-5)


@pytest.mark.slow
def test_more_seeds_leave_finished_ones_alone(again):
    before = snapshot(again)
    assert command(again, 3, "three.json") == Exit.DONE
    after = snapshot(again)
    assert {name: after[name] for name in before} == before
    losses = [last(again, seed)["eval_loss"] for seed in (5, 6, 7)]
    assert result_of(again, "three.json")["median"]["eval_loss"] == statistics.median(losses) == sorted(losses)[1]


def test_a_stop_ends_all_runs_and_reports_no_metrics(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "run", lambda *_: Exit.PREEMPTED)
    assert command(tmp_path, 3, "stopped.json") == Exit.PREEMPTED
    assert result_of(tmp_path, "stopped.json") == {"directory": str(tmp_path / "runs"), "exit_code": 3}
    assert "median" not in capsys.readouterr().out


def test_without_evaluations_there_is_nothing_to_compare(tmp_path, capsys):
    assert command(tmp_path, 2, "none.json", "train.eval_every=0") == Exit.CONFIG
    message = "error: --seeds with train.eval_every=0: there is nothing to compare. Set train.eval_every.\n"
    assert capsys.readouterr().err == message and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_finished_run_without_an_evaluation_is_named(again, capsys):
    path = again / "runs" / "cells" / "seed-6" / "metrics.jsonl"
    path.write_text("")
    assert command(again, 2, "lost.json") == Exit.DATA
    assert (
        f"error: {path} has no evaluation of step 4. Delete {path.parent} to train it again." in capsys.readouterr().err
    )


@pytest.mark.slow
def test_another_recipe_is_refused_before_anything_is_trained(again, capsys):
    before = snapshot(again)
    assert command(again, 3, "other.json", "optim.lr=1e-2") == Exit.CONFIG
    error = capsys.readouterr().err
    assert "were trained with other settings (then -> now):" in error and "seed-5:  optim.lr: " in error
    assert snapshot(again) == before


def test_seeds_out_of_range_and_a_run_in_the_directory_are_refused(tmp_path, capsys):
    assert command(tmp_path, 2, "many.json", f"train.seed={2**32 - 1}") == Exit.CONFIG
    assert "seeds are below 2**32. Lower train.seed." in capsys.readouterr().err
    (tmp_path / "runs" / "checkpoints").mkdir(parents=True)
    assert command(tmp_path, 2, "in.json") == Exit.CONFIG
    assert "it is a run itself. Choose another run.dir." in capsys.readouterr().err
