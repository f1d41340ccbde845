"""Metrics of a model on its validation data: during training, and of a run's newest checkpoint."""

import math
from collections.abc import Mapping, Sequence

import jax

from spmd_lm.checkpoints.restored import open_run
from spmd_lm.checkpoints.saved_run import load_run_data
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import make_loader
from spmd_lm.data.loader import Loader
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.evaluation.task_metrics import task_metrics
from spmd_lm.parallel.trees import Tree
from spmd_lm.step.program import Program


def validation_metrics(program: Program, params: Tree, loader: Loader) -> tuple[dict[str, float], float]:
    """Metrics of the validation data, without dropout, and the number of tokens or labelled examples."""
    batches = (loader.batch(i, program.batch_shardings) for i in range(len(loader)))
    outputs = [jax.device_get(program.evaluate(params, batch)) for batch in batches]
    if isinstance(loader, TaskLoader):
        return task_metrics(loader, outputs), len(loader.task_split.labels)
    metrics, weight = text_metrics(outputs)
    if target_bytes := loader.target_bytes:
        metrics["eval_nats_per_byte"] = metrics["eval_loss"] * weight / target_bytes
    return metrics, weight


def text_metrics(outputs: Sequence[Mapping[str, tuple]]) -> tuple[dict[str, float], float]:
    """Metrics of text, and the weight of its tokens.

    outputs: per step and loss, the tokens' first, sums over targets: (loss in nats, weight of correct ones, weight).

    eval_loss is the sum of the losses, each a mean in nats; eval_perplexity is that of the tokens; eval_accuracy is the
    share of correct predictions.  With several losses, eval_NAME_loss and eval_NAME_accuracy replace eval_accuracy."""
    losses, accuracies, weights = {}, {}, {}
    for name in outputs[0]:
        columns = zip(*(output[name] for output in outputs), strict=True)
        loss, correct, weights[name] = map(math.fsum, columns)
        losses[name], accuracies[name] = loss / weights[name], correct / weights[name]
    tokens = next(iter(losses))
    perplexity = math.inf if losses[tokens] >= 700 else math.exp(losses[tokens])  # float64 overflows above exp(709.8)
    metrics = {"eval_loss": math.fsum(losses.values()), "eval_perplexity": perplexity}
    if len(losses) == 1:
        return metrics | {"eval_accuracy": accuracies[tokens]}, weights[tokens]
    for name in losses:
        metrics |= {f"eval_{name}_loss": losses[name], f"eval_{name}_accuracy": accuracies[name]}
    return metrics, weights[tokens]


def evaluate_run(config: RunConfig, fallback: bool = False) -> dict:
    """`spmd-lm eval`: metrics of a run's newest checkpoint on its validation text.  fallback: as for `open_run`."""
    program, params, step = open_run(config, fallback)
    corpus = load_run_data(config)
    metrics, count = validation_metrics(program, params, make_loader(config, corpus, "validation"))
    return {"step": step, **metrics, "tokens" if config.objective.predicts_tokens else "examples": int(count)}
