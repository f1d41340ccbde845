"""Rows of masked text: [CLS] A [SEP] B [SEP], where A and B are two segments of one document, or [CLS] A [SEP].

A document is cut into as many windows of a row's text as fit, at a new offset each epoch; a shorter document is one
window.  A window is trimmed to whole sentences or lines, else to whole words.  A row never mixes documents; a short one
is padded.  Spans are masked first; then the row is cut in two at the start of a sentence or line outside of spans, so
no span reaches from A into B.  In half of the rows A and B are swapped (ALBERT's sentence order, arXiv:1909.11942).
Only their content reveals the order: both begin and end alike.

Everything is drawn from (seed, epoch, window), so each epoch has its own masks, cuts and swaps.

Shape suffixes: R rows, T context, P tokens of text per row, Q = P + 1 boundaries around them, D documents."""

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.data.loader import OFFSET_STREAM, ROW_STREAM, Loader, SampleIndices, SplitName, how_to_add_text
from spmd_lm.data.masked_lm.masking import UNSELECTED, apply_replacements, choose_replacements
from spmd_lm.data.shuffle import fold_in, uniform
from spmd_lm.data.token_array import TokenArray
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import DataError

# Independent random streams of a row.
SHORT_STREAM, SHORT_LENGTH_STREAM, SWAP_STREAM, CUT_STREAM, MASK_STREAM = range(5)
VALIDATION_KEY = 2**63  # in place of a seed: the masks of validation never change


