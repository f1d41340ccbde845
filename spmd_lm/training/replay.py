"""Runs one step of a run again, from the checkpoint before it, to find out whether a fault was transient.

Writes nothing but scratch, in optim.offload_dir if the run has one. On the same mesh and hardware a step computes the
same bits; a difference means that a device, its memory or the network has corrupted some."""

import math
from contextlib import closing
from typing import Any

import jax

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.restored import restore_state
from spmd_lm.checkpoints.saved_run import (
    check_compatible,
    check_data,
    check_vocabulary,
    checked_meta,
    open_checkpoints,
    rules_of,
    warn,
)
from spmd_lm.config.load import data_of_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.parallel.fingerprint import fingerprints
from spmd_lm.parallel.trees import Tree
from spmd_lm.runtime.metrics import read_records
from spmd_lm.step.program import Program

COMPARED = ("loss", "grad_norm")


def replay(config: RunConfig, step: int) -> dict[str, Any]:
    """Runs the steps from the newest checkpoint before `step` up to `step`, and compares them with logged metrics and
    any checkpoint of `step`.

    same: everything comparable is equal.
    compared: logged and recomputed values.
    leaves: paths of the state that differ.

    Raises CheckpointError without a checkpoint before `step`, and ConfigError if no such step was logged or saved."""
    checkpoints = open_checkpoints(config.run.directory, config.checkpoint)
    earlier = [saved for saved in checkpoints.steps() if saved < step]
    if not earlier:
        raise CheckpointError(
            f"{checkpoints.directory}: no checkpoint before step {step}. Steps: {checkpoints.steps()}."
        )
    start = earlier[-1]
    meta = checked_meta(checkpoints, start)
    if changes := check_compatible(meta["config"], config.model_dump(by_alias=True), config.run.directory):
        warn(
            "\n".join([f"Other bits may be due to what changed since step {start} was saved (then -> now):", *changes])
        )
    check_vocabulary(config, config.run.directory, meta if start else None)
    logged = {record["step"]: record for record in read_records(config.run.directory / "metrics.jsonl")}
    is_saved = step in checkpoints.steps()
    if step > max([*logged, *checkpoints.steps()]):
        raise ConfigError(f"{config.run.directory}: step {step} was neither logged nor saved: the run ended before it.")
    if not is_saved and not any(COMPARED[0] in logged.get(each, {}) for each in range(start + 1, step + 1)):
        raise ConfigError(f"{config.run.directory}: nothing of steps {start + 1} to {step} was logged or saved.")

    data = load_data(data_of_run(config), config.train.seed, config.model.vocab, rules_of(meta), config.model.context)
    for line in check_data(meta, config, data.fingerprint, data.name):
        warn(line)
    loader, compared = make_loader(config, data, "training"), []
    with closing(Program(config)) as program:
        state = program.from_canonical(restore_state(checkpoints, start, program))
        for number in range(start + 1, step + 1):
            state, metrics = program.step(state, loader.batch(number - 1, program.batch_shardings))
            values = {name: jax.device_get(metrics[name]).item() for name in COMPARED}
            for name in COMPARED:
                if name in logged.get(number, {}):
                    was = logged[number][name]
                    compared.append({"step": number, "name": name, "logged": was, "now": values[name]})
        leaves = changed_leaves(checkpoints, step, program.saved_part(program.canonical(state))) if is_saved else []
    same = not leaves and all(is_same(each["logged"], each["now"]) for each in compared)
    return {"step": step, "from": start, "same": same, "compared": compared, "leaves": leaves}


def is_same(logged: float | None, now: float) -> bool:
    """True if equal; metrics.jsonl has null for values that are not finite."""
    return logged == now if logged is not None else not math.isfinite(now)


def changed_leaves(checkpoints: Checkpointer, step: int, canonical: Tree) -> list[str]:
    """Paths of the arrays that differ from the checkpoint's."""
    record, (found, _) = checkpoints.record(step), fingerprints(canonical)
    return [path for path, leaf in record.leaves.items() if found.get(path) != leaf.fingerprint]


def render(result: dict[str, Any]) -> str:
    lines = [
        f"step {each['step']}: {each['name']} was {each['logged']}, is {each['now']}"
        for each in result["compared"]
        if not is_same(each["logged"], each["now"])
    ]
    lines += [f"{path}: other bits than those saved after step {result['step']}" for path in result["leaves"]]
    basis = f"{len(result['compared'])} figures" if result["compared"] else "the checkpoint"
    header = f"step {result['step']}, from the checkpoint of step {result['from']}: "
    return "\n".join([header + (f"the same bits ({basis} compared)" if result["same"] else "different:"), *lines])
