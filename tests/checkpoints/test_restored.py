"""Runs with adapters: their checkpoints hold what is trained, and say whose parameters it belongs to."""

import json
import shutil

import numpy as np
import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.merge import merge_run
from spmd_lm.checkpoints.restored import open_run, restore_run
from spmd_lm.cli import main
from spmd_lm.config.load import load, load_run
from spmd_lm.errors import CheckpointError, Exit
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.training.loop import train
from spmd_lm.training.replay import replay

SIZES = ["model.layers=2", "model.width=64", "model.heads=2", "model.head_width=64", "model.vocab=256"]
SIZES += ["model.context=16", "train.batch=8", "train.log_every=1", "data.source=synthetic", "run.simulate_devices=8"]
SIZES += ["optim.warmup=0", "optim.eps=1e-6", "model.dropout=0", "model.attention_dropout=0"]
LORA = ["adapter.kind=lora", "adapter.rank=2", "adapter.dropout=0.1", "adapter.base=nf4", "checkpoint.every=1"]
LORA += ["precision.frozen=bfloat16", "precision.compute=float32"]
LAYOUT = ["parallel.model=2", "parallel.zero=3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """base: a run of another model's parameters.  adapted: one with adapters of it, after two steps."""
    where = tmp_path_factory.mktemp("runs")
    configure(where, "base", "train.steps=1", "checkpoint.every=1")
    configure(where, "adapted", f"run.init_from={where / 'base'}", "train.steps=2", *LORA, *LAYOUT)
    return where


def configure(where, name: str, *overrides: str):
    config = load("debug", [f"run.dir={where / name}", *SIZES, *overrides])
    assert train(config) is Exit.DONE
    return config


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of both runs, which a test may change, complete with paths."""
    copy = shutil.copytree(runs, tmp_path / "runs")
    checkpoints = Checkpointer(copy / "adapted" / "checkpoints")
    for step in checkpoints.steps():
        record = checkpoints.record(step)
        record.meta["base"]["directory"] = str(copy / "base")
        record.write(checkpoints.path(step))
    config = copy / "adapted" / "config.yaml"
    config.write_text(config.read_text().replace(str(runs), str(copy)))
    return copy


def test_what_is_saved_is_what_is_trained(runs):
    record = Checkpointer(runs / "adapted" / "checkpoints").record(2)
    params = {path for path in record.leaves if path.startswith("params.")}
    assert params and all("_adapter." in path for path in params)
    assert {path.split(".", 2)[2] for path in record.leaves if path.startswith("opt_state.mu.")} == {
        path.removeprefix("params.") for path in params
    }
    base = record.meta["base"]
    assert base["directory"] == str(runs / "base") and base["step"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "error"), [(LAYOUT, 0), (["parallel.pipe=2", "parallel.zero=1"], 1e-11)])
def test_a_run_goes_on_on_any_mesh_as_if_it_had_not_stopped(copy, layout, error):
    """Layouts agree to 1e-11; its own gives the same bits."""
    how = [f"run.init_from={copy / 'base'}", *LORA, "adapter.base=nf4-double", "optim.decay_steps=3"]
    how += [f"precision.{each}=float64" for each in ("params", "compute", "reduce")]
    straight = configure(copy, "straight", "train.steps=3", *how, *LAYOUT)
    configure(copy, "stopped", "train.steps=2", *how, *LAYOUT)
    resumed = configure(copy, "stopped", "train.steps=3", *how, *layout)
    (_, want, _), (_, got, _) = restore_run(straight), restore_run(resumed)
    got = leaves_by_path(got)
    for path, leaf in leaves_by_path(want).items():
        np.testing.assert_allclose(got[path], leaf, atol=error * ("_adapter." in path), rtol=0, err_msg=path)


def test_the_same_step_again_has_the_same_bits(runs):
    again = replay(load_run(runs / "adapted"), 2)
    assert again["same"] and len(again["compared"]) == 2


@pytest.mark.slow
def test_a_base_that_is_gone_moved_or_changed_is_told(copy):
    config = load_run(copy / "adapted")
    (copy / "base").rename(copy / "moved")
    with pytest.raises(CheckpointError, match=r"of the model in .*base, where no run is. Set run.init_from to where"):
        open_run(config)
    moved = load_run(copy / "adapted", [f"run.init_from={copy / 'moved'}"])
    assert open_run(moved)[2] == 2
    shutil.rmtree(copy / "moved")
    configure(copy, "base", "train.steps=1", "checkpoint.every=1", "train.seed=9")
    with pytest.raises(CheckpointError, match=r"holds adapters of another model than step 1 of .*: fingerprint"):
        open_run(config)
    configure(copy, "base", "train.steps=4", "checkpoint.every=1", "train.seed=9")
    with pytest.raises(CheckpointError, match=r"has steps 3, 4, but step 1 is the base of"):
        open_run(config)


@pytest.mark.slow
def test_what_was_drawn_is_no_other_run_s(runs, tmp_path):
    configure(tmp_path, "drawn", "train.steps=1", "adapter.kind=lora", "checkpoint.every=1")
    with pytest.raises(CheckpointError, match=r"holds adapters of what train.seed drew, not of run.init_from="):
        open_run(load_run(tmp_path / "drawn", [f"run.init_from={runs / 'base'}"]))


def test_a_record_without_its_base_is_told(copy):
    checkpoints = Checkpointer(copy / "adapted" / "checkpoints")
    record = checkpoints.record(2)
    del record.meta["base"]
    record.write(checkpoints.path(2))
    with pytest.raises(CheckpointError, match="does not say which model it has adapters of"):
        open_run(load_run(copy / "adapted"))


def test_adapters_are_no_base(copy):
    with pytest.raises(CheckpointError, match=r"holds an adapter alone \(lora\), not its model. Merge both first"):
        configure(copy, "next", f"run.init_from={copy / 'adapted'}", "train.steps=1")


@pytest.mark.slow
def test_merging_moves_logits_by_rounding_alone(runs, tmp_path, capsys):
    result = merge_run(load_run(runs / "adapted"), tmp_path / "merged")
    assert 0 < result["moved"] < 1e-5
    assert main(["merge", str(runs / "base"), str(tmp_path / "none")]) == Exit.CONFIG
    assert "has no adapters to merge" in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_merged_and_unmerged_say_the_same(runs, tmp_path, capsys):
    merge_run(load_run(runs / "adapted"), tmp_path / "merged")
    line = ["--prompt", "1 2 3", "--tokens", "8", "--greedy", "--json", "-"]
    texts = []
    for run in ([tmp_path / "merged"], [runs / "adapted"], [runs / "base", "--adapter", runs / "adapted"]):
        assert main(["generate", *map(str, run), *line]) == Exit.DONE
        texts.append(json.loads(capsys.readouterr().out)[0]["text"])
    assert texts[0] == texts[1] == texts[2]