class MaskedLMLoader(Loader):
    """Rows of masked text.

    Raises ConfigError for a vocabulary without [MASK], DataError for too little text."""

    def __init__(
        self, tokens: TokenArray, tokenizer: Tokenizer, config: RunConfig, split: SplitName, seed: int | None = None
    ):
        assert isinstance(config.objective, MaskedLM)
        self.special, self.words = tokenizer.special_tokens_and_words()
        self.text_ids = self.words.text_ids[self.words.text_ids < config.model.vocab]
        self.tokens, self.objective, self.has_token_types = tokens, config.objective, config.model.token_types > 0
        self.text_size = config.model.context - (3 if self.objective.sentence_order else 2)

        start_D, stop_D = tokens.document_texts()
        start_D, stop_D = start_D[stop_D > start_D], stop_D[stop_D > start_D]  # documents without tokens have no window
        size_D = stop_D - start_D
        windows_D = np.maximum(size_D // self.text_size, 1)
        self.start_D, self.stop_D, self.first_window_D = start_D, stop_D, np.cumsum(windows_D) - windows_D
        self.slack_D = np.maximum(size_D - windows_D * self.text_size, 0)  # tokens that its windows leave over
        if size_D.sum() < self.text_size:
            raise DataError(
                f"{split} text: {size_D.sum()} tokens, but a row of model.context={config.model.context} holds "
                f"{self.text_size}. {how_to_add_text(config, split)}, or lower model.context."
            )
        super().__init__(config, split, int(windows_D.sum()), seed=seed)
        if split == "validation" and not any(
            self.rows(step, 0, self.batch_size).loss_weights.any() for step in range(len(self))
        ):
            raise DataError(
                f"{split} text: none of its {tokens.size} tokens is masked, so there is no loss to evaluate. "
                f"{how_to_add_text(config, split)}, or set train.eval_every=0."
            )

    def read(self, indices: SampleIndices) -> Batch:
        window_R, epoch_R, objective, special = indices.example_R, indices.epoch_R, self.objective, self.special
        document_R = np.searchsorted(self.first_window_D, window_R, side="right") - 1
        offset_R = self.start_D[document_R] + (window_R - self.first_window_D[document_R]) * self.text_size
        if epoch_R is None:
            key_R = fold_in(VALIDATION_KEY, window_R)
        else:
            key_R = fold_in(self.seed, ROW_STREAM, epoch_R, window_R)
            shift_R = fold_in(self.seed, OFFSET_STREAM, epoch_R, document_R)
            offset_R += (shift_R % (self.slack_D[document_R] + 1).astype(np.uint64)).astype(np.int64)
        tokens_RP, word_starts_RP, length_R = self._read_text(document_R, offset_R, key_R)

        mask_key_R = fold_in(key_R, MASK_STREAM)
        replacements_RP = choose_replacements(
            word_starts_RP, length_R, mask_key_R, objective.mask_prob, objective.max_span
        )
        masked_RP = apply_replacements(tokens_RP, replacements_RP, mask_key_R, special.mask, self.text_ids)
        weights_RP = ((replacements_RP != UNSELECTED) & indices.valid_R[:, None]).astype(np.float32)
        cut_R = self._cut(tokens_RP, word_starts_RP, replacements_RP, key_R)
        swapped_R = (cut_R > 0) & (uniform(key_R, SWAP_STREAM) < 0.5)
        source_RT, valid_RT, in_b_RT = _layout(length_R, cut_R, swapped_R, self.text_size, self.context)

        def lay_out(columns_RP: np.ndarray, *specials: int) -> np.ndarray:
            """[R, T] from columns of text and the values for CLS, SEP and PAD."""
            specials_R3 = np.broadcast_to(np.array(specials, columns_RP.dtype), (len(columns_RP), 3))
            return np.take_along_axis(np.concatenate([columns_RP, specials_R3], axis=1), source_RT, axis=1)

        ordered = objective.sentence_order
        return Batch(
            tokens=lay_out(masked_RP, special.cls, special.sep, special.pad),
            targets=lay_out(tokens_RP, special.cls, special.sep, special.pad),
            loss_weights=lay_out(weights_RP, 0, 0, 0),
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), source_RT.shape),
            segments=valid_RT.astype(np.int32),
            sample_ids=indices.sample_ids_R.astype(np.int32),
            token_type_ids=in_b_RT.astype(np.int32) if self.has_token_types else None,
            labels=swapped_R.astype(np.int32) if ordered else None,
            label_weights=((cut_R > 0) & indices.valid_R).astype(np.float32) if ordered else None,
        )

    def _read_text(
        self, document_R: np.ndarray, offset_R: np.ndarray, key_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads each row's window, trimmed and left-aligned: tokens int32 [R, P], word starts bool [R, P], length
        [R]."""
        size, start_R, stop_R = self.text_size, self.start_D[document_R], self.stop_D[document_R]
        available_R = np.minimum(size, stop_R - offset_R)

        # One token more on either side shows whether words begin and end at the edges of the window.
        index = offset_R[:, None] + np.arange(-1, size + 1)
        width = min(size + 2, self.tokens.size)
        first_R = np.clip(offset_R - 1, 0, self.tokens.size - width)
        columns = np.clip(index, start_R[:, None], stop_R[:, None] - 1) - first_R[:, None]
        near = np.take_along_axis(self.tokens.read(first_R, width), columns, axis=1)
        words_RQ = self.words.word_starts(near)[:, 1:]
        sentences_RQ = words_RQ & self.words.sentence_starts(near)[:, 1:]
        for bounds_RQ in (words_RQ, sentences_RQ):
            bounds_RQ[offset_R == start_R, 0] = True
            bounds_RQ[np.arange(len(near)), available_R] |= offset_R + available_R == stop_R
            bounds_RQ &= np.arange(size + 1) <= available_R[:, None]

        first_R, last_R = self._trim(words_RQ, sentences_RQ, available_R, key_R)
        length_R = last_R - first_R
        columns_RP = np.minimum(first_R[:, None] + np.arange(size), size)
        word_starts_RP = np.take_along_axis(words_RQ, columns_RP, axis=1) & (np.arange(size) < length_R[:, None])
        word_starts_RP[:, 0] = True
        return np.take_along_axis(near[:, 1:], columns_RP, axis=1), word_starts_RP, length_R

    def _trim(
        self, words_RQ: np.ndarray, sentences_RQ: np.ndarray, available_R: np.ndarray, key_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the first token to keep [R] and past the last one [R], at boundaries of sentences or of words.
        Words that cross the window's edges are left out, but a word longer than the window is cut.  With probability
        short_seq_prob a row takes a random number of tokens, at least 2, otherwise all."""
        ordered = self.objective.sentence_order
        short_R = uniform(key_R, SHORT_STREAM) < self.objective.short_seq_prob
        draw_R = (uniform(key_R, SHORT_LENGTH_STREAM) * np.maximum(available_R - 1, 1)).astype(np.int64)
        asked_R = np.where(short_R, 2 + draw_R, available_R)
        # Rows are cut between sentences; edges elsewhere would reveal which segment came first.
        by_sentence_R = ordered & (sentences_RQ.sum(axis=1) > 2)
        bounds_RQ = np.where(by_sentence_R[:, None], sentences_RQ, words_RQ)
        r = np.arange(len(bounds_RQ))

        first_R = np.argmax(bounds_RQ, axis=1)
        first_R = np.where(bounds_RQ[r, first_R] & (first_R < available_R), first_R, 0)  # 0: it lies within one word
        bounds_RQ[r, first_R] = True
        units_RQ = np.cumsum(bounds_RQ & (np.arange(bounds_RQ.shape[1]) >= first_R[:, None]), axis=1) - 1
        target_R = np.minimum(first_R + asked_R, available_R)
        least_R = np.minimum(units_RQ[:, -1], 2 if ordered else 1)  # one sentence or word per segment
        kept_R = np.maximum(units_RQ[r, target_R], least_R)
        return first_R, np.where(kept_R > 0, np.argmax(units_RQ >= kept_R[:, None], axis=1), available_R)

    def _cut(
        self, tokens_RP: np.ndarray, word_starts_RP: np.ndarray, replacements_RP: np.ndarray, key_R: np.ndarray
    ) -> np.ndarray:
        """The column where the second segment begins [R]: a sentence if possible, else a word; 0 for a single
        segment."""
        if not self.objective.sentence_order:
            return np.zeros(len(tokens_RP), np.int64)
        visible_RP = replacements_RP == UNSELECTED
        words_RP = word_starts_RP.copy()
        words_RP[:, 0] = False
        words_RP[:, 1:] &= visible_RP[:, 1:] | visible_RP[:, :-1]  # no two spans touch: two masked words share a span
        sentences_RP = words_RP & self.words.sentence_starts(tokens_RP)
        candidates_RP = np.where(sentences_RP.any(axis=1)[:, None], sentences_RP, words_RP)
        rank_RP = np.cumsum(candidates_RP, axis=1, dtype=np.int32)
        nth_R = 1 + (uniform(key_R, CUT_STREAM) * rank_RP[:, -1]).astype(np.int64)
        return np.argmax(rank_RP == nth_R[:, None], axis=1)  # 0 without a candidate


def _layout(
    length_R: np.ndarray, cut_R: np.ndarray, swapped_R: np.ndarray, text_size: int, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The source column, validity and segment (True: B) of each position, [R, T] each.  Columns are `text_size` tokens
    of text, then CLS, SEP and PAD.  A cut of 0 means a single segment."""
    cls, sep, pad = text_size + np.arange(3)
    t = np.arange(context)
    length, cut, swapped, paired = (x[:, None] for x in (length_R, cut_R, swapped_R, cut_R > 0))
    length_a = np.where(paired, np.where(swapped, length - cut, cut), length)
    end = length + 2 + paired
    in_b = paired & (t > length_a + 1) & (t < end)
    source = t - 1 - in_b + np.where(swapped, cut, 0)
    source = np.where(source >= length, source - length, source)
    source = np.where((t == length_a + 1) | (t == end - 1), sep, source)
    return np.where(t < end, np.where(t == 0, cls, source), pad), t < end, in_b
