"""Checks of what a model is trained for, and on which data."""

import math
from collections.abc import Callable

from spmd_lm.config.schema import (
    CausalLM,
    Data,
    MaskedLM,
    Model,
    Objective,
    Parallel,
    Synthetic,
    Task,
    Text,
    Train,
)
from spmd_lm.config.suggest import Problems, multiples, nearest

# For each task, the kind of its objective and the sizes that the objective must have.
TASKS: dict[str, tuple[str, dict[str, int]]] = {
    "mnli": ("classification", {"classes": 3}),
    "qqp": ("classification", {"classes": 2}),
    "sst2": ("classification", {"classes": 2}),
    "cola": ("classification", {"classes": 2}),
    "race": ("multiple_choice", {"choices": 4}),
    "squad": ("span", {}),
    "jsonl": ("classification", {}),  # as many classes as the files have labels
}


def vocabulary_holds_tokens(model: Model, data: Data | Synthetic, objective: Objective) -> Problems:
    """A vocabulary file is checked when it is read."""
    special = not isinstance(objective, CausalLM)
    least = 260 if special else 256
    if isinstance(data, Data) and data.tokenizer == "bytes" and model.vocab < least:
        more = f", with the four special tokens of objective.kind={objective.kind}" if special else ""
        yield (
            f"model.vocab={model.vocab} is less than the {least} tokens of data.tokenizer=bytes{more}. "
            f"Use model.vocab={least}."
        )
    if isinstance(data, Synthetic) and data.branching > model.vocab:
        most = model.vocab
        yield f"data.branching={data.branching} is more than model.vocab={most}. Use data.branching={most}."


def model_suits_objective(model: Model, objective: Objective) -> Problems:
    chosen = f"objective.kind={objective.kind} with model.kind={model.kind}"
    if model.kind == "bert" and isinstance(objective, CausalLM):
        yield (
            f"{chosen}, whose attention sees the tokens that it has to predict. "
            "Use model.kind=gpt, or objective.kind=masked_lm."
        )
    elif model.kind == "gpt" and not isinstance(objective, CausalLM):
        yield (f"{chosen}, whose attention sees only earlier tokens. Use model.kind=bert, or objective.kind=causal_lm.")


def masked_lm_has_words(data: Data | Synthetic, objective: Objective) -> Problems:
    if isinstance(objective, MaskedLM) and isinstance(data, Synthetic):
        yield (
            "objective.kind=masked_lm with data.source=synthetic: a Markov chain has no words to mask. "
            "Use data.source=python-stdlib, or objective.kind=causal_lm with model.kind=gpt."
        )


def objective_suits_task(data: Data | Synthetic, objective: Objective) -> Problems:
    """Only a task's files have labels, and only objectives with labels read them."""
    if not isinstance(data, Task):
        if not objective.predicts_tokens:
            yield (
                f"objective.kind={objective.kind} with data.source={data.source}, which has no labels. "
                "Use data.source=task, with data.task, data.path and data.validation_path."
            )
        return
    kind, sizes = TASKS[data.task]
    if objective.kind != kind:
        settings = "".join(f" objective.{key}={size}" for key, size in sizes.items())
        hint = ", with as many classes as there are labels" if kind == "classification" and not sizes else ""
        yield f"data.task={data.task} with objective.kind={objective.kind}. Use objective.kind={kind}{settings}{hint}."
        return
    for key, size in sizes.items():
        if getattr(objective, key) != size:
            yield (
                f"objective.{key}={getattr(objective, key)} with data.task={data.task}, which has {size}. "
                f"Use objective.{key}={size}."
            )


def choices_divide_batch(objective: Objective, train: Train, parallel: Parallel) -> Problems:
    """All rows of a question are on one device."""
    choices, microbatches = objective.rows_per_example, parallel.microbatches
    if train.batch % microbatches == 0 and train.batch // microbatches % choices:
        batches = nearest("train.batch", train.batch, multiples(train.batch, microbatches * choices))
        yield (
            f"train.batch={train.batch} in parallel.microbatches={microbatches} gives {train.batch // microbatches} "
            f"rows, not divisible by objective.choices={choices}, the rows of one question. Use {batches}."
        )


def context_holds_text(model: Model, objective: Objective) -> Problems:
    """Rows are [CLS] A [SEP] B [SEP]."""
    if not isinstance(objective, CausalLM) and model.context < 8:
        yield (
            f"model.context={model.context} with objective.kind={objective.kind}: [CLS] and [SEP] would leave no room "
            "for text. Use model.context=8 or more."
        )


def token_types_suit_objective(model: Model, objective: Objective) -> Problems:
    types = model.token_types
    if types and isinstance(objective, CausalLM):
        yield (
            f"model.token_types={types} with objective.kind=causal_lm: its rows are not divided into segments. "
            "Use model.token_types=0."
        )
    if types == 1 and isinstance(objective, MaskedLM) and objective.sentence_order:
        yield (
            "model.token_types=1 with objective.sentence_order=true: a row has two segments. "
            "Use model.token_types=0 or 2, or objective.sentence_order=false."
        )
    if types == 1 and not objective.predicts_tokens:
        yield (
            f"model.token_types=1 with objective.kind={objective.kind}: a row may hold two texts. "
            "Use model.token_types=0 or 2."
        )


def masked_spans_leave_words(objective: Objective) -> Problems:
    """Spans do not touch, so there are at least as many words between spans as there are spans."""
    if not isinstance(objective, MaskedLM):
        return
    longest, mask_prob = objective.max_span, objective.mask_prob
    mean = longest / sum(1 / n for n in range(1, longest + 1))
    most = mean / (mean + 1)
    if mask_prob == 0:
        yield "objective.mask_prob=0.0 masks nothing, so nothing is learned. Use objective.mask_prob=0.15."
    elif mask_prob > most:
        yield (
            f"objective.mask_prob={mask_prob} with objective.max_span={longest}: spans of {mean:.2g} words on average, "
            f"with at least one word between them, mask at most {most:.0%}. "
            f"Use objective.mask_prob={math.floor(100 * most) / 100} or less."
        )


def paths_are_not_empty(data: Data | Synthetic) -> Problems:
    for key in {Text: ("path",), Task: ("path", "validation_path")}.get(type(data), ()):
        value = getattr(data, key)
        paths = [value] if isinstance(value, str) else value
        if not paths or not all(paths):
            yield f"data.{key}={value} names no file. Give a file, a directory or a pattern: data.{key}='corpus/*.txt'."


CHECKS: tuple[Callable[..., Problems], ...] = (
    vocabulary_holds_tokens,
    model_suits_objective,
    masked_lm_has_words,
    objective_suits_task,
    choices_divide_batch,
    context_holds_text,
    token_types_suit_objective,
    masked_spans_leave_words,
    paths_are_not_empty,
)
