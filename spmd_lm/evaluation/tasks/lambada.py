"""`lambada`: predicting the last word of a passage, which takes the whole passage (arXiv:1606.06031)."""

import numpy as np
from pydantic import BaseModel

from spmd_lm.data.tasks.files import load_json
from spmd_lm.errors import DataError
from spmd_lm.evaluation.bootstrap import Metric
from spmd_lm.evaluation.continuations import Continuation, Encoder, continuation_windows
from spmd_lm.evaluation.scoring import Scored
from spmd_lm.evaluation.tasks.task import EvalTask, TaskFigures, TaskInput


class Passage(BaseModel):
    """A line is {"text": ".."}."""

    text: str


def last_word(encoder: Encoder, text: str, location: str) -> Continuation:
    """The last word of a passage and the white space before it, after the rest.  Raises DataError for fewer than two
    words."""
    words = text.rsplit(maxsplit=1)
    if len(words) < 2:
        raise DataError(f"{location}: {text!r:.40} has no last word after a context. Give two words or more.")
    context = words[0]
    return encoder.continuation(context, text.rstrip()[len(context) :], location)


class LambadaTask(EvalTask):
    """`lambada=FILE.jsonl`.

    accuracy: share of last words whose every token is the greedy choice.
    perplexity: exp of the mean loss of a last word."""

    name = "lambada"

    def __init__(self, given: TaskInput):
        lines = (line for document in self.documents(given) for line in load_json(Passage, document, by_line=True))
        items = [last_word(given.encoder, passage.text, location) for location, passage in lines]
        if not items:
            raise DataError(f"lambada={given.path}: no passages. {Passage.__doc__}")
        self.windows, truncated = continuation_windows(items, given.context)
        self.truncated = int(truncated.sum())

    def figures(self, scored: Scored) -> TaskFigures:
        loss, correct = -scored.window_log_likelihood(), scored.window_greedy()
        one = np.ones(len(loss))
        metrics = {"accuracy": Metric(correct, one), "perplexity": Metric(loss, one, np.exp)}
        return TaskFigures.of(metrics, len(loss), truncated=self.truncated)
