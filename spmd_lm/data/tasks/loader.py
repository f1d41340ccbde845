"""Batches of a task's features: examples as a model reads them, [CLS] A [SEP] B [SEP] or [CLS] A [SEP].

A pair that does not fit its row is truncated "longest first", one token at a time from the end of the longer text
(arXiv:1810.04805).  With a question, the context is read in overlapping windows instead, one feature each (SQuAD's
sliding window, with its `doc_stride`), and the question gets at most a quarter of the row.

Shape suffixes: E examples, P text pairs, N features, R of them in a batch, T the context."""

import dataclasses

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, ExtractiveQA, RunConfig
from spmd_lm.data.loader import Loader, SampleIndices, SplitName
from spmd_lm.data.tasks.dataset import Split
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import DataError


@dataclasses.dataclass(frozen=True)
class Features:
    """A split's features, as slices of its texts, with labels."""

    start: np.ndarray  # int64 [N, 2]: where A and B start in split.tokens
    length: np.ndarray  # int64 [N, 2]: tokens of each in the row
    has_pair: np.ndarray  # bool [N]: the feature has a B
    example: np.ndarray  # int64 [N]: index of the example
    labels: np.ndarray  # int32 [N]: class, or correct choice, or position where the answer starts (0: not in this row)
    end_positions: np.ndarray | None  # int32 [N]: the position of the answer's last token; None without answers


class TaskLoader(Loader):
    """Shuffles features, or multiple-choice questions with all their features.  Raises ConfigError for a vocabulary
    without [CLS] and [SEP], DataError for a label that is not a class."""

    def __init__(self, task_split: Split, tokenizer: Tokenizer, config: RunConfig, split: SplitName):
        self.special, _ = tokenizer.special_tokens_and_words()
        objective, rows_per_example = config.objective, config.objective.rows_per_example
        self.task_split, self.objective, self.has_token_types = task_split, objective, config.model.token_types > 0
        if isinstance(objective, Classification) and (max_label := int(task_split.labels.max())) >= objective.classes:
            raise DataError(
                f"{task_split.max_label_location}: label {max_label} is not below "
                f"objective.classes={objective.classes}. Use objective.classes={max_label + 1}, or fix the label."
            )
        if isinstance(objective, ExtractiveQA):
            self.features = _windowed(task_split, config.model.context, objective.doc_stride)
        else:
            self.features = _truncated(task_split, config.model.context, rows_per_example)
        super().__init__(config, split, len(self.features.example) // rows_per_example, rows_per_example)

    def read(self, indices: SampleIndices) -> Batch:
        features, tokens, special = self.features, self.task_split.tokens, self.special
        position = np.arange(self.context)
        choice_R = indices.sample_ids_R % self.rows_per_example
        rows_R = indices.example_R * self.rows_per_example + choice_R
        start_a, start_b = features.start[rows_R].T[..., None]
        length_a, length_b = features.length[rows_R].T[..., None]
        has_pair = features.has_pair[rows_R][:, None]
        row_length = length_a + 2 + has_pair * (length_b + 1)
        in_row = position < row_length
        in_b = has_pair & (position > length_a + 1) & in_row
        is_text = np.where(in_b, position < row_length - 1, (position > 0) & (position <= length_a))
        source = np.where(in_b, start_b + position - length_a - 2, start_a + position - 1)
        text_ids = tokens[np.where(is_text, source, 0)] if tokens.size else 0
        special_ids = np.where(position == 0, special.cls, np.where(in_row, special.sep, special.pad))
        return Batch(
            tokens=np.where(is_text, text_ids, special_ids).astype(np.int32),
            targets=None,
            loss_weights=None,
            positions=np.broadcast_to(position.astype(np.int32), in_row.shape),
            segments=in_row.astype(np.int32),
            sample_ids=indices.sample_ids_R.astype(np.int32),
            token_type_ids=in_b.astype(np.int32) if self.has_token_types else None,
            labels=features.labels[rows_R],
            end_positions=None if features.end_positions is None else features.end_positions[rows_R],
            label_weights=(indices.valid_R & (choice_R == 0)).astype(np.float32),
        )


def _text_slices(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of both texts of each pair, int64 [P, 2]; 0 and 0 for a missing text."""
    exists, bounds = split.text_pairs >= 0, split.bounds
    start = np.where(exists, bounds[split.text_pairs], 0)
    return start, np.where(exists, bounds[split.text_pairs + 1] - start, 0)


def _truncated(split: Split, context: int, rows_per_example: int) -> Features:
    """One feature per pair.  The longer text, or B if equally long, loses its last token until both fit."""
    assert len(split.text_pairs) == len(split.labels) * rows_per_example
    start, length = _text_slices(split)
    has_pair = split.text_pairs[:, 1] >= 0
    max_length, (a, b) = context - 2 - has_pair, length.T
    a = np.minimum(a, np.maximum((max_length + 1) // 2, max_length - b))
    return Features(
        start=start,
        length=np.stack([a, np.minimum(b, max_length - a)], axis=1),
        has_pair=has_pair,
        example=np.repeat(np.arange(len(split.labels)), rows_per_example),
        labels=np.repeat(split.labels, rows_per_example),
        end_positions=None,
    )


def _windowed(split: Split, context: int, doc_stride: int) -> Features:
    """Windows over each question's context, at most `doc_stride` tokens apart, one feature each."""
    start_E2, length_E2 = _text_slices(split)
    question_E = np.minimum(length_E2[:, 0], context // 4)
    window_E = context - 3 - question_E  # tokens of the context that fit beside [CLS] and two [SEP]
    stride_E = np.minimum(doc_stride, window_E)
    windows_E = 1 + -(-np.maximum(length_E2[:, 1] - window_E, 0) // stride_E)

    example = np.repeat(np.arange(len(windows_E)), windows_E)
    window_index = np.arange(len(example)) - (np.cumsum(windows_E) - windows_E)[example]
    window_start = window_index * stride_E[example]
    window_length = np.minimum(window_E[example], length_E2[example, 1] - window_start)

    answers_E2 = [_answer_tokens(split, index) for index in range(len(split.questions))]
    first, last = np.array(answers_E2, np.int64).T[:, example]
    in_window = (first >= window_start) & (last < window_start + window_length)
    to_position = question_E[example] + 2 - window_start
    return Features(
        start=np.stack([start_E2[example, 0], start_E2[example, 1] + window_start], axis=1),
        length=np.stack([question_E[example], window_length], axis=1),
        has_pair=np.ones(len(example), bool),
        example=example,
        labels=np.where(in_window, first + to_position, 0).astype(np.int32),
        end_positions=np.where(in_window, last + to_position, 0).astype(np.int32),
    )


def _answer_tokens(split: Split, example: int) -> tuple[int, int]:
    """First and last token, within the context, of a question's first answer; (-1, -1) without one."""
    assert split.offset_mapping is not None
    if not (answers := split.questions[example].answers):
        return -1, -1
    start, end = answers[0].answer_start, answers[0].answer_start + len(answers[0].text)
    text = split.text_pairs[example, 1]
    starts, ends = split.offset_mapping[split.bounds[text] : split.bounds[text + 1]].T
    overlapping = np.flatnonzero((ends > start) & (starts < end))
    # A vocabulary may have no token for any character of the answer.
    return (int(overlapping[0]), int(overlapping[-1])) if overlapping.size else (-1, -1)
