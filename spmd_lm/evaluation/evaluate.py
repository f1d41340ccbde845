"""What a model is worth on what was held out: of a running program, and of a run's newest checkpoint."""

import math

import jax

from spmd_lm.checkpoints.checkpointer import Checkpointer, check_same_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.batch_source import ValidationLoader
from spmd_lm.data.corpus import load_data
from spmd_lm.data.loader import make_validation_loader
from spmd_lm.data.tasks.rows import LabelledValidation
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.plan import Tree
from spmd_lm.step.program import Program


def validation_figures(program: Program, params: Tree, loader: ValidationLoader) -> tuple[dict[str, float], float]:
    """Figures of what is held out, without dropout; and how many tokens, or examples, they are of.

    Of labelled examples the loader says which.  Of text:
    eval_loss: the sum of the losses, each a mean in nats.  eval_perplexity: of the tokens.  eval_accuracy: the share of
    targets that were the likeliest.  Where there are several losses, eval_NAME_loss and eval_NAME_accuracy of each."""
    batches = (loader.batch(i, program.batch_shardings) for i in range(len(loader)))
    made = [jax.device_get(program.evaluate(params, batch)) for batch in batches]
    if isinstance(loader, LabelledValidation):
        return loader.figures(made), loader.count
    sums = {
        name: [math.fsum(column) for column in zip(*(each[name] for each in made), strict=True)] for name in made[0]
    }
    losses = {name: total / weight for name, (total, _, weight) in sums.items()}
    right = {name: correct / weight for name, (_, correct, weight) in sums.items()}
    tokens = next(iter(sums))
    figures = {"eval_loss": math.fsum(losses.values()), "eval_perplexity": perplexity(losses[tokens])}
    if len(sums) == 1:
        return figures | {"eval_accuracy": right[tokens]}, sums[tokens][2]
    each = {f"eval_{name}_{what}": of[name] for name in sums for what, of in (("loss", losses), ("accuracy", right))}
    return figures | each, sums[tokens][2]


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp(709.8) is the last finite one


def restore_run(config: RunConfig) -> tuple[Program, Tree, int]:
    """A run's newest parameters, canonical, in the shardings of `config`'s layout, and their step.  CheckpointError if
    there are none, or they are of another model."""
    saves = Checkpointer(config.run.directory / "checkpoints")
    newest = saves.latest()
    if newest is None:
        raise CheckpointError(f"{saves.directory} holds no checkpoint. Train first, with checkpoint.every > 0.")
    check_same_run(saves.meta(newest)["config"], config.model_dump(by_alias=True), saves.directory)
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
    figures, count = validation_figures(program, params, make_validation_loader(config, corpus))
    return {"step": step, **figures, "tokens" if config.objective.of_tokens else "examples": int(count)}
