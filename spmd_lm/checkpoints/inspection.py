"""Lists and verifies a run's checkpoints, on one device, one array at a time."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.directories import SAVING, entries, parse_step
from spmd_lm.checkpoints.parts import num_parts, part_directories, parts_of
from spmd_lm.checkpoints.record import CheckpointRecord, file_sizes, read_record
from spmd_lm.checkpoints.saved_run import open_checkpoints
from spmd_lm.checkpoints.storage import ShardStorage
from spmd_lm.config.load import CONFIG_FILE, load
from spmd_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError
from spmd_lm.runtime.formatting import abbreviate, format_bytes, parse_count
from spmd_lm.runtime.metrics import Status

Json = dict[str, Any]

INTACT, DAMAGED, UNCOMMITTED = "intact", "damaged", "uncommitted"


def open_saved(run: Path) -> Checkpointer:
    """The checkpoints of `run`.  Raises ConfigError if it is not a run that has saved."""
    if not entries(run / "checkpoints") and not os.path.isdir(run / "checkpoints"):
        what = "it has no directory checkpoints/" if os.path.exists(run) else "no such run"
        name, _, step = str(run).rpartition("@")
        is_step = name and parse_count(step) is not None
        advice = f"Write {name} --step {step}" if is_step else "Give the directory of a run that has saved"
        raise ConfigError(f"{run}: {what}. {advice}.")
    return open_checkpoints(run)


def open_tiers(run: Path) -> list[Checkpointer]:
    """The checkpoints of `run`, and the local ones on this host."""
    tiers = [open_saved(run)]
    try:
        local, status = load(run / CONFIG_FILE).checkpoint.local, Status.read(run)
    except (ConfigError, CheckpointError):  # an imported run has no status
        return tiers
    if local is None or status is None:
        return tiers
    one_of_a_job = {num_parts(part): part for part in part_directories(local.dir, status.run_id)}
    return tiers + [Checkpointer(part, storage=ShardStorage(all_parts=True)) for part in one_of_a_job.values()]


def list_checkpoints(tiers: list[Checkpointer]) -> list[Json]:
    """One report per checkpoint, ascending, from its record and the sizes of its files; no array is read."""
    reports = []
    for checkpoints in tiers:
        names = [path.name for path in entries(checkpoints.directory) if SAVING in path.name]
        unfinished = [name.partition(".")[0] for name in names]
        steps = {step for step in map(parse_step, unfinished) if step is not None} - {*checkpoints.steps()}
        reports += [describe(checkpoints, step) for step in checkpoints.steps()]
        reports += [_report(checkpoints, step, UNCOMMITTED) for step in steps]
    return sorted(reports, key=lambda report: report["step"])


def describe(checkpoints: Checkpointer, step: int) -> Json:
    files: list[Json] = []
    with checkpoints.reading(step):
        for path in _paths(checkpoints, step):
            prefix = "" if checkpoints.storage.shared else f"{path.parent.name}/"
            try:
                record = read_record(path)
            except DamagedCheckpointError as damage:
                return _report(checkpoints, step, DAMAGED, problem=f"{prefix}{damage.what}")
            except CheckpointError as error:  # from another version
                return _report(checkpoints, step, UNCOMMITTED, problem=str(error).rstrip("."))
            found = file_sizes(path)
            files += [
                {"path": prefix + name, "bytes": size, "state": INTACT if found.get(name) == size else DAMAGED}
                for name, size in record.files.items()
            ]
    leaves = [{"path": name, **leaf.model_dump()} for name, leaf in record.leaves.items()]
    if _worst(files) == INTACT and not _is_all_here(checkpoints, step):
        problem = "parts of it are on other hosts, or gone: no array can be read here"
        return _report(checkpoints, step, UNCOMMITTED, leaves, files, problem)
    return _report(checkpoints, step, _worst(files), leaves, files)


def verify(checkpoints: Checkpointer, step: int) -> Json:
    """Like `describe`, but compares arrays with their fingerprints if every file has its size; any other may be a pipe,
    and block."""
    report = describe(checkpoints, step)
    if report["leaves"] and report["state"] == INTACT:
        record = read_record(checkpoints.path(step))
        allow_64_bits(record)
        for leaf in report["leaves"]:
            leaf["state"] = DAMAGED if checkpoints.leaf_problem(record, leaf["path"]) else INTACT
        report["state"] = _worst([*report["leaves"], *report["files"]])
    if report["state"] == DAMAGED and not checkpoints.path(step).exists():
        return _report(checkpoints, step, UNCOMMITTED, problem="deleted meanwhile, by a run that goes on")
    return report


def _paths(checkpoints: Checkpointer, step: int) -> list[Path]:
    path = checkpoints.path(step)
    return [path] if checkpoints.storage.shared else parts_of(path)


def _is_all_here(checkpoints: Checkpointer, step: int) -> bool:
    return checkpoints.storage.shared or len(_paths(checkpoints, step)) == num_parts(checkpoints.directory)


def render(report: Json) -> str:
    """One line about a checkpoint, and its damage."""
    size = f"{len(report['leaves'])} leaves, {format_bytes(sum(file['bytes'] for file in report['files']))}"
    bad = [part["path"] for part in report["leaves"] + report["files"] if part.get("state") == DAMAGED]
    line = f"{report['step']:>8}  {report['tier']:<9}{report['state']:<13}{size if report['files'] else ''}"
    return f"{line}  {report.get('problem') or abbreviate(bad)}".rstrip()


def compare(a: tuple[Checkpointer, int], b: tuple[Checkpointer, int]) -> Json:
    """The leaves whose bits differ, with the largest difference (None if one lacks the leaf, or shapes differ), and the
    differing keys of the configuration.  Reads every array; raises DamagedCheckpointError."""
    records = [checkpoints.record(step) for checkpoints, step in (a, b)]
    for record in records:
        allow_64_bits(record)
    differ = []
    for path in sorted({*records[0].leaves, *records[1].leaves}):
        first, second = (record.leaves.get(path) for record in records)
        arrays = [
            np.asarray(checkpoints.restore_leaf(record, path))
            for (checkpoints, _), record in zip((a, b), records, strict=True)
            if path in record.leaves
        ]
        if first == second:
            continue
        largest = None
        if first and second and first.shape == second.shape:
            x, y = (array.astype("float64") for array in arrays)
            largest = float(np.max(np.abs(x - y), initial=0.0))
        differ.append({"path": path, "max_difference": largest})
    configs = [flatten_dict(record.meta["config"], sep=".") for record in records]
    keys = sorted(key for key in {*configs[0], *configs[1]} if configs[0].get(key) != configs[1].get(key))
    return {"same": not differ, "leaves": differ, "config": keys}


def parse_run_at_step(text: str) -> tuple[Checkpointer, int]:
    """Parses RUN@STEP, or RUN for its newest step."""
    run, at, step = text.rpartition("@")
    checkpoints = open_saved(Path(run if at else text))
    if at and parse_count(step) is None:
        raise ConfigError(f"{run}@{step:.40}: this is not a step. Write RUN@STEP, as in {run}@100.")
    return checkpoints, require_step(checkpoints, parse_count(step) if at else None)


def require_step(checkpoints: Checkpointer, step: int | None) -> int:
    """`step`, or the newest if None.  Raises CheckpointError if it does not exist."""
    steps = checkpoints.steps()
    if not steps or step not in (None, *steps):
        there = f"there are {steps}" if steps else "there is none"
        raise CheckpointError(f"{checkpoints.directory}: no step {'' if step is None else step}: {there}.")
    return steps[-1] if step is None else step


def allow_64_bits(record: CheckpointRecord) -> None:
    """Enables 64-bit types in jax, which would otherwise read such leaves in 32 bits."""
    if any(leaf.dtype.endswith("64") for leaf in record.leaves.values()):
        jax.config.update("jax_enable_x64", True)


def _report(
    checkpoints: Checkpointer,
    step: int,
    state: str,
    leaves: Sequence[Json] = (),
    files: Sequence[Json] = (),
    problem: str = "",
) -> Json:
    tier = "durable" if checkpoints.storage.shared else "local"
    report = {"step": step, "tier": tier, "state": state, "leaves": [*leaves], "files": [*files]}
    return report | ({"problem": problem} if problem else {})


def _worst(parts: list[Json]) -> str:
    return DAMAGED if any(part["state"] == DAMAGED for part in parts) else INTACT
