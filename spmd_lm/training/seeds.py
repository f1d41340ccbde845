"""One run per seed, and the median of their metrics: a fine-tuned model's metrics depend on the seed, and papers report
the median of five (arXiv:1810.04805, section 4; arXiv:1909.08053, section 5.3)."""

import statistics
from typing import Any

import jax

from spmd_lm.checkpoints.saved_run import check_compatible
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.runtime.metrics import Record, Status, read_records
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.training.loop import train
from spmd_lm.training.run_dir import read_saved_config

IGNORED_CHANGES = ("  parallel.", "  checkpoint.", "  train.log_every:")
"""Keys, as lines of `check_compatible` begin, that have no effect on metrics."""


def train_seeds(config: RunConfig, count: int, signals: StopSignals) -> tuple[Exit, dict[str, Any]]:
    """Trains run.dir/seed-N for `count` seeds from train.seed on, each as `train` does.  Finished runs are left alone,
    so that the same command resumes after a stop.

    Returns the exit code and, unless a run was stopped, each metric of the last evaluation by seed, with its median."""
    if not config.train.eval_every:
        raise ConfigError("--seeds with train.eval_every=0: there is nothing to compare. Set train.eval_every.")
    if config.train.seed + count > 2**32:
        what = f"train.seed={config.train.seed} with --seeds {count}"
        raise ConfigError(f"{what}: seeds are below 2**32. Lower train.seed.")
    if (config.run.directory / "checkpoints").exists():
        raise ConfigError(f"run.dir={config.run.directory} with --seeds: it is a run itself. Choose another run.dir.")
    configs = [_with_seed(config, config.train.seed + i) for i in range(count)]
    for each in configs:  # before anything is trained
        _check_same_recipe(each)
    for each in configs:
        code = train(each, signals)
        if code != Exit.DONE:
            return code, {}
    if jax.process_index() > 0:  # it writes no metrics and prints nothing
        return Exit.DONE, {}
    records = {each.train.seed: _last_record(each) for each in configs}
    names = [name for name in records[config.train.seed] if name.startswith("eval_")]
    by_seed = {name: {str(seed): record[name] for seed, record in records.items()} for name in names}
    medians = {name: statistics.median(values.values()) for name, values in by_seed.items()}
    return Exit.DONE, {"directory": str(config.run.directory), "median": medians, "seeds": by_seed}


def _with_seed(config: RunConfig, seed: int) -> RunConfig:
    run = {"dir": str(config.run.directory / f"seed-{seed}"), "name": f"{config.run.name}-seed-{seed}"}
    train = config.train.model_copy(update={"seed": seed})
    return config.model_copy(update={"run": config.run.model_copy(update=run), "train": train})


def _check_same_recipe(config: RunConfig) -> None:
    """ConfigError for a finished run that was trained with other settings than the rest will be."""
    directory = config.run.directory
    status = Status.read(directory)
    if status is None or status.state != "done":
        return
    changes = check_compatible(read_saved_config(directory), config.model_dump(by_alias=True), directory)
    if changes := [line for line in changes if not line.startswith(IGNORED_CHANGES)]:
        header = f"{directory} is finished, and was trained with other settings (then -> now):"
        raise ConfigError("\n".join([header, *changes, "Restore these values, or choose another run.dir."]))


def _last_record(config: RunConfig) -> Record:
    """The record of a finished run's last step, with its evaluation."""
    path = config.run.directory / "metrics.jsonl"
    last = next((record for record in reversed(read_records(path)) if record["step"] == config.train.steps), {})
    if "eval_loss" not in last:
        what = f"{path} has no evaluation of step {config.train.steps}"
        raise DataError(f"{what}. Delete {path.parent} to train it again.")
    return last


def render(result: dict[str, Any]) -> str:
    """A line per metric: its median and each seed's value."""
    seeds = next(iter(result["seeds"].values()))
    lines = [f"{'':<24}{'median':>10}" + "".join(f"{'seed ' + seed:>10}" for seed in seeds)]
    for name, values in result["seeds"].items():
        lines.append(f"{name:<24}{result['median'][name]:>10.4f}" + "".join(f"{v:>10.4f}" for v in values.values()))
    return "\n".join(lines)
