"""A sweep's page, made of cells whose files are written here."""

import json
import re
from pathlib import Path

import pytest

from spmd_lm.config.load import load
from spmd_lm.runtime.metrics import BUCKETS, Status, write_atomically
from spmd_lm.sweeps.cells import Cell, Outcome
from spmd_lm.sweeps.report import make_report
from spmd_lm.sweeps.scaling import efficiencies
from spmd_lm.sweeps.table import CellTable
from tests.processes import ROOT

DONE = Outcome("done", 0)
PUBLISHED = {"source": "a paper <1>", "efficiency": {"model parallel": {1: 1.0, 8: 0.77}}}


def make_cell(tmp_path: Path, name: str, seconds: float, *overrides: str) -> Cell:
    """A finished cell of three steps, each of which took so long."""
    config = load(ROOT / "configs/debug.yaml", [f"run.dir={tmp_path / name}", "train.steps=3", *overrides])
    cell = Cell(name, {"parallel.model": config.parallel.model}, config)
    cell.prepare()
    tokens = config.train.batch * config.model.context
    records = [
        {"step": step, "loss": 5.0 - step, "tokens": step * tokens, "tokens_per_second": tokens / seconds,
         "seconds": seconds, "mfu": None}
        for step in (1, 2, 3)
    ]  # fmt: skip
    write_atomically(cell.directory / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    goodput = dict.fromkeys(BUCKETS, 1.0)
    status = Status(path=cell.directory / "status.json", state="done", step=3, restarts=0, goodput=goodput, exit_code=0)
    status.write()
    return cell


def make_page(cells, outcomes=None, published=PUBLISHED):
    table = CellTable(cells)
    records = table.records(outcomes or {cell.id: DONE for cell in cells})
    return make_report("name", cells, records, table.runs, published), records


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
