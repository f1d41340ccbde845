"""A sweep's table: a record for each cell, written to cells.csv and cells.parquet.

Columns: id, status, exit_code, reason, run_dir; the keys that vary; then figures, empty while they are unknown."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_lm.errors import UserError
from spmd_lm.files import write_atomically
from spmd_lm.reports.runs import RunFiles, peak_bytes, read_run
from spmd_lm.runtime.metrics import Record, is_number
from spmd_lm.sweeps.cells import Cell, Outcome

SPEEDS = ("tokens_per_second", "mfu", "seconds")  # medians, without the first record and its slow start
PLANNED = ("devices", "parameters", "memory_bytes", "model_flops_per_step", "bubble")  # from plans, never from metrics
WHOLE = ("exit_code", "peak_bytes")  # integer columns that may be empty in every cell


class CellTable:
    """Records of all cells, with the same columns; a cell's files are read again once its outcome has changed."""

    def __init__(self, cells: Sequence[Cell]):
        self._cells = cells
        self._read: dict[str, Outcome] = {}  # by ID: the outcome when its files were read
        self._damage: dict[str, str] = {}  # by ID: the reason if its files could not be read
        self.runs: dict[str, RunFiles] = {}  # files of the cells that have started, by ID

    def records(self, outcomes: Mapping[str, Outcome]) -> list[Record]:
        records = []
        for cell in self._cells:
            outcome = outcomes[cell.id]
            if self._read.get(cell.id) != outcome:
                self._read[cell.id] = outcome
                self._read_files(cell)
            reason = outcome.reason or self._damage.get(cell.id, "")
            outcome = outcome._replace(reason=reason)
            own = {"id": cell.id, **outcome._asdict(), "run_dir": str(cell.directory), **cell.values}
            found = figures(self.runs[cell.id]) if cell.id in self.runs else {}
            records.append(own | found | own)  # `own` first, and not replaced by metrics of the same names
        columns = list(dict.fromkeys(column for record in records for column in record))
        return [{column: record.get(column) for column in columns} for record in records]

    def _read_files(self, cell: Cell) -> None:
        self._damage.pop(cell.id, None)
        if (cell.directory / "status.json").exists():
            try:
                self.runs[cell.id] = read_run(cell.directory)
            except UserError as error:  # a finished cell stays done, without figures
                self.runs.pop(cell.id, None)
                self._damage[cell.id] = str(error)


def figures(run: RunFiles) -> dict[str, Any]:
    """Step, restarts, plan and peak memory of a run, the last values of its metrics, and medians of its speed."""
    assert run.status is not None
    found: dict[str, Any] = {"step": run.status.step, "restarts": run.status.restarts}
    found |= planned_figures(run.plan) if run.plan else {}
    found |= {"peak_bytes": peak_bytes(run)}
    metrics = {key: value for record in run.records for key, value in record.items() if key not in SPEEDS}
    found |= {
        key: value
        for key, value in metrics.items()
        if key not in {*found, *PLANNED} and (value is None or is_number(value))
    }
    for key in SPEEDS if run.records else ():
        values = [record[key] for record in run.records[1:] or run.records if is_number(record.get(key))]
        found[key] = statistics.median(values) if values else None
    return found


def planned_figures(plan: Mapping[str, Any]) -> dict[str, Any]:
    figures = {
        "devices": plan["devices"],
        "parameters": plan["parameter_count"],
        "memory_bytes": sum(plan["memory"].values()),
        "model_flops_per_step": plan["model_flops_per_step"],
    }
    return figures | ({"bubble": plan["pipeline"]["bubble"]} if plan["pipeline"] else {})


def write_tables(records: Sequence[Record], directory: Path) -> None:
    """Writes cells.csv and cells.parquet, each atomically."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_atomically(directory / "cells.csv", valid_text(text.getvalue()))
    write_atomically(directory / "cells.parquet", parquet(records))


def valid_text(value: Any) -> str:
    """The value as text that is valid UTF-8: half of a surrogate pair, which JSON allows, is escaped."""
    return str(value).encode(errors="backslashreplace").decode()


def parquet(records: Sequence[Record]) -> bytes:
    """A parquet file.  A column's type is that of its values: integers, numbers, booleans, or else text; empty columns
    are numbers, as most become later, or integers if in WHOLE."""
    from arro3.core import Array, DataType, Table
    from arro3.io import write_parquet

    types = {bool: DataType.bool(), int: DataType.int64(), float: DataType.float64(), valid_text: DataType.string()}
    columns: dict[str, Any] = {}
    for name in records[0]:
        values = [record[name] for record in records]
        kinds = {type(value) for value in values if value is not None}
        kind: Any = kinds.pop() if len(kinds) == 1 else float if kinds <= {int, float} else valid_text
        if not any(value is not None for value in values) and name in WHOLE:
            kind = int
        kind = kind if kind in types else valid_text
        values = [None if value is None else kind(value) for value in values]
        columns[valid_text(name)] = Array(values, type=types[kind])
    file = io.BytesIO()
    write_parquet(Table.from_pydict(columns), file)
    return file.getvalue()
