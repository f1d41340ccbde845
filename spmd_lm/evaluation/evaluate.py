"""Metrics of a model on its validation data: during training, and of a run's newest checkpoint."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.compatibility import check_compatible
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.loader import Loader
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.errors import CheckpointError
from spmd_lm.evaluation.task_metrics import task_metrics
from spmd_lm.parallel.plan import Tree
from spmd_lm.step.program import Program


class LossTotals(NamedTuple):
    """Sums over the targets of one loss."""

    loss: float  # weighted, in nats
    correct: float  # weight of the targets predicted correctly
    weight: float


def validation_metrics(program: Program, params: Tree, loader: Loader) -> tuple[dict[str, float], float]:
    """Metrics of the validation data, without dropout; and how many tokens, or labelled examples, they are of."""
    batches = (loader.batch(i, program.batch_shardings) for i in range(len(loader)))
    outputs = [jax.device_get(program.evaluate(params, batch)) for batch in batches]
    if isinstance(loader, TaskLoader):
        return task_metrics(loader, outputs), len(loader.task_split.labels)
    return text_metrics(outputs)


def text_metrics(outputs: Sequence[Mapping[str, tuple]]) -> tuple[dict[str, float], float]:
    """Metrics of text, and the weight of its tokens.  outputs: `LossTotals` of each step, by loss; the first loss is
    that of the tokens.

    eval_loss is the sum of the losses, each a mean in nats.  eval_perplexity is that of the tokens.  eval_accuracy is
    the share of targets predicted correctly; several losses have eval_NAME_loss and eval_NAME_accuracy instead."""
    totals = {}
    for name in outputs[0]:
        columns = zip(*(output[name] for output in outputs), strict=True)
        totals[name] = LossTotals(*(math.fsum(column) for column in columns))
    losses = {name: each.loss / each.weight for name, each in totals.items()}
    accuracies = {name: each.correct / each.weight for name, each in totals.items()}
    tokens = next(iter(totals))
    metrics = {"eval_loss": math.fsum(losses.values()), "eval_perplexity": perplexity(losses[tokens])}
    if len(totals) == 1:
        metrics["eval_accuracy"] = accuracies[tokens]
    else:
        for name in totals:
            metrics[f"eval_{name}_loss"] = losses[name]
            metrics[f"eval_{name}_accuracy"] = accuracies[name]
    return metrics, totals[tokens].weight


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # float64 overflows above exp(709.8)


def restore_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """A run's newest parameters, canonical, in the shardings of `config`'s layout, and their step.  CheckpointError if
    there are none, or they are of another model."""
    saves = Checkpointer(config.run.directory / "checkpoints")
    newest = saves.latest_step()
    if newest is None:
        raise CheckpointError(f"{saves.directory} holds no checkpoint. Train first, with checkpoint.every > 0.")
    check_compatible(saves.meta(newest)["config"], config.model_dump(by_alias=True), saves.directory)
    program = Program(config)
    return program, saves.restore_params(newest, program.abstract_canonical().params), newest


def open_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """The same, laid out for the step."""
    program, params, newest = restore_run(config)
    return program, program.place_params(params), newest


def evaluate_run(config: RunConfig) -> dict:
    """`spmd-lm eval`: figures of a run's newest checkpoint on its validation text."""
    program, params, step = open_run(config)
    corpus = load_data(config.data, config.train.seed, config.model.vocab)
    metrics, count = validation_metrics(program, params, make_loader(config, corpus, "validation"))
    return {"step": step, **metrics, "tokens" if config.objective.predicts_tokens else "examples": int(count)}
