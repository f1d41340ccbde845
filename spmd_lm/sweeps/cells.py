"""The cells of a sweep: each is a run in a directory of its own, which records its state.

A cell's directory, cells/ID/, holds a run's files, and its output, output.log.  `exit.json` exists once its process has
ended without finishing: a run that fails before it starts writes no status."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm.config.load import CONFIG_FILE, load, make_layer, write_config
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CheckpointError, ConfigError, Exit
from spmd_lm.files import open_regular, parse_json, read_bytes, write_atomically
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.runtime.metrics import Status
from spmd_lm.runtime.outputs import writing
from spmd_lm.sweeps.sweep_file import CELL_KEYS, SweepFile, Values

IGNORED_CHANGES = ("  parallel.", "  checkpoint.", "  train.log_every:")  # prefixes of keys that do not affect learning

STOPPED = (Exit.PREEMPTED, Exit.INTERRUPTED)

MAX_END_BYTES = 2**16  # read of exit.json, and of the end of output.log


class Outcome(NamedTuple):
    status: str  # pending | running | interrupted | preempted | failed | done
    exit_code: int | None = None
    reason: str = ""  # why it failed


@dataclass(frozen=True)
class Cell:
    id: str
    values: Values  # values of the keys that vary
    config: RunConfig

    @property
    def directory(self) -> Path:
        return self.config.run.directory

    def outcome(self) -> Outcome:
        try:
            status = Status.read(self.directory)
        except CheckpointError as error:
            return Outcome("failed", int(error.code), str(error))
        if status and status.state == "done" and status.step >= self.config.train.steps:
            return Outcome("done", 0)
        with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            ended = parse_json(read_bytes(self.directory / "exit.json", MAX_END_BYTES))
            code, reason = int(ended["exit_code"]), str(ended["reason"])
            if 0 <= code < 256:
                return Outcome("preempted" if code in STOPPED else "failed", code, reason)
        return Outcome("interrupted" if status else "pending")

    def prepare(self) -> None:
        """Writes the files that its process starts from, and deletes the record of its former end."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_config(self.config, self.directory)
        (self.directory / "exit.json").unlink(missing_ok=True)

    def after_exit(self, code: int) -> Outcome:
        if code == Exit.DONE and (outcome := self.outcome()).status in ("done", "failed"):
            return outcome
        if code in STOPPED:
            return Outcome("preempted", code)
        return Outcome("failed", code or int(Exit.CHECK_FAILED), self._reason(code))

    def record(self, outcome: Outcome) -> None:
        """Saves an outcome that the run's own files do not show."""
        if outcome.status != "done":
            ended = {"exit_code": outcome.exit_code, "reason": outcome.reason}
            with writing(self.directory / "exit.json"):
                write_atomically(self.directory / "exit.json", json.dumps(ended) + "\n")

    def _reason(self, code: int) -> str:
        """The last error in its output, else the signal that killed it, else the last line."""
        lines: list[str] = []
        with suppress(OSError), open(self.directory / "output.log", "rb", opener=open_regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_END_BYTES))
            text = file.read(MAX_END_BYTES).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if code > 128 and not errors:
            return f"killed by signal {code - 128}; see {self.directory / 'output.log'}"
        return (errors or lines or ["no output"])[-1][:300]


def make_cells(sweep: SweepFile, directory: Path, overrides: Sequence[str] = ()) -> list[Cell]:
    """The cells that `when` selects, each valid by itself, with `overrides` in all.  Raises ConfigError with every
    problem once, and the cells that have it."""
    combinations = sweep.combinations()
    if sweep.conditions:
        base = _base_values(sweep, [values for _, values in combinations], overrides)
        combinations = [(cell_id, values) for cell_id, values in combinations if _selected(sweep, base, values)]
    if not combinations:
        raise ConfigError(f"{sweep.path}: when: no cell is left. Loosen it, or add values.")
    _check_overrides(sweep, dict.fromkeys(key for _, values in combinations for key in values), overrides)
    cells, faults = [], defaultdict[str, list[str]](list)
    for cell_id, values in combinations:
        run = {"run.dir": str(directory / "cells" / cell_id), "run.name": f"{sweep.name}-{cell_id}"}
        try:
            cells.append(Cell(cell_id, values, _load(sweep, values | run, overrides)))
        except ConfigError as error:
            for problem in error.problems:
                faults[problem].append(cell_id)
    raise_faults(faults, len(combinations))
    return cells


