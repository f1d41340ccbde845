"""`race` and `choice`: zero-shot multiple choice, by the log-likelihood of each choice after the context."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, model_validator

from spmd_lm.data.tasks.files import Items, RaceArticle, fill_blank, load_json
from spmd_lm.errors import DataError
from spmd_lm.evaluation.bootstrap import Metric
from spmd_lm.evaluation.continuations import continuation_windows
from spmd_lm.evaluation.scoring import Scored
from spmd_lm.evaluation.tasks.task import EvalTask, TaskFigures, TaskInput


class ChoiceQuestion(NamedTuple):
    location: str
    context: str
    choices: list[str]  # continuations of the context, each with the white space before it
    label: int


class ChoiceLine(BaseModel):
    """A line is {"context": "..", "choices": ["..", ".."], "label": 0}, of two choices or more, none of them empty."""

    context: str
    choices: Annotated[Items[str], Field(min_length=2)]
    label: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _label_is_a_choice(self) -> "ChoiceLine":
        if self.label >= len(self.choices):
            raise ValueError(f"label {self.label}, but {len(self.choices)} choices, counted from 0")
        if not all(choice.strip() for choice in self.choices):
            raise ValueError("an empty choice")
        return self


class ChoiceTask(EvalTask):
    """`choice=FILE.jsonl`: a choice follows its context after a space, if neither brings white space.

    accuracy: by the log-likelihood of a choice.
    accuracy_per_byte: by that divided by the choice's bytes, which does not penalize long choices."""

    name = "choice"

    def __init__(self, given: TaskInput):
        questions = list(self.questions(given))
        if not questions:
            raise DataError(f"{self.name}={given.path}: no questions. Give a file that has some.")
        items = [
            given.encoder.continuation(question.context, choice, question.location)
            for question in questions
            for choice in question.choices
        ]
        self.windows, truncated = continuation_windows(items, given.context)
        self.label = np.array([question.label for question in questions])
        self.bounds = np.cumsum([0, *(len(question.choices) for question in questions)])
        self.truncated = int(np.logical_or.reduceat(truncated, self.bounds[:-1]).sum())
        self.num_bytes = np.array([len(c.strip().encode()) for question in questions for c in question.choices])

    def questions(self, given: TaskInput) -> Iterator[ChoiceQuestion]:
        for document in self.documents(given):
            for location, line in load_json(ChoiceLine, document, by_line=True):
                is_apart = not line.context or line.context[-1].isspace()
                choices = [c if is_apart or c[0].isspace() else f" {c}" for c in line.choices]
                yield ChoiceQuestion(location, line.context, choices, line.label)

    def figures(self, scored: Scored) -> TaskFigures:
        log_likelihood, one = scored.window_log_likelihood(), np.ones(len(self.label))
        metrics = {
            "accuracy": Metric(self.is_correct(log_likelihood), one),
            "accuracy_per_byte": Metric(self.is_correct(log_likelihood / self.num_bytes), one),
        }
        return TaskFigures.of(metrics, len(self.label), truncated=self.truncated)

    def is_correct(self, scores: np.ndarray) -> np.ndarray:
        """Mask of the questions whose label has the highest score, the first among equals; bool."""
        best = [part.argmax() for part in np.split(scores, self.bounds[1:-1])]
        return self.label == best


class RaceTask(ChoiceTask):
    """`race=PATH` (arXiv:1704.04683): an option fills the question's blank, or follows the question.  The context is
    the article and the question up to there; the choice is the rest."""

    name = "race"
    suffixes = (".txt", ".jsonl")

    def questions(self, given: TaskInput) -> Iterator[ChoiceQuestion]:
        for document in self.documents(given):
            by_line = document.path.suffix == ".jsonl"
            for location, article in load_json(RaceArticle, document, by_line):
                entries = zip(article.questions, article.options, article.answers, strict=True)
                for i, (question, options, answer) in enumerate(entries):
                    where = f"{location}: questions[{i}]"
                    yield race_question(where, article.article, question, options, "ABCD".index(answer))


def race_question(location: str, article: str, question: str, options: list[str], label: int) -> ChoiceQuestion:
    """Raises DataError for an empty option."""
    if not all(option.strip() for option in options):
        raise DataError(f"{location}: an empty option. Fill it in, or remove the question.")
    before = f"{article}\n{fill_blank(question.partition('_')[0], '')}".rstrip()
    texts = [f"{article}\n{fill_blank(question, option)}" for option in options]
    return ChoiceQuestion(location, before, [text.removeprefix(before) for text in texts], label)
