"""Rows of labelled examples: [CLS] A [SEP] B [SEP], or [CLS] A [SEP].

What does not fit a row is cut from the end of the longer text, a token at a time (arXiv:1810.04805).  Of a question and
a long context it is not: the question keeps a quarter of the row at most, and the context is read in several rows, the
windows, that overlap.

R rows of a batch, N rows of a side, T the context."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, Model, MultipleChoice, Objective, Span
from spmd_lm.data.batch_source import BatchSource, TrainLoader, ValidationLoader
from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens
from spmd_lm.data.tasks import metrics
from spmd_lm.data.tasks.dataset import Side
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import DataError


@dataclasses.dataclass(frozen=True)
class Table:
    """What each row of a side is made of: stretches of its texts."""

    begin: np.ndarray  # int64 [N, 2]: where A and B begin in side.texts.tokens
    size: np.ndarray  # int64 [N, 2]: and how many tokens they are
    paired: np.ndarray  # bool [N]: whether there is a B
    example: np.ndarray  # int64 [N]: which example each row is of
    labels: np.ndarray  # int32 [N]: its class or choice, or where in the row its answer begins
    ends: np.ndarray | None  # int32 [N]: or ends

    @classmethod
    def of(cls, side: Side, context: int, objective: Objective) -> "Table":
        if isinstance(objective, Span):
            return _windows(side, context, objective.doc_stride)
        assert side.together == objective.rows_of_one
        begin, size, paired = _stretches(side)
        return cls(
            begin=begin,
            size=_cut(size, context - 2 - paired),
            paired=paired,
            example=np.repeat(np.arange(len(side.labels)), side.together),
            labels=np.repeat(side.labels, side.together),
            ends=None,
        )

    def lay(
        self, rows_R: np.ndarray, tokens: np.ndarray, special: SpecialTokens, context: int
    ) -> tuple[np.ndarray, ...]:
        """int32 [R, T] of these rows: tokens; which are no padding; which are B's, with its [SEP]."""
        t = np.arange(context)
        (begin_a, begin_b), (a, b) = self.begin[rows_R].T[..., None], self.size[rows_R].T[..., None]
        paired = self.paired[rows_R][:, None]
        end = a + 2 + paired * (b + 1)
        in_b = paired & (t > a + 1) & (t < end)
        text = np.where(in_b, t < end - 1, (t > 0) & (t <= a))
        source = np.where(in_b, begin_b + t - a - 2, begin_a + t - 1)
        ids = tokens[np.where(text, source, 0)] if tokens.size else 0
        marks = np.where(t == 0, special.cls, np.where(t < end, special.sep, special.pad))
        return np.where(text, ids, marks).astype(np.int32), (t < end).astype(np.int32), in_b.astype(np.int32)


