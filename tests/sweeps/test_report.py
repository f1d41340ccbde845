"""A sweep's page, made of cells whose files are written here."""

import json
import re

import pytest

from spmd_lm.config.load import load
from spmd_lm.files import write_atomically
from spmd_lm.sweeps.cells import Cell, Outcome
from spmd_lm.sweeps.scaling import efficiencies
from spmd_lm.sweeps.table import CellTable, write_tables
from tests.processes import ROOT
from tests.sweeps.cell_files import DONE, make_cell, make_page


def figures_of(page: str) -> list[str]:
    return re.findall(r'data-figure="([\w-]+)"', page)


def on(devices: int, model: int, *more: str) -> list[str]:
    return [f"run.simulate_devices={devices}", f"parallel.model={model}", *more]


def test_the_page_has_cells_curves_costs_and_scaling(tmp_path):
    cells = [make_cell(tmp_path, f"model-{n}", 0.1 * n, *on(n, n)) for n in (1, 2, 4)]
    page, _ = make_page(cells)
    assert {"metric-loss", "median-tokens-per-second", "memory", "efficiency"} <= {*figures_of(page)}
    assert len(figures_of(page)) == len({*figures_of(page)})
    assert "3 cells: 3 done" in page and "simulated: all of them share the" in page
    assert "measured here" in page and "published: a paper &lt;1&gt;" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_failed_and_pending_cells_are_shown_as_such(tmp_path):
    good = make_cell(tmp_path, "good", 0.1, *on(2, 1))
    config = load(ROOT / "configs/debug.yaml", [f"run.dir={tmp_path / 'bad'}"])
    cells = [good, Cell("bad", {"parallel.model": 3}, config), Cell("later", {"parallel.model": 4}, config)]
    outcomes = {"good": DONE, "bad": Outcome("failed", 137, "killed <b>"), "later": Outcome("pending")}
    page, records = make_page(cells, outcomes)
    assert "bad failed with exit code 137: killed &lt;b&gt;" in page and "<b>" not in page
    assert "1 done, 1 failed, 1 pending" in page and "efficiency" not in figures_of(page)
    assert records[1]["loss"] is None and records[1]["exit_code"] == 137


def test_a_sweep_of_which_nothing_has_started_has_a_page(tmp_path):
    config = load(ROOT / "configs/debug.yaml", [f"run.dir={tmp_path / 'x'}"])
    page, _ = make_page([Cell("x", {}, config)], {"x": Outcome("pending")}, {})
    assert "1 cell: 1 pending" in page and not figures_of(page)


def test_efficiencies_of_simulated_devices_are_the_machine_s(tmp_path):
    """Twice the time for the same work over as many cores is half the efficiency."""
    cells = [make_cell(tmp_path, f"{n}", 0.1 * n, *on(n, n)) for n in (1, 2)]
    cells.append(make_cell(tmp_path, "data", 0.4, *on(4, 2, "parallel.data=2")))
    records = CellTable(cells).records({cell.id: DONE for cell in cells})
    found = efficiencies(cells, records)
    assert found.strong and found.simulated
    assert found.measured == {
        "model parallel": {1: 1.0, 2: pytest.approx(0.5)},
        "model + data parallel": {4: pytest.approx(0.25)},
    }
    real = [Cell(c.id, c.values, load(ROOT / "configs/debug.yaml", [f"parallel.model={c.config.parallel.model}"]))
            for c in cells[:2]]  # fmt: skip
    assert efficiencies(real, records[:2]).measured == {"model parallel": {1: 1.0, 2: pytest.approx(0.25)}}
    assert efficiencies(cells[:1], records[:1]) is None


def test_weak_scaling_counts_the_work(tmp_path):
    cells = [make_cell(tmp_path, f"{n}", 0.1, *on(n, n, f"train.batch={16 * n}")) for n in (1, 2)]
    found = efficiencies(cells, CellTable(cells).records({cell.id: DONE for cell in cells}))
    assert not found.strong and found.measured == {"model parallel": {1: 1.0, 2: pytest.approx(2.0)}}


