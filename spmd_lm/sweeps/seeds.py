"""`spmd-lm train --seeds N`: a sweep over train.seed, and the median of its metrics.

A fine-tuned model's metrics depend on the seed, and papers report the median of five (arXiv:1810.04805, section 4;
arXiv:1909.08053, section 5.3)."""

import statistics
from collections.abc import Callable
from typing import Any

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.runtime.directories import lock_directory
from spmd_lm.runtime.metrics import is_number, read_records
from spmd_lm.runtime.processes import is_first_process
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.sweeps.cells import Cell
from spmd_lm.sweeps.jobs import LocalJobs
from spmd_lm.sweeps.sweep import check_recipes, run_cells
from spmd_lm.sweeps.sweep_file import MOST_CELLS


def train_seeds(
    config: RunConfig, count: int, signals: StopSignals, log: Callable[[str], None]
) -> tuple[Exit, dict[str, Any]]:
    """Trains run.dir/cells/seed-N for `count` seeds from train.seed on, one after the other, except for finished ones:
    the same command resumes after a stop.  Returns the exit code and, if all are done, each metric of the last
    evaluation by seed, with its median."""
    if not config.train.eval_every:
        raise ConfigError("--seeds with train.eval_every=0: there is nothing to compare. Set train.eval_every.")
    if count > MOST_CELLS:
        raise ConfigError(f"--seeds {count}: at most {MOST_CELLS:,}, as many as a sweep has cells.")
    if config.train.seed + count > 2**32:
        what = f"train.seed={config.train.seed} with --seeds {count}"
        raise ConfigError(f"{what}: seeds are below 2**32. Lower train.seed.")
    directory = config.run.directory
    if config.run.bucket_address:
        raise ConfigError(f"run.dir={config.run.bucket_address} with --seeds: choose a directory of this machine.")
    if (directory / "checkpoints").exists():
        raise ConfigError(f"run.dir={directory} with --seeds: it is a run itself. Choose another run.dir.")
    cells = [_cell(config, config.train.seed + i) for i in range(count)]
    with lock_directory(directory, log, is_first_process()):
        check_recipes(cells)
        code, _ = run_cells(cells, directory, LocalJobs(), 1, signals, log)
    if code != Exit.DONE or not is_first_process():
        return code, {}
    last = {cell.values["train.seed"]: _last_evaluation(cell) for cell in cells}
    names = [name for name in next(iter(last.values())) if all(name in metrics for metrics in last.values())]
    by_seed = {name: {str(seed): metrics[name] for seed, metrics in last.items()} for name in names}
    return code, {"median": {name: statistics.median(v.values()) for name, v in by_seed.items()}, "seeds": by_seed}


def _cell(config: RunConfig, seed: int) -> Cell:
    name = f"seed-{seed}"
    run = {"dir": str(config.run.directory / "cells" / name), "name": f"{config.run.name}-{name}"}
    changed = {"run": config.run.model_copy(update=run), "train": config.train.model_copy(update={"seed": seed})}
    return Cell(name, {"train.seed": seed}, config.model_copy(update=changed))


def _last_evaluation(cell: Cell) -> dict[str, float]:
    """Evaluation metrics of a finished run's last step."""
    path, steps = cell.directory / "metrics.jsonl", cell.config.train.steps
    last = next((record for record in reversed(read_records(path)) if record["step"] == steps), {})
    if not is_number(last.get("eval_loss")):
        raise DataError(f"{path} has no evaluation of step {steps}. Delete {path.parent} to train it again.")
    return {name: value for name, value in last.items() if name.startswith("eval_") and is_number(value)}


def render(result: dict[str, Any]) -> str:
    """A line per metric: its median and each seed's value."""
    seeds = next(iter(result["seeds"].values()))
    lines = [f"{'':<24}{'median':>10}" + "".join(f"{'seed ' + seed:>10}" for seed in seeds)]
    for name, values in result["seeds"].items():
        lines.append(f"{name:<24}{result['median'][name]:>10.4f}" + "".join(f"{v:>10.4f}" for v in values.values()))
    return "\n".join(lines)
