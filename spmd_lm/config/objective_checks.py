"""Checks of what a model is trained for, and on which text."""

import math
from collections.abc import Callable

from spmd_lm.config.numbers import Messages, multiples, nearest
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

# Of each task, the kind of its objective, and what that one has; `data/tasks/files.py` reads its files.
TASKS: dict[str, tuple[str, dict[str, int]]] = {
    "mnli": ("classification", {"classes": 3}),
    "qqp": ("classification", {"classes": 2}),
    "sst2": ("classification", {"classes": 2}),
    "cola": ("classification", {"classes": 2}),
    "race": ("multiple_choice", {"choices": 4}),
    "squad": ("span", {}),
    "jsonl": ("classification", {}),  # with as many classes as there are labels
}


def vocabulary_holds_tokens(model: Model, data: Data | Synthetic, objective: Objective) -> Messages:
    """Of a vocabulary in a file nothing is known before it is read."""
    marked = not isinstance(objective, CausalLM)
    least = 260 if marked else 256
    if isinstance(data, Data) and data.tokenizer == "bytes" and model.vocab < least:
        more = f", with the four that objective.kind={objective.kind} adds" if marked else ""
        yield (
            f"model.vocab={model.vocab} is less than the {least} tokens of data.tokenizer=bytes{more}. "
            f"Use model.vocab={least}."
        )
    if isinstance(data, Synthetic) and data.branching > model.vocab:
        most = model.vocab
        yield f"data.branching={data.branching} is more than model.vocab={most}. Use data.branching={most}."


def objective_has_a_model(model: Model, objective: Objective) -> Messages:
    asked = f"objective.kind={objective.kind} with model.kind={model.kind}, which sees"
    if model.kind == "bert" and isinstance(objective, CausalLM):
        yield f"{asked} what it is to predict. Use model.kind=gpt, or objective.kind=masked_lm."
    elif model.kind == "gpt" and not isinstance(objective, CausalLM):
        what = "a hidden word" if objective.of_tokens else "a word"
        yield f"{asked} only what stands before {what}. Use model.kind=bert, or objective.kind=causal_lm."


def objective_has_words(data: Data | Synthetic, objective: Objective) -> Messages:
    if isinstance(objective, MaskedLM) and isinstance(data, Synthetic):
        yield (
            "objective.kind=masked_lm with data.source=synthetic: a chain has no words to hide. "
            "Use data.source=python-stdlib, or objective.kind=causal_lm with model.kind=gpt."
        )


def objective_has_a_task(data: Data | Synthetic, objective: Objective) -> Messages:
    """Labels come from a task's files, and a task's files have no other use."""
    if not isinstance(data, Task):
        if not objective.of_tokens:
            yield (
                f"objective.kind={objective.kind} with data.source={data.source}, which has no labels. "
                "Use data.source=task, with data.task, data.path and data.validation_path."
            )
        return
    kind, has = TASKS[data.task]
    if objective.kind != kind:
        more = "".join(f" objective.{key}={count}" for key, count in has.items())
        many = ", with as many classes as there are labels" if kind == "classification" and not has else ""
        yield f"data.task={data.task} with objective.kind={objective.kind}. Use objective.kind={kind}{more}{many}."
        return
    for key, count in has.items():
        if getattr(objective, key) != count:
            yield (
                f"objective.{key}={getattr(objective, key)} with data.task={data.task}, which has {count}. "
                f"Use objective.{key}={count}."
            )


def choices_stay_together(objective: Objective, train: Train, parallel: Parallel) -> Messages:
    """The devices have rows of their own, and a question's are all on one."""
    together, m = objective.rows_of_one, parallel.microbatches
    if train.batch % m == 0 and train.batch // m % together:
        batches = nearest("train.batch", train.batch, multiples(train.batch, m * together))
        yield (
            f"train.batch={train.batch} in parallel.microbatches={m} gives {train.batch // m} rows, not divisible by "
            f"objective.choices={together}, which are rows of one question. Use {batches}."
        )


def rows_hold_pieces(model: Model, objective: Objective) -> Messages:
    """Rows are [CLS] A [SEP] B [SEP]."""
    if not isinstance(objective, CausalLM) and model.context < 8:
        yield (
            f"model.context={model.context} with objective.kind={objective.kind}: [CLS] and [SEP] would leave no room "
            "for text. Use model.context=8 or more."
        )


def types_have_parts(model: Model, objective: Objective) -> Messages:
    types = model.token_types
    if types and isinstance(objective, CausalLM):
        yield (
            f"model.token_types={types} with objective.kind=causal_lm: running text has no parts. "
            "Use model.token_types=0."
        )
    if types == 1 and isinstance(objective, MaskedLM) and objective.sentence_order:
        yield (
            "model.token_types=1 with objective.sentence_order=true: a row has two pieces. "
            "Use model.token_types=0 or 2, or objective.sentence_order=false."
        )
    if types == 1 and not objective.of_tokens:
        yield (
            f"model.token_types=1 with objective.kind={objective.kind}: a row may have two texts. "
            "Use model.token_types=0 or 2."
        )


def spans_leave_words(objective: Objective) -> Messages:
    """No two spans touch, so that there are as many words between them as there are spans, or more."""
    if not isinstance(objective, MaskedLM):
        return
    longest, rate = objective.max_span, objective.mask_prob
    mean = longest / sum(1 / n for n in range(1, longest + 1))
    most = mean / (mean + 1)
    if rate == 0:
        yield "objective.mask_prob=0.0 hides nothing, so nothing is learned. Use objective.mask_prob=0.15."
    elif rate > most:
        yield (
            f"objective.mask_prob={rate} with objective.max_span={longest}: spans of {mean:.2g} words on average, "
            f"a word or more between them, hide at most {most:.0%}. "
            f"Use objective.mask_prob={math.floor(100 * most) / 100} or less."
        )


def text_has_a_path(data: Data | Synthetic) -> Messages:
    for key in {Text: ("path",), Task: ("path", "validation_path")}.get(type(data), ()):
        said = getattr(data, key)
        if not (said and all([said] if isinstance(said, str) else said)):
            yield f"data.{key}={said} names no file. Give a file, a directory or a pattern: data.{key}='corpus/*.txt'."


CHECKS: tuple[Callable[..., Messages], ...] = (
    vocabulary_holds_tokens,
    objective_has_a_model,
    objective_has_words,
    objective_has_a_task,
    choices_stay_together,
    rows_hold_pieces,
    types_have_parts,
    spans_leave_words,
    text_has_a_path,
)