def law_cells(tmp_path, law):
    """Three sizes and three budgets, whose last losses follow a law."""
    cells = []
    for width in (32, 64, 128):
        for steps in (10, 40, 160):
            name = f"{width}-{steps}"
            cell = make_cell(tmp_path, name, 0.1, *on(1, 1, f"model.width={width}", f"train.steps={steps}"))
            status = json.loads((cell.directory / "status.json").read_text())
            write_atomically(cell.directory / "status.json", json.dumps(status | {"step": steps}))
            tokens, parameters = steps * 16 * 64, CellTable([cell]).records({name: DONE})[0]["parameters"]
            record = {"step": steps, "loss": law(parameters, tokens), "tokens": tokens}
            write_atomically(cell.directory / "metrics.jsonl", json.dumps(record) + "\n")
            cells.append(cell)
    return cells


def test_sizes_and_budgets_are_fitted(tmp_path):
    cells = law_cells(tmp_path, lambda n, d: 0.8 + 30 / n**0.35 + 115 / d**0.4)
    page, _ = make_page(cells)
    assert {"scaling-law-tokens", "scaling-law-parameters"} <= {*figures_of(page)}
    exponents = dict(re.findall(r"<td>(alpha|beta)</td><td class=number>([\d.]+)</td>", page))
    assert float(exponents["alpha"]) == pytest.approx(0.35, rel=0.02)
    assert float(exponents["beta"]) == pytest.approx(0.4, rel=0.02)


def test_losses_that_no_law_fits_say_so(tmp_path):
    page, _ = make_page(law_cells(tmp_path, lambda n, d: 0.0))
    assert "scaling law: the loss of run 0 is 0" in page and "scaling-law-tokens" not in figures_of(page)


@pytest.mark.parametrize("key", ["id", "status", "exit_code", "reason", "run_dir", "parallel.model", "step", "devices"])
@pytest.mark.parametrize("value", ["<other>", 7, [1], None, 1e308, "\ud800"])
def test_a_cell_s_own_records_replace_nothing_of_its_row(key, value, tmp_path):
    cell = make_cell(tmp_path, "a", 0.1)
    expected = CellTable([cell]).records({"a": DONE})
    with open(cell.directory / "metrics.jsonl", "a") as file:
        last = {"step": 3, "loss": 2.0, "tokens": 5} | ({key: value} if key != "step" else {})
        file.write(json.dumps(last) + "\n")
    found = CellTable([cell]).records({"a": DONE})
    assert found[0].get(key) == expected[0].get(key)
    write_tables(found, tmp_path)
    assert (tmp_path / "cells.csv").read_text().splitlines()[1].startswith("a,done,0,,")


@pytest.mark.parametrize(
    "key",
    [
        *("loss", "\ud800"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tokens_per_second", "mfu", "seconds", "tokens")),
        pytest.param("eval_loss", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("value", ["text", "\ud800", [[1]], {"a": 1}, True, -1, 10**400, 1e400, 1e308, 5e-324])
def test_any_value_of_a_cell_leaves_the_sweep_its_tables_and_page(key, value, tmp_path):
    cells = [make_cell(tmp_path, name, 0.1, f"run.simulate_devices={n}") for name, n in (("a", 1), ("b", 2))]
    for cell in cells:
        path = cell.directory / "metrics.jsonl"
        path.write_text(path.read_text() + json.dumps({"step": 3, "tokens": 9, key: value}) + "\n")
    page, records = make_page(cells)
    write_tables(records, tmp_path)
    assert "Cells" in page and [record["id"] for record in records] == ["a", "b"]


@pytest.mark.parametrize("code", [10**400, -1, 256, 1e400, "x", None, [1]])
def test_an_end_that_no_process_has_is_none(code, tmp_path):
    cell = make_cell(tmp_path, "a", 0.1)
    (cell.directory / "status.json").unlink()
    (cell.directory / "exit.json").write_text(json.dumps({"exit_code": code, "reason": "\ud800"}))
    assert cell.outcome() == Outcome("pending")
