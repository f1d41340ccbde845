"""One run for each of several seeds, and the median of what they reach: a fine-tuned model's figures depend on the
seed, and papers give the median of five (arXiv:1810.04805, section 4; arXiv:1909.08053, section 5.3)."""

import statistics
from typing import Any

import jax

from spmd_lm.checkpoints.checkpointer import check_same_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.runtime.metrics import Status, read_records
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.training.loop import saved_config, train

FREE = ("  parallel.", "  checkpoint.", "  train.log_every:")
"""Keys that change no figure."""


def train_seeds(config: RunConfig, count: int, signals: StopSignals) -> tuple[Exit, dict[str, Any]]:
    """Trains runs run.dir/seed-N for `count` seeds from train.seed on, each as `train` does: those that are finished
    are left as they are, so that the same command goes on after a stop.

    Also, where none was stopped: of each figure of the last evaluation its value by seed, and the median."""
    if not config.train.eval_every:
        raise ConfigError("--seeds with train.eval_every=0: there is nothing to compare. Set train.eval_every.")
    if config.train.seed + count > 2**32:
        raise ConfigError(
            f"train.seed={config.train.seed} with --seeds {count}: seeds are below 2**32. Lower train.seed."
        )
    if (config.run.directory / "checkpoints").exists():
        raise ConfigError(f"run.dir={config.run.directory} with --seeds: it is a run itself. Choose another run.dir.")
    runs = [_seeded(config, config.train.seed + number) for number in range(count)]
    for run in runs:
        _refuse_another(run)
    for run in runs:
        code = train(run, signals)
        if code != Exit.DONE:
            return code, {}
    if jax.process_index() > 0:  # which writes no metrics, and tells nothing
        return Exit.DONE, {}
    last = {run.train.seed: _last(run) for run in runs}
    names = [name for name in last[config.train.seed] if name.startswith("eval_")]
    by_seed = {name: {str(seed): figures[name] for seed, figures in last.items()} for name in names}
    medians = {name: statistics.median(values.values()) for name, values in by_seed.items()}
    return Exit.DONE, {"directory": str(config.run.directory), "median": medians, "seeds": by_seed}


def _seeded(config: RunConfig, seed: int) -> RunConfig:
    place = {"dir": str(config.run.directory / f"seed-{seed}"), "name": f"{config.run.name}-seed-{seed}"}
    run, train = config.run.model_copy(update=place), config.train.model_copy(update={"seed": seed})
    return config.model_copy(update={"run": run, "train": train})


def _refuse_another(config: RunConfig) -> None:
    """Raises ConfigError for a run that is finished, and was trained otherwise than the others will be."""
    directory = config.run.directory
    status = Status.read(directory)
    if status is None or status.state != "done":
        return
    changes = check_same_run(saved_config(directory), config.model_dump(by_alias=True), directory)
    if other := [line for line in changes if not line.startswith(FREE)]:
        what = "\n".join(other)
        raise ConfigError(
            f"{directory} is finished, and was trained otherwise (then -> now):\n{what}\n"
            f"Put these values back, or choose another run.dir."
        )


def _last(config: RunConfig) -> dict[str, Any]:
    """The record of a finished run's last step, which is evaluated."""
    path = config.run.directory / "metrics.jsonl"
    records = [record for record in read_records(path) if record["step"] == config.train.steps]
    if not records or "eval_loss" not in records[-1]:
        raise DataError(
            f"{path} has no evaluation of step {config.train.steps}. Delete {path.parent} to train it again."
        )
    return records[-1]


def render(result: dict[str, Any]) -> str:
    """A line a figure: the median, and each seed's."""
    seeds = next(iter(result["seeds"].values()))
    lines = [f"{'':<24}{'median':>10}" + "".join(f"{'seed ' + seed:>10}" for seed in seeds)]
    for name, values in result["seeds"].items():
        lines.append(f"{name:<24}{result['median'][name]:>10.4f}" + "".join(f"{v:>10.4f}" for v in values.values()))
    return "\n".join(lines)