def _stretches(side: Side) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each pair: where its texts begin, how many tokens they have, whether it is two."""
    there, bounds = side.pairs >= 0, side.texts.bounds
    begin = np.where(there, bounds[side.pairs], 0)
    return begin, np.where(there, bounds[side.pairs + 1] - begin, 0), there[:, 1]


def _cut(size: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Tokens that A and B keep [N, 2], of `room` [N]: the longer loses its last one until both fit; of equals, B."""
    a, b = size.T
    a = np.minimum(a, np.maximum((room + 1) // 2, room - b))
    return np.stack([a, np.minimum(b, room - a)], axis=1)


def _windows(side: Side, context: int, stride: int) -> Table:
    """Of each question as many rows as its context takes, at most `stride` tokens apart."""
    begin_E2, size_E2, _ = _stretches(side)
    asked_E = np.minimum(size_E2[:, 0], context // 4)
    room_E = context - 3 - asked_E
    step_E = np.minimum(stride, room_E)
    count_E = 1 + -(-np.maximum(size_E2[:, 1] - room_E, 0) // step_E)

    e = np.repeat(np.arange(len(count_E)), count_E)  # of each row its example
    nth = np.arange(len(e)) - (np.cumsum(count_E) - count_E)[e]
    skipped = nth * step_E[e]
    shown = np.minimum(room_E[e], size_E2[e, 1] - skipped)

    first, last = np.array([_answer(side, each) for each in range(len(side.questions))], np.int64).T[:, e]
    whole = (first >= skipped) & (last < skipped + shown)
    place = lambda token: np.where(whole, token - skipped + asked_E[e] + 2, 0).astype(np.int32)  # noqa: E731
    return Table(
        begin=np.stack([begin_E2[e, 0], begin_E2[e, 1] + skipped], axis=1),
        size=np.stack([asked_E[e], shown], axis=1),
        paired=np.ones(len(e), bool),
        example=e,
        labels=place(first),
        ends=place(last),
    )


def _answer(side: Side, example: int) -> tuple[int, int]:
    """The first and last token, within its context, of a question's first answer; -1 where there is none."""
    answers, offsets = side.questions[example].answers, side.texts.offsets
    assert offsets is not None
    if not answers:
        return -1, -1
    begins, ends = offsets[side.texts.within(side.pairs[example, 1])].T
    text, start = answers[0]
    found = np.flatnonzero((ends > start) & (begins < start + len(text)))
    return (int(found[0]), int(found[-1])) if found.size else (-1, -1)  # a vocabulary may have no token of it


class LabelledRows(BatchSource):
    """Raises ConfigError for a vocabulary without [CLS] and [SEP], DataError for a label that is no class."""

    def __init__(
        self, side: Side, tokenizer: Tokenizer, model: Model, objective: Objective, batch: int, microbatches: int
    ):
        self.special, _ = tokenizer.special_tokens_and_words()
        if isinstance(objective, Classification) and (highest := int(side.labels.max())) >= objective.classes:
            raise DataError(
                f"{side.highest}: label {highest} is not below objective.classes={objective.classes}. "
                f"Use objective.classes={highest + 1}, or mend the label."
            )
        self.examples, self.objective, self.typed = side, objective, model.token_types > 0
        self.context, self.batch_size, self.microbatches = model.context, batch, microbatches
        self.rows_per_example = objective.rows_of_one
        self.table = Table.of(side, model.context, objective)
        assert batch % microbatches == 0 and batch % self.rows_per_example == 0

    def rows(self, step: int, start: int, stop: int) -> Batch:
        assert 0 <= start <= stop <= self.batch_size
        samples_R = np.arange(start, stop)
        window_R, real_R = self.locate(step, samples_R)
        nth_R = samples_R % self.rows_per_example
        rows_R = window_R * self.rows_per_example + nth_R
        tokens, inside, in_b = self.table.lay(rows_R, self.examples.texts.tokens, self.special, self.context)
        ends = self.table.ends
        return Batch(
            tokens=tokens,
            targets=None,
            weights=None,
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), tokens.shape),
            segments=inside,
            samples=samples_R.astype(np.int32),
            types=in_b if self.typed else None,
            labels=self.table.labels[rows_R],
            ends=None if ends is None else ends[rows_R],
            label_weights=(real_R & (nth_R == 0)).astype(np.float32),
        )

    @abc.abstractmethod
    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The window of each row, and whether it counts."""

    @property
    def available(self) -> int:
        """Windows that there are."""
        return len(self.table.example) // self.rows_per_example


class LabelledLoader(LabelledRows, TrainLoader):
    """To train on: each example once per epoch, or each window."""

    def __init__(
        self,
        side: Side,
        tokenizer: Tokenizer,
        model: Model,
        objective: Objective,
        batch: int,
        microbatches: int,
        seed: int,
    ):
        super().__init__(side, tokenizer, model, objective, batch, microbatches)
        self.seed, self.num_examples = seed % 2**64, self.available

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, window_R = self.epochs_and_examples(step, samples_R)
        return window_R, np.ones(len(window_R), bool)


class LabelledValidation(LabelledRows, ValidationLoader):
    """To be judged by: all that is held out, in order."""

    def __init__(
        self, side: Side, tokenizer: Tokenizer, model: Model, objective: Objective, batch: int, microbatches: int
    ):
        super().__init__(side, tokenizer, model, objective, batch, microbatches)
        self.example_ids = np.arange(self.available)

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.examples_and_validity(step, samples_R)

    @property
    def count(self) -> int:
        """Examples that are judged."""
        return len(self.examples.labels)

    def figures(self, logits: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
        """What a model's logits of all steps, in order and with the rows of a step first, are worth.

        classification    {"classes": [R, classes]}: eval_loss, eval_accuracy, eval_matthews; of two classes, eval_f1
        multiple_choice   {"choices": [R]}: eval_loss, eval_accuracy
        span              {"spans": [R, T, 2]}, as starts and as ends: eval_loss, eval_exact_match, eval_f1

        Losses are means in nats; a span's, over its rows, is the mean of its start's and its end's."""
        if isinstance(self.objective, Span):
            return self._of_spans(self._joined(logits, "spans"), self.objective.max_answer_length)
        if isinstance(self.objective, MultipleChoice):
            scores_EC = self._joined(logits, "choices").reshape(-1, self.rows_per_example)
            return _of_labels(scores_EC, self.examples.labels)
        logits_EK = self._joined(logits, "classes")
        predicted_E, labels_E = logits_EK.argmax(axis=1), self.examples.labels
        figures = _of_labels(logits_EK, labels_E) | {"eval_matthews": metrics.matthews(labels_E, predicted_E)}
        return figures | ({"eval_f1": metrics.f1(labels_E, predicted_E)} if logits_EK.shape[1] == 2 else {})

    def _joined(self, logits: Sequence[Mapping[str, np.ndarray]], name: str) -> np.ndarray:
        """float64, without the rows that fill the last batch."""
        assert len(logits) == len(self)
        return np.concatenate([np.asarray(each[name], np.float64) for each in logits])[: len(self.table.example)]

    def _of_spans(self, logits_NT2: np.ndarray, longest: int) -> dict[str, float]:
        table, questions = self.table, self.examples.questions
        assert table.ends is not None
        inside_NT = np.arange(self.context) < table.size.sum(axis=1, keepdims=True) + 3
        starts_NT, ends_NT = np.where(inside_NT, np.moveaxis(logits_NT2, 2, 0), -np.inf)
        loss_N = metrics.negative_log_likelihood(starts_NT, table.labels)
        loss_N = (loss_N + metrics.negative_log_likelihood(ends_NT, table.ends)) / 2
        said = self._answers(logits_NT2, longest)
        gold = [[answer.text for answer in each.answers] for each in questions]
        return {
            "eval_loss": float(loss_N.mean()),
            "eval_exact_match": float(np.mean([*map(metrics.exact_match, said, gold)])),
            "eval_f1": float(np.mean([*map(metrics.overlap, said, gold)])),
        }

    def _answers(self, logits_NT2: np.ndarray, longest: int) -> list[str]:
        """Of each question the text of the best span in any of its rows; none where every row prefers its [CLS] to that
        and the files know questions without an answer."""
        table, questions, offsets = self.table, self.examples.questions, self.examples.texts.offsets
        assert offsets is not None
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(questions)
        for row, example in enumerate(table.example):
            (_, begin), (asked, shown) = table.begin[row], table.size[row]
            if shown:
                starts, ends = logits_NT2[row, asked + 2 : asked + 2 + shown].T
                score, i, j = metrics.best_span(starts, ends, longest)
                if score > best[example][0]:
                    text = questions[example].context[offsets[begin + i, 0] : offsets[begin + j, 1]]
                    best[example] = score, text
        if all(each.impossible is None for each in questions):
            return [text for _, text in best]
        none = np.full(len(questions), np.inf)
        np.minimum.at(none, table.example, logits_NT2[:, 0].sum(axis=1))
        return ["" if none[example] > score else text for example, (score, text) in enumerate(best)]


def _of_labels(logits_EK: np.ndarray, labels_E: np.ndarray) -> dict[str, float]:
    return {
        "eval_loss": float(metrics.negative_log_likelihood(logits_EK, labels_E).mean()),
        "eval_accuracy": metrics.accuracy(labels_E, logits_EK.argmax(axis=1)),
    }