def _check_overrides(sweep: SweepFile, varied: Iterable[str], overrides: Sequence[str]) -> None:
    """Raises ConfigError if an override sets a key of the sweep, a section that has one, or a part of its value."""
    for override in overrides:
        path = override.partition("=")[0]
        for key in (*varied, *sweep.constants, *CELL_KEYS):
            if f"{key}.".startswith(f"{path}.") or path.startswith(f"{key}."):
                advice = f"Change {sweep.path}" if key not in CELL_KEYS else "Leave it out: it differs in every cell"
                what = "this key" if path == key else key
                raise ConfigError(f"command line: {override}: the sweep sets {what}. {advice}.")


def raise_faults(faults: dict[str, list[str]], cells: int) -> None:
    """Raises ConfigError with each problem and the IDs of its cells, if there are any."""
    if not faults:
        return
    lines = [f"{problem} ({_which(ids, cells)})" for problem, ids in faults.items()]
    if any(len(ids) < cells for ids in faults.values()):
        lines.append("Nothing was started. `when` leaves out cells that cannot be, as in when: parallel.model <= 4")
    raise ConfigError(*lines)


def _which(ids: list[str], cells: int) -> str:
    if len(ids) == cells:
        return "in every cell"
    return f"in cell{'s' if len(ids) > 1 else ''} {abbreviate(ids)}"


def _load(sweep: SweepFile, values: Values, overrides: Sequence[str]) -> RunConfig:
    layer = make_layer(str(sweep.path), (sweep.constants | values).items())
    return load(sweep.config, overrides, cell=layer)


def _base_values(sweep: SweepFile, combinations: Iterable[Values], overrides: Sequence[str]) -> Values:
    """Values of all keys in the first valid cell, for conditions on keys that no cell sets."""
    errors = []
    for values in combinations:
        try:
            return flatten(_load(sweep, values, overrides).model_dump(by_alias=True))
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _selected(sweep: SweepFile, base: Values, values: Values) -> bool:
    try:
        return all(condition.holds(base | sweep.constants | values) for condition in sweep.conditions)
    except ConfigError as error:
        raise ConfigError(*(f"{sweep.path}: {problem}" for problem in error.problems)) from error


def flatten(tree: dict[str, Any], prefix: str = "") -> Values:
    """A tree's leaves by their dotted paths."""
    flat: Values = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and value
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def different_recipes(cells: Iterable[Cell]) -> list[str]:
    """A line for each setting of a started cell that differs from the sweep's.  A cell whose status is damaged fails by
    itself.  Raises ConfigError if one has no readable configuration."""
    from spmd_lm.checkpoints.saved_run import check_compatible  # imports jax

    lines = []
    for cell in cells:
        try:
            if Status.read(cell.directory) is None:
                continue
        except CheckpointError:
            continue
        try:
            saved = load(cell.directory / CONFIG_FILE).model_dump(by_alias=True)
        except ConfigError as error:
            advice = f"Restore {cell.directory / CONFIG_FILE}, or delete {cell.directory} to train that cell again."
            raise ConfigError(*error.problems, advice) from error
        changes = check_compatible(saved, cell.config.model_dump(by_alias=True), cell.directory)
        lines += [f"{cell.directory}:{line}" for line in changes if not line.startswith(IGNORED_CHANGES)]
    return lines
