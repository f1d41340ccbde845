"""Rows of masked text: [CLS] A [SEP] B [SEP], two pieces of one document, or [CLS] A [SEP].

A document is cut into stretches of what a row holds, at an offset of the epoch's own, and a stretch is trimmed to whole
sentences or lines, else to whole words; documents never meet in a row, and what is left of one is padding.  Spans are
hidden first and the row is cut in two afterwards, where a sentence or a line begins and no span is, so that none
reaches from A into B.  Which came first, A or B, is a label, and what they say alone tells it: both begin and end
alike.

All is drawn from (seed, epoch, stretch): each epoch has masks, cuts and swaps of its own.

R rows, P tokens of text that fit a row, T the context."""

import abc
import dataclasses

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import MaskedLM, Model
from spmd_lm.data.batch_source import DRAWS, SHIFT, HeldOut, Rows, Shuffled
from spmd_lm.data.masked_lm import masking
from spmd_lm.data.masked_lm.masking import uniform
from spmd_lm.data.shuffle import fold
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import DataError

SHORT, SHORT_LENGTH, SWAP, CUT, HIDE = range(5)  # what a row draws
VALIDATION = 2**63  # in place of a seed


@dataclasses.dataclass(frozen=True)
class Stretches:
    """Documents as stretches of at most `length` tokens: each has as many as fit, and one if it is shorter."""

    begin_D: np.ndarray  # offset of a document's first token
    end_D: np.ndarray  # and past its last
    first_D: np.ndarray  # the number of its first stretch
    slack_D: np.ndarray  # tokens that its stretches leave over
    length: int
    count: int  # of all

    @classmethod
    def of(cls, tokens: np.ndarray, end: int | None, length: int) -> "Stretches":
        """end: the id between documents; documents without a token have no stretch."""
        ends = np.flatnonzero(tokens == end) if end is not None else np.zeros(0, np.int64)
        begin, stop = np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(tokens)]])
        begin, stop = begin[stop > begin], stop[stop > begin]
        counts = np.maximum((stop - begin) // length, 1)
        slack = np.maximum(stop - begin - counts * length, 0)
        return cls(begin, stop, np.cumsum(counts) - counts, slack, length, int(counts.sum()))

    def documents(self, stretch_R: np.ndarray) -> np.ndarray:
        """Which document each stretch is of."""
        return np.searchsorted(self.first_D, stretch_R, side="right") - 1


class MaskedRows(Rows):
    """Rows of masked text from one array of tokens, a np.memmap as well.

    Raises ConfigError for a vocabulary without [MASK], DataError for too little text."""

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        model: Model,
        objective: MaskedLM,
        batch: int,
        microbatches: int,
    ):
        assert tokens.ndim == 1 and batch % microbatches == 0
        self.special, self.words = tokenizer.masking()
        self.tokens, self.objective, self.typed = tokens, objective, model.token_types > 0
        self.context, self.batch_size, self.microbatches = model.context, batch, microbatches
        self.room = model.context - (3 if objective.sentence_order else 2)
        self.stretches = Stretches.of(tokens, tokenizer.end, self.room)
        if (size := int((self.stretches.end_D - self.stretches.begin_D).sum())) < self.room:
            raise DataError(
                f"{self.side} text: {size} tokens, but a row of model.context={model.context} holds {self.room}. "
                "Add text, change data.validation_fraction, or lower model.context."
            )

    @abc.abstractmethod
    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each row: its stretch, how far that is shifted, the key of its draws, its weight."""

    def rows(self, step: int, start: int, stop: int) -> Batch:
        assert 0 <= start <= stop <= self.batch_size
        samples_R = np.arange(start, stop)
        stretch_R, shift_R, keys_R, weights_R = self.locate(step, samples_R)
        objective, special = self.objective, self.special

        text_RP, begins_RP, length_R = self._read(stretch_R, shift_R, keys_R)
        hiding_R = fold(keys_R, HIDE)
        fates_RP = masking.choose(begins_RP, length_R, hiding_R, objective.mask_prob, objective.max_span)
        hidden_RP = masking.hide(text_RP, fates_RP, hiding_R, special.mask, self.words.ordinary)
        cut_R = self._cut(text_RP, begins_RP, fates_RP, length_R, keys_R)  # 0: the row stays whole
        swapped_R = (cut_R > 0) & (uniform(keys_R, SWAP) < 0.5)

        source_RT, inside_RT, in_b_RT = _layout(length_R, cut_R, swapped_R, self.room, self.context)

        def laid(columns_RP: np.ndarray, *more: int) -> np.ndarray:
            """Of each column and of CLS, SEP and PAD, as rows have them."""
            extra = np.broadcast_to(np.array(more, columns_RP.dtype), (len(columns_RP), 3))
            return np.take_along_axis(np.concatenate([columns_RP, extra], axis=1), source_RT, axis=1)

        marks = special.cls, special.sep, special.pad
        counted_RP = (fates_RP != masking.OPEN) * weights_R[:, None].astype(np.float32)
        ordered = objective.sentence_order
        return Batch(
            tokens=laid(hidden_RP, *marks),
            targets=laid(text_RP, *marks),
            weights=laid(counted_RP, 0, 0, 0),
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), source_RT.shape),
            segments=inside_RT.astype(np.int32),
            samples=samples_R.astype(np.int32),
            types=in_b_RT.astype(np.int32) if self.typed else None,
            labels=swapped_R.astype(np.int32) if ordered else None,
            label_weights=((cut_R > 0) * weights_R).astype(np.float32) if ordered else None,
        )

    def _read(
        self, stretch_R: np.ndarray, shift_R: np.ndarray, keys_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Whole sentences of each stretch, or whole words where it has no two or a row is not cut: int32 [R, P]
        from the left, which of them begin words, how many tokens they are.

        A word longer than the row is cut; one that begins or ends outside is left out."""
        document_R = self.stretches.documents(stretch_R)
        begin_R, end_R = self.stretches.begin_D[document_R], self.stretches.end_D[document_R]
        offset_R = begin_R + (stretch_R - self.stretches.first_D[document_R]) * self.room + shift_R
        limit_R = np.minimum(self.room, end_R - offset_R)

        at = offset_R[:, None] + np.arange(-1, self.room + 1)  # a token more on either side shows where words end
        near = self.tokens[np.clip(at, begin_R[:, None], end_R[:, None] - 1)].astype(np.int32)
        rows, here = np.arange(len(near)), np.arange(self.room + 1)
        bounds = self.words.begins(near)[:, 1:]  # between words, from 0 to limit
        sentences = bounds & self.words.sentences(near)[:, 1:]
        for each in (bounds, sentences):
            each[offset_R == begin_R, 0] = True
            each[rows, limit_R] |= offset_R + limit_R == end_R
            each &= here <= limit_R[:, None]
        # Where the two pieces part, there both begin and end: else how a row begins would tell which came first.
        whole_R = self.objective.sentence_order & (sentences.sum(axis=1) > 2)
        units = np.where(whole_R[:, None], sentences, bounds)

        first_R = np.argmax(units, axis=1)
        first_R = np.where(units[rows, first_R] & (first_R < limit_R), first_R, 0)  # within one word: where it starts
        bounds[rows, first_R] = units[rows, first_R] = True
        rank = np.cumsum(units & (here >= first_R[:, None]), axis=1) - 1  # units before each bound
        reached_R = rank[rows, np.minimum(first_R + self._lengths(limit_R, keys_R), limit_R)]
        wanted_R = np.maximum(reached_R, np.minimum(rank[:, -1], 2 if self.objective.sentence_order else 1))
        last_R = np.where(wanted_R > 0, np.argmax(rank >= wanted_R[:, None], axis=1), limit_R)

        length_R = last_R - first_R
        columns = np.minimum(first_R[:, None] + here[:-1], self.room)
        text_RP = np.take_along_axis(near[:, 1:], columns, axis=1)
        begins_RP = np.take_along_axis(bounds, columns, axis=1) & (here[:-1] < length_R[:, None])
        return text_RP, begins_RP, length_R

    def _lengths(self, limit_R: np.ndarray, keys_R: np.ndarray) -> np.ndarray:
        """How many tokens each row asks for: `limit`, or from 2 on with probability `objective.short_seq_prob`."""
        short_R = uniform(keys_R, SHORT) < self.objective.short_seq_prob
        drawn_R = 2 + (uniform(keys_R, SHORT_LENGTH) * np.maximum(limit_R - 1, 1)).astype(np.int64)
        return np.where(short_R, drawn_R, limit_R)

    def _cut(
        self,
        text_RP: np.ndarray,
        begins_RP: np.ndarray,
        fates_RP: np.ndarray,
        length_R: np.ndarray,
        keys_R: np.ndarray,
    ) -> np.ndarray:
        """Where the second piece begins [R]: at a sentence if there is one, else at a word; 0 if there is neither."""
        if not self.objective.sentence_order:
            return np.zeros(len(text_RP), np.int64)
        words_RP = begins_RP.copy()
        words_RP[:, 0] = False
        words_RP[:, 1:] &= (fates_RP[:, 1:] == masking.OPEN) | (fates_RP[:, :-1] == masking.OPEN)
        sentences_RP = words_RP & self.words.sentences(text_RP)
        places_RP = np.where(sentences_RP.any(axis=1)[:, None], sentences_RP, words_RP)
        rank_RP = np.cumsum(places_RP, axis=1, dtype=np.int32)
        nth_R = 1 + (uniform(keys_R, CUT) * rank_RP[:, -1]).astype(np.int64)
        return np.argmax(rank_RP == nth_R[:, None], axis=1)  # 0 where no rank is 1


