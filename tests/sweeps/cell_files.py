"""Finished cells of a sweep, without training, and the page of them."""

import json
from pathlib import Path

from spmd_lm.config.load import load
from spmd_lm.files import write_atomically
from spmd_lm.runtime.metrics import BUCKETS, Status
from spmd_lm.sweeps.cells import Cell, Outcome
from spmd_lm.sweeps.report import make_report
from spmd_lm.sweeps.table import CellTable
from tests.processes import ROOT

DONE = Outcome("done", 0)
PUBLISHED = {"source": "a paper <1>", "efficiency": {"model parallel": {1: 1.0, 8: 0.77}}}


def make_cell(tmp_path: Path, name: str, seconds: float, *overrides: str) -> Cell:
    """A finished cell of three steps of `seconds` each."""
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
