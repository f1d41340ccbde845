"""A sweep's file and the cells that it makes."""

from pathlib import Path

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.sweeps.cells import make_cells
from spmd_lm.sweeps.sweep_file import Alternative, cell_ids, read_sweep
from tests.processes import ROOT

DEBUG = ROOT / "configs" / "debug.yaml"


def written(tmp_path: Path, text: str, name: str = "s") -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"name: {name}\nconfig: {DEBUG}\n{text}")
    return path


def cells(tmp_path: Path, text: str, *overrides: str):
    return make_cells(read_sweep(written(tmp_path, text)), tmp_path / "out", overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        cells(tmp_path, text, *overrides)
    return str(error.value)


def test_grid_and_zip_are_crossed_and_when_selects(tmp_path):
    text = """
grid:
  parallel.model: [1, 2, 4]
  optim.lr: {geomspace: [1e-4, 1e-2, 3]}
  train.steps: 7
zip:
  model.width: [64, 128]
  model.heads: [4, 8]
when: parallel.model < 4 or model.width == 128
"""
    made = cells(tmp_path, text, "run.simulate_devices=4")
    assert len(made) == 2 * 3 * 2 + 1 * 3 * 1
    assert made[0].id == "model-1_lr-0.0001_width-64_heads-4"
    assert [*dict.fromkeys(cell.config.optim.lr for cell in made)] == [1e-4, 1e-3, 1e-2]
    assert {(c.config.model.width, c.config.model.heads) for c in made} == {(64, 4), (128, 8)}
    assert {c.config.parallel.model for c in made if c.config.model.width == 64} == {1, 2}
    assert {(c.config.train.steps, c.config.run.simulate_devices) for c in made} == {(7, 4)}
    assert made[0].directory == tmp_path / "out" / "cells" / made[0].id
    assert made[0].config.run.name == f"s-{made[0].id}" and "train.steps" not in made[0].values


def test_several_zips_are_crossed_with_each_other(tmp_path):
    text = "zip: [{model.width: [64, 128], model.heads: [4, 8]}, {train.steps: [1, 2], optim.warmup: [0, 1]}]"
    assert len(cells(tmp_path, text)) == 4


def test_whole_ranges_stay_whole(tmp_path):
    made = cells(tmp_path, "grid: {train.steps: {geomspace: [10, 1000, 3]}}")
    assert [cell.values["train.steps"] for cell in made] == [10, 100, 1000]


def test_ids_are_safe_unique_and_short():
    paths = ["a/b.txt", "a b.txt", "x" * 300, ["p", "q"]]
    ids = cell_ids([[Alternative({"data.path": path})] for path in paths])
    assert len({*ids}) == 4 and max(map(len, ids)) <= 100
    assert all(character.isalnum() or character in "._-" for id in ids for character in id)
    one, other = Alternative({"parallel.model": 1}), Alternative({"a.model": 2})
    assert cell_ids([[one, other]]) == ["parallel-model-1_a-model-2"]


def test_what_varies_together_may_have_a_name(tmp_path):
    text = "zip: {id: [S, XL], model.width: [64, 128], model.heads: [4, 8]}\ngrid: {train.seed: [1]}"
    assert [cell.id for cell in cells(tmp_path, text)] == ["seed-1_S", "seed-1_XL"]
    assert "id" not in cells(tmp_path, text)[0].values
    assert [cell.id for cell in cells(tmp_path, "zip: {id: [a, again], optim.lr: [1, 1]}")] == ["a", "again"]
    assert "lists of the same length, got id 1" in problems(tmp_path, text.replace("S, XL", "S"))


def test_values_added_later_leave_the_ids_of_the_others(tmp_path):
    before = [cell.id for cell in cells(tmp_path, "grid: {optim.lr: [1e-3], train.seed: [1]}")]
    after = [cell.id for cell in cells(tmp_path, "grid: {optim.lr: [1e-3, 2e-3], train.seed: [1, 2]}")]
    assert before == ["lr-0.001_seed-1"] and before[0] in after and len(after) == 4


@pytest.mark.parametrize(
    "text, problem",
    [
        ("grid: {parallel.modle: [1, 2]}", "unknown key 'modle'. Did you mean 'model'? (in every cell)"),
        ("grid: {model.width: [64, 30]}", "(in cell width-30)"),
        ("grid: {optim.lr: []}", "grid: optim.lr: no values"),
        ("grid: {}", "grid: nothing varies"),
        ("", "grid: nothing varies"),
        ("grid: {train.steps: 3}", "grid: nothing varies"),
        ("grid: {lr: [1, 2]}", "lr: expected section.key"),
        ("grid: {optim.lr: [1, 1]}", "a value stands twice"),
        ("grid: {optim.lr: [1]}\nzip: {optim.lr: [2], train.steps: [2]}", "optim.lr: stands twice"),
        ("zip: {optim.lr: [1, 2], train.steps: [1]}", "lists of the same length, got optim.lr 2, train.steps 1 values"),
        ("zip: {optim.lr: 3}", "lists of the same length, got optim.lr no values"),
        ("zip: {optim.lr: [1, 1], train.steps: [2, 2]}", "zip: optim.lr, train.steps: the same values stand twice"),
        ("zip: {id: [a/b, a b], optim.lr: [1, 2]}", "zip: id: a name stands twice"),
        ("zip: {id: [a, b]}", "zip: nothing varies"),
        ("grid: {optim.lr: [1, 2], optim.lr.x: [1, 2]}", "optim.lr: optim.lr.x is a part of it"),
        ("grid: [1]", "grid and zip: expected mappings"),
        ("gird: {optim.lr: [1]}", "gird: unknown key. Did you mean grid?"),
        ("grid: {run.dir: [a, b]}", "run.dir: the sweep sets it"),
        ("grid: {optim.lr: {geomspace: [0, 1, 3]}}", "expected geomspace: [first, last, count]"),
        ("grid: {train.steps: {geomspace: [1, 3, 9]}}", "expected geomspace: [first, last, count]"),
        ("grid: {optim.lr: [1, 2]}\nwhen: optim.lr > 2", "when: no cell is left"),
        ("grid: {optim.lr: [1, 2]}\nwhen: 3", "when: expected a condition"),
        ("grid: {optim.lr: [1, 2]}\npublished: {source: x}", "published: expected source"),
        ("grid: {optim.lr: [1]}\npublished: {source: x, efficiency: {a: {}}}", "published: expected source"),
        ("grid: {optim.lr: [1]}\npublished: {source: x, efficiency: {a: {2: .nan}}}", "published: expected source"),
        ("grid: {optim.lr: {geomspace: [1.0, 2.0, 9000]}, train.steps: [1, 2]}", "18,000 cells"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, text, problem):
    assert problem in problems(tmp_path, text)


def test_cells_that_cannot_be_laid_out_are_named(tmp_path):
    told = problems(tmp_path, "grid: {parallel.model: [1, 3, 16, 4]}", "run.simulate_devices=8")
    assert "parallel.model=3" in told and "(in cell model-3)" in told and "(in cell model-16)" in told
    assert "Nothing was started. `when` leaves out cells" in told and "model-4" not in told


def test_a_name_is_one_directory(tmp_path):
    for name in ("../x", "a/b", "''", ".", "x" * 101):
        with pytest.raises(ConfigError, match="name: expected letters"):
            read_sweep(written(tmp_path, "grid: {optim.lr: [1]}", name))


def test_overrides_of_swept_keys_are_refused(tmp_path):
    told = problems(tmp_path, "grid: {optim.lr: [1e-3], train.steps: 5}", "train.steps=6")
    assert told.startswith("command line: train.steps=6: the sweep sets this key.")
    for override, key in (("run.dir=x", "this key"), ("run={name: x}", "run.dir"), ("optim={lr: 1}", "optim.lr")):
        told = problems(tmp_path, "grid: {optim.lr: [1e-3]}", override)
        assert told.startswith(f"command line: {override}: the sweep sets {key}.")


def test_a_configuration_that_no_file_can_be_is_refused(tmp_path):
    path = written(tmp_path, "grid: {optim.lr: [1]}")
    path.write_text(path.read_text().replace(f"config: {DEBUG}", r'config: "a\0b"'))
    with pytest.raises(ConfigError, match="no file can have this name"):
        make_cells(read_sweep(path), tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_make_cells(path, tmp_path):
    made = make_cells(read_sweep(path), tmp_path)
    assert made and path.stem == read_sweep(path).name


def test_a_shipped_sweep_and_a_shipped_configuration_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(make_cells(read_sweep(Path("sweeps/layouts")), tmp_path)) == 16
    path = written(tmp_path, "grid: {train.seed: [1, 2]}")
    path.write_text(path.read_text().replace(str(DEBUG), "debug"))
    assert len(make_cells(read_sweep(path), tmp_path)) == 2
