"""Features, in Hugging Face's sense: an example as a model reads it, [CLS] A [SEP] B [SEP] or [CLS] A [SEP].

A pair that does not fit its row is truncated "longest first", one token at a time from the end of the longer text
(arXiv:1810.04805).  A question and its context are not: the question gets at most a quarter of the row, and the context
is read in overlapping windows, one feature each (SQuAD's sliding window, with its `doc_stride`).

E examples, N features, R of them in a batch, T the context."""

import dataclasses
from typing import NamedTuple

import numpy as np

from spmd_lm.config.schema import ExtractiveQA, Objective
from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens
from spmd_lm.data.tasks.dataset import Split


class EncodedRows(NamedTuple):
    """Rows as arrays, int32 [R, T] each."""

    tokens: np.ndarray
    attention_mask: np.ndarray  # 0 is padding
    token_types: np.ndarray  # 1 is text B with its [SEP]


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of a split, as slices of its texts, with their labels."""

    start: np.ndarray  # int64 [N, 2]: where A and B start in split.texts.tokens
    length: np.ndarray  # int64 [N, 2]: how many tokens of each the row holds
    has_pair: np.ndarray  # bool [N]: whether there is a B
    example: np.ndarray  # int64 [N]: index of the example
    labels: np.ndarray  # int32 [N]: class, or correct choice, or the position where the answer starts (0: none here)
    end_positions: np.ndarray | None  # int32 [N]: the position of the answer's last token; None without answers

    @classmethod
    def from_split(cls, split: Split, context: int, objective: Objective) -> "Features":
        if isinstance(objective, ExtractiveQA):
            return _windowed(split, context, objective.doc_stride)
        assert split.pairs_per_example == objective.rows_per_example
        start, length = _text_slices(split)
        has_pair = split.text_pairs[:, 1] >= 0
        return cls(
            start=start,
            length=truncate_longest_first(length, context - 2 - has_pair),
            has_pair=has_pair,
            example=np.repeat(np.arange(len(split.labels)), split.pairs_per_example),
            labels=np.repeat(split.labels, split.pairs_per_example),
            end_positions=None,
        )

    def encode(self, rows_R: np.ndarray, tokens: np.ndarray, special: SpecialTokens, context: int) -> EncodedRows:
        """These features, out of the split's `tokens`."""
        position = np.arange(context)
        start_a, start_b = self.start[rows_R].T[..., None]
        length_a, length_b = self.length[rows_R].T[..., None]
        has_pair = self.has_pair[rows_R][:, None]
        row_length = length_a + 2 + has_pair * (length_b + 1)
        in_b = has_pair & (position > length_a + 1) & (position < row_length)
        is_text = np.where(in_b, position < row_length - 1, (position > 0) & (position <= length_a))
        source = np.where(in_b, start_b + position - length_a - 2, start_a + position - 1)
        text_ids = tokens[np.where(is_text, source, 0)] if tokens.size else 0
        after_cls = np.where(position < row_length, special.sep, special.pad)
        special_ids = np.where(position == 0, special.cls, after_cls)
        return EncodedRows(
            tokens=np.where(is_text, text_ids, special_ids).astype(np.int32),
            attention_mask=(position < row_length).astype(np.int32),
            token_types=in_b.astype(np.int32),
        )


def _text_slices(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Start and number of tokens of both texts of each pair, int64 [P, 2]; 0 and 0 for a text that is missing."""
    exists, bounds = split.text_pairs >= 0, split.texts.bounds
    start = np.where(exists, bounds[split.text_pairs], 0)
    return start, np.where(exists, bounds[split.text_pairs + 1] - start, 0)


def truncate_longest_first(length: np.ndarray, max_length: np.ndarray) -> np.ndarray:
    """How many tokens of A and B [N, 2] remain if both together may have `max_length` [N]: the longer one loses its
    last token until they fit; of two equally long ones, B."""
    a, b = length.T
    a = np.minimum(a, np.maximum((max_length + 1) // 2, max_length - b))
    return np.stack([a, np.minimum(b, max_length - a)], axis=1)


def _windowed(split: Split, context: int, doc_stride: int) -> Features:
    """As many features per question as its context needs, at most `doc_stride` tokens apart."""
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
    """The first and last token, counted within the context, of a question's first answer; (-1, -1) without one."""
    answers, offset_mapping = split.questions[example].answers, split.texts.offset_mapping
    assert offset_mapping is not None
    if not answers:
        return -1, -1
    starts, ends = offset_mapping[split.texts.tokens_of(split.text_pairs[example, 1])].T
    text, start = answers[0]
    overlapping = np.flatnonzero((ends > start) & (starts < start + len(text)))
    if not overlapping.size:  # a vocabulary may have no token for any of its characters
        return -1, -1
    return int(overlapping[0]), int(overlapping[-1])
