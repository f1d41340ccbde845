"""`spmd-lm sweep`: from a sweep's file to an exit code.

runs/sweeps/NAME/ holds a run in each cells/ID/, cells.csv, cells.parquet and report.html; its sweep.yaml records whose
directory it is."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from spmd_lm.config import syntax
from spmd_lm.config.layout_checks import check_devices
from spmd_lm.config.load import MAX_CHARACTERS
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.files import read_bytes, write_atomically
from spmd_lm.runtime.directories import lock_directory
from spmd_lm.runtime.formatting import format_bytes, format_table
from spmd_lm.runtime.metrics import Record
from spmd_lm.runtime.processes import is_first_process
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.sweeps.cells import Cell, different_recipes, make_cells, raise_faults
from spmd_lm.sweeps.jobs import Jobs, LocalJobs, SlurmJobs, devices_used
from spmd_lm.sweeps.local_gpus import GpuShare, share_gpus
from spmd_lm.sweeps.report import make_report
from spmd_lm.sweeps.runner import Runner
from spmd_lm.sweeps.sweep_file import SweepFile, read_sweep
from spmd_lm.sweeps.table import CellTable, planned_figures, write_tables

Log = Callable[[str], None]
PROBE = "import jax, json; print(json.dumps([jax.default_backend(), jax.local_device_count()]))"


class Machine(NamedTuple):
    """The devices of this machine; the sweep itself uses none of them."""

    platform: str
    devices: int


def directory_of(sweep: SweepFile) -> Path:
    return Path("runs/sweeps") / sweep.name


def run_sweep(
    path: Path, overrides: Sequence[str], at_once: int | None, submit: str | None, signals: StopSignals, log: Log
) -> tuple[Exit, list[Record]]:
    """Runs the unfinished cells of the sweep in this file; returns its exit code and a record for each cell.

    overrides: applied to every cell.
    at_once: concurrent cells; default: one on this machine, all in SLURM.
    submit: slurm, or None for this machine.

    Raises ConfigError, before anything is started or written, for an invalid file or cell, for a directory that is in
    use or another sweep's, and without SLURM."""
    sweep = read_sweep(path)
    directory = directory_of(sweep)
    cells = make_cells(sweep, directory, overrides)
    jobs: Jobs = SlurmJobs() if submit == "slurm" else local_jobs(cells, at_once or 1, log)
    at_once = at_once or (len(cells) if submit else 1)
    with lock_directory(directory, log, is_first_process(), "name"):
        check_owner(sweep, cells, directory)
        check_recipes(cells)
        if is_first_process():
            with writing_in(directory):
                write_atomically(directory / "sweep.yaml", syntax.write(owner(sweep, cells)))
        code, records = run_cells(cells, directory, jobs, at_once, signals, log, sweep.published)
    if is_first_process():
        log(f"report {directory / 'report.html'}, table {directory / 'cells.csv'}")
    return code, records


def run_cells(
    cells: Sequence[Cell],
    directory: Path,
    jobs: Jobs,
    at_once: int,
    signals: StopSignals,
    log: Log,
    published: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Exit, list[Record]]:
    """Runs these cells, keeping the tables in `directory` current; at the end writes report.html.
    published: the section of the sweep's file."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # this process only plans: accelerators are for the cells
    is_first = is_first_process()
    runner, table = Runner(cells, jobs, at_once, log if is_first else lambda _: None, is_first), CellTable(cells)

    def update() -> None:
        if is_first:
            with writing_in(directory):
                write_tables(table.records(runner.outcomes), directory)

    code = runner.run(signals, update)
    records = table.records(runner.outcomes)
    if is_first:
        page = make_report(directory.name, cells, records, table.runs, published)
        with writing_in(directory):
            write_atomically(directory / "report.html", page)
    return code, records


@contextmanager
def writing_in(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{error.filename2 or error.filename or directory}: cannot be written: {error.strerror}"
        raise ConfigError(f"{what}. Mend that; the same command goes on from here.") from error


def local_jobs(cells: Sequence[Cell], at_once: int, log: Log) -> LocalJobs:
    """Processes of this machine, each with its share of GPUs, which is logged.  Raises ConfigError if a cell's layout
    does not fit."""
    if all(cell.config.run.simulate_devices for cell in cells):
        return LocalJobs()
    machine = probe()
    used = min(at_once, machine.devices * -(-len(cells) // machine.devices))  # a job without a cell shares no GPU
    share = share_gpus(machine.devices, used) if machine.platform == "gpu" else GpuShare([], {}, "")
    if at_once > 1 and machine.platform == "tpu":
        raise ConfigError(f"--jobs {at_once}: one process has all of a host's TPUs. Leave out --jobs.")
    faults = defaultdict[str, list[str]](list)
    for cell in cells:
        if not cell.config.run.simulate_devices:
            devices = devices_used(cell.config.parallel, len(share.gpus[0])) if share.gpus else machine.devices
            for problem in check_devices(cell.config, devices):
                faults[problem].append(cell.id)
    raise_faults(faults, len(cells))
    if share.line:
        log(share.line)
    return LocalJobs(share.gpus, share.environment)


def probe() -> Machine:
    """Finds devices in a separate process, because a process that asks holds the TPU or GPU memory from then on."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"jax finds no devices: {reason:.300}. Mend that, or simulate some with --devices N.")
    return Machine(*json.loads(done.stdout.splitlines()[-1]))


