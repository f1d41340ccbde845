"""A sweep's scaling: the efficiency of more devices, and loss against size and data."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from spmd_lm.runtime.metrics import Record
from spmd_lm.sweeps.cells import Cell

Series = dict[str, dict[int, float]]  # efficiencies by series and number of devices


class Efficiencies(NamedTuple):
    measured: Series
    strong: bool  # all cells do the same work
    simulated: bool  # devices are one machine's cores, so the efficiency is the machine's, not per device


def efficiencies(cells: Sequence[Cell], records: Sequence[Mapping]) -> Efficiencies | None:
    """Model FLOP/s per device, relative to the fastest cell with the fewest devices; None if finished cells do not have
    different numbers of devices.  Among cells with the same kind of layout and devices, the fastest counts."""
    timed = [
        (cell, record)
        for cell, record in zip(cells, records, strict=True)
        if record.get("status") == "done" and record.get("seconds") and record.get("devices")
    ]
    if len({record["devices"] for _, record in timed}) < 2:
        return None
    simulated = all(cell.config.run.simulate_devices for cell, _ in timed)
    fewest = min(record["devices"] for _, record in timed)
    base = max(_speed(record, simulated) for _, record in timed if record["devices"] == fewest)
    combined = any(cell.config.parallel.model * cell.config.parallel.pipe > 1 and _has_data(cell) for cell, _ in timed)
    measured: Series = defaultdict(dict)
    for cell, record in timed:
        name = "model parallel"
        if _has_data(cell):
            name = "model + data parallel" if combined else "data parallel"
        relative = _speed(record, simulated) / base
        measured[name][record["devices"]] = max(relative, measured[name].get(record["devices"], 0.0))
    strong = len({record["model_flops_per_step"] for _, record in timed}) == 1
    return Efficiencies(dict(measured), strong, simulated)


def _has_data(cell: Cell) -> bool:
    return cell.config.parallel.data * cell.config.parallel.replica > 1


def _speed(record: Mapping, simulated: bool) -> float:
    return record["model_flops_per_step"] / record["seconds"] / (1 if simulated else record["devices"])


def losses(records: Sequence[Record]) -> list[tuple[int, int, float]]:
    """(parameters, tokens, loss) of the finished cells, for a scaling law; evaluation losses if all have them."""
    done = [r for r in records if r["status"] == "done" and r.get("parameters") and r.get("tokens")]
    key = "eval_loss" if all(record.get("eval_loss") is not None for record in done) else "loss"
    return [(r["parameters"], r["tokens"], r[key]) for r in done if r.get(key) is not None]
