"""`spmd-lm ckpt`: lists, verifies and compares checkpoints of runs."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmd_lm.commands.common import Arguments, at_least, check_json, write_result
from spmd_lm.errors import CheckpointError, ConfigError, Exit
from spmd_lm.runtime.devices import use_cpu_alone


def run(arguments: Arguments) -> int:
    """Runs the action, which writes nothing but its result."""
    check_json(arguments)
    if arguments.ACTION not in ACTIONS:
        raise ConfigError(f"spmd-lm ckpt: no action '{arguments.ACTION}'. Actions: {', '.join(ACTIONS)}.")
    if arguments.step is not None and arguments.ACTION != "verify":
        raise ConfigError(f"spmd-lm ckpt {arguments.ACTION} has no --step. It is for `ckpt verify`.")
    use_cpu_alone()  # the run's accelerators may be in use
    return ACTIONS[arguments.ACTION](arguments)


def ls(arguments: Arguments) -> int:
    from spmd_lm.checkpoints.directories import describe_damage
    from spmd_lm.checkpoints.inspection import list_checkpoints, open_tiers

    tiers = open_tiers(_one_run(arguments))
    damaged = [
        f"{each.directory}: {what}, and moved aside" for each in tiers if (what := describe_damage(each.directory))
    ]
    note = "intact: by records and sizes of files. `spmd-lm ckpt verify` reads the arrays."
    return _write(arguments, list_checkpoints(tiers), *damaged, note)


def verify(arguments: Arguments) -> int:
    from spmd_lm.checkpoints.inspection import DAMAGED, UNCOMMITTED, open_tiers, require_step
    from spmd_lm.checkpoints.inspection import verify as verify_step

    tiers = open_tiers(_one_run(arguments))
    saved = [(checkpoints, step) for checkpoints in tiers for step in checkpoints.steps()]
    chosen = [each for each in saved if arguments.step in (None, each[1])]
    reports = [verify_step(*each) for each in chosen or [(tiers[0], require_step(tiers[0], arguments.step))]]
    _write(arguments, reports)
    by_state = {report["state"]: report for report in reports}
    if DAMAGED in by_state:
        return Exit.CHECK_FAILED
    if unknown := by_state.get(UNCOMMITTED):
        raise CheckpointError(f"step {unknown['step']}: {unknown['problem']}. Whether it is intact is not known.")
    return Exit.DONE


def diff(arguments: Arguments) -> int:
    from spmd_lm.checkpoints.inspection import compare, parse_run_at_step

    if len(arguments.RUN) != 2:
        raise ConfigError("spmd-lm ckpt diff: give two checkpoints, as in `ckpt diff runs/a@100 runs/a@200`.")
    first, second = map(parse_run_at_step, arguments.RUN)
    result = compare(first, second)
    lines = [f"{leaf['path']}  {_difference(leaf['max_difference'])}" for leaf in result["leaves"]]
    lines += [f"config: {key} differs" for key in result["config"]]
    write_result(arguments, result, "\n".join(lines or ["the same bits, and the same configuration"]))
    return Exit.DONE if result["same"] else Exit.CHECK_FAILED


ACTIONS: dict[str, Callable[[Arguments], int]] = {"ls": ls, "verify": verify, "diff": diff}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=at_least(0), metavar="N", help="verify this step alone")


def _one_run(arguments: Arguments) -> Path:
    if len(arguments.RUN) != 1:
        raise ConfigError(f"spmd-lm ckpt {arguments.ACTION}: give one run's directory.")
    return Path(arguments.RUN[0])


def _difference(largest: float | None) -> str:
    return "of other shapes, or in one of them alone" if largest is None else f"differs by at most {largest:g}"


def _write(arguments: Arguments, reports: list[dict[str, Any]], *notes: str) -> int:
    from spmd_lm.checkpoints.inspection import render

    lines = [*map(render, reports)] or ["no checkpoints"]
    return write_result(arguments, {"checkpoints": reports}, "\n".join([*lines, *notes]))