def _layout(
    length_R: np.ndarray, cut_R: np.ndarray, swapped_R: np.ndarray, room: int, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each position [R, T]: the column that its token comes from, whether it is no padding, whether it is B's.

    Columns are `room` tokens of text and three more: CLS, SEP and PAD.  cut: 0 where a row is one piece."""
    cls, sep, pad = room + np.arange(3)
    t = np.arange(context)
    length, cut, swapped, two = (x[:, None] for x in (length_R, cut_R, swapped_R, cut_R > 0))
    first = np.where(two, np.where(swapped, length - cut, cut), length)  # tokens of A
    end = length + 2 + two
    in_b = two & (t > first + 1) & (t < end)
    source = t - 1 - in_b + np.where(swapped, cut, 0)
    source = np.where(source >= length, source - length, source)
    source = np.where((t == first + 1) | (t == end - 1), sep, source)
    return np.where(t < end, np.where(t == 0, cls, source), pad), t < end, in_b


class MaskedLoader(MaskedRows, Shuffled):
    """The training text: each stretch once per epoch."""

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        model: Model,
        objective: MaskedLM,
        batch: int,
        microbatches: int,
        seed: int,
    ):
        super().__init__(tokens, tokenizer, model, objective, batch, microbatches)
        self.seed, self.windows = seed % 2**64, self.stretches.count

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        epoch, stretch = self.turn(step, samples_R)
        document = self.stretches.documents(stretch)
        shift = fold(self.seed, SHIFT, epoch, document) % (self.stretches.slack_D[document] + 1).astype(np.uint64)
        return stretch, shift.astype(np.int64), fold(self.seed, DRAWS, epoch, stretch), np.ones(len(samples_R))


class MaskedValidation(MaskedRows, HeldOut):
    """At most `count` batches, evenly spaced over the held-out text, their masks as fixed as they are."""

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        model: Model,
        objective: MaskedLM,
        batch: int,
        microbatches: int,
        count: int,
    ):
        super().__init__(tokens, tokenizer, model, objective, batch, microbatches)
        self.take(self.stretches.count, count)
        if not any(self.rows(step, 0, batch).weights.any() for step in range(len(self))):
            raise DataError(
                f"{self.side} text: of its {len(tokens)} tokens none is hidden, so there is no loss of them. "
                "Add text, change data.validation_fraction, or set train.eval_every=0."
            )

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        stretch, real = self.turn(step, samples_R)
        return stretch, np.zeros_like(stretch), fold(VALIDATION, stretch), real.astype(np.float64)
