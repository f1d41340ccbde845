"""What a sweep found: a record for each cell, as cells.csv and cells.parquet have it.

Columns: id, status, exit_code, reason, run_dir; the keys that vary; then figures, empty where there are none yet."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_lm.errors import CheckpointError
from spmd_lm.runtime.metrics import Record, Status, read_records, write_atomically
from spmd_lm.sweeps.cells import Cell, Outcome

SPEEDS = ("tokens_per_second", "mfu", "seconds")
"""Of a step: medians, without the first record, which has the first step's slow start."""


class CellTable:
    """A record for each cell, with the same columns; a cell's figures are read again when its outcome has changed."""

    def __init__(self, cells: Sequence[Cell]):
        self._cells = cells
        self._read: dict[str, tuple[Outcome, dict[str, Any]]] = {}  # by ID

    def records(self, outcomes: Mapping[str, Outcome]) -> list[Record]:
        records = []
        for cell in self._cells:
            outcome = outcomes[cell.id]
            if cell.id not in self._read or self._read[cell.id][0] != outcome:
                self._read[cell.id] = outcome, figures(cell)
            own = {"id": cell.id, **outcome._asdict(), "run_dir": str(cell.directory), **cell.values}
            records.append(own | self._read[cell.id][1])
        columns = list(dict.fromkeys(column for record in records for column in record))
        return [{column: record.get(column) for column in columns} for record in records]


def figures(cell: Cell) -> dict[str, Any]:
    """What its run's files say: hardware, the last record, and medians of the speed."""
    try:
        status, records = Status.read(cell.directory), read_records(cell.directory / "metrics.jsonl")
    except CheckpointError:  # its status says so
        return {}
    if status is None:
        return {}
    found: dict[str, Any] = {"step": status.step, "restarts": status.restarts}
    found |= {key: value for key, value in planned(cell).items() if key != "mesh"}
    if records:
        found |= {key: value for record in records for key, value in record.items() if key not in ("step", *SPEEDS)}
        for key in SPEEDS:
            values = [record[key] for record in records[1:] or records if record.get(key) is not None]
            found[key] = statistics.median(values) if values else None
    return found


def planned(cell: Cell) -> dict[str, Any]:
    """What follows from its configuration and the devices that it simulates; nothing where those are real."""
    devices = cell.config.run.simulate_devices
    if not devices:
        return {}
    from spmd_lm.planning.plan_report import describe  # imports jax

    plan = describe(cell.config)
    bubble = {"bubble": plan["pipeline"]["bubble"]} if plan["pipeline"] else {}
    return bubble | {
        "mesh": plan["mesh"],
        "devices": plan["devices"],
        "parameters": plan["parameter_count"],
        "memory_bytes": sum(plan["memory"].values()),
        "model_flops_per_step": plan["model_flops_per_step"],
    }


def write_tables(records: Sequence[Record], directory: Path) -> None:
    """cells.csv and cells.parquet, each complete or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_atomically(directory / "cells.csv", text.getvalue())
    write_parquet(records, directory / "cells.parquet")


def write_parquet(records: Sequence[Record], path: Path) -> None:
    """A column's type is that of its values: whole numbers, numbers, true or false, or else text."""
    from arro3.core import Array, DataType, Table
    from arro3.io import write_parquet

    types = {bool: DataType.bool(), int: DataType.int64(), float: DataType.float64(), str: DataType.string()}
    columns: dict[str, Any] = {}
    for name in records[0]:
        values = [record[name] for record in records]
        kinds = {type(value) for value in values if value is not None}
        kind = float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else str
        kind = kind if kind in types else str
        columns[name] = Array([None if value is None else kind(value) for value in values], type=types[kind])
    partial = path.with_name(path.name + ".tmp")
    write_parquet(Table.from_pydict(columns), str(partial))
    partial.replace(path)