def owner(sweep: SweepFile, cells: Sequence[Cell]) -> dict[str, Any]:
    """The identity of a sweep's directory.  Values may be added later, but not keys."""
    config = os.path.relpath(sweep.config)  # the same however the sweep's file was named
    return {"name": sweep.name, "config": config, "keys": sorted({key for c in cells for key in c.values})}


def check_owner(sweep: SweepFile, cells: Sequence[Cell], directory: Path) -> None:
    """Raises ConfigError if the directory is another sweep's."""
    path, own = directory / "sweep.yaml", owner(sweep, cells)
    if not path.exists():
        return
    saved = read_owner(path)
    if saved != own:
        what = ", ".join(f"{key} {saved.get(key)}, not {own[key]}" for key in own if saved.get(key) != own[key])
        raise ConfigError(f"{directory} is another sweep's: {what}. Choose another name, or move that directory away.")


def read_owner(path: Path) -> dict[str, Any]:
    """The `owner` saved in a sweep.yaml.  Raises ConfigError if it is damaged."""
    try:
        saved, _ = syntax.read(read_bytes(path, MAX_CHARACTERS).decode())
    except (OSError, UnicodeDecodeError):
        saved = None
    if not isinstance(saved, dict):
        raise ConfigError(
            f"{path}: is damaged, so it does not say whose directory this is. If {path.parent} is this sweep's, delete "
            "that file; otherwise choose another name."
        )
    return saved


def check_recipes(cells: Sequence[Cell]) -> None:
    """Raises ConfigError if cells were trained with other settings than they have now."""
    if lines := different_recipes(cells):
        header = "cells were trained with other settings (then -> now):"
        raise ConfigError("\n".join([header, *lines, "Restore these values, or choose another name."]))


def list_cells(path: Path, overrides: Sequence[str], submit: str | None) -> list[Record]:
    """The cells of `run_sweep`, with their plans if devices are simulated; writes nothing."""
    from spmd_lm.planning.plan_report import describe

    sweep = read_sweep(path)
    cells = make_cells(sweep, directory_of(sweep), overrides)
    if not submit:
        local_jobs(cells, 1, lambda line: None)
    records = []
    for cell in cells:
        record: Record = {"id": cell.id, "status": cell.outcome().status, "run_dir": str(cell.directory)}
        if cell.config.run.simulate_devices:
            plan = describe(cell.config)
            record |= {"mesh": plan["mesh"]} | planned_figures(plan)
        records.append(record | cell.values | {"steps": cell.config.train.steps})
    return records


def render_cells(records: Sequence[Record]) -> str:
    lines = [("cell", "status", "steps", "mesh", "parameters", "memory per device", "bubble")]
    for r in records:
        mesh = " x ".join(f"{axis} {size}" for axis, size in r.get("mesh", {}).items() if size > 1) or "1 device"
        parameters = f"{r['parameters']:,}" if "parameters" in r else ""
        memory = format_bytes(r["memory_bytes"]) if "memory_bytes" in r else ""
        bubble = f"{r['bubble']:.1%}" if "bubble" in r else ""
        lines.append((r["id"], r["status"], f"{r['steps']:,}", mesh, parameters, memory, bubble))
    return "\n".join(format_table(lines))
