"""Whole-word span masking: the words of a row to mask, and their replacements (Megatron's and ALBERT's n-grams).

Span lengths are drawn first, then positions.  A row of W words gets mask_prob * W / E[n] spans (rounded at random) of n
= 1..max_span words, with probability proportional to 1/n.  Lengths are quantiles of that distribution at one random
offset, so every row has the right proportions.  Positions are uniform among all arrangements in which no two spans
touch: K of the F + 1 gaps around F visible words are drawn without replacement.  The expected fraction of masked
  words, and of masked tokens, is exactly mask_prob; drawing spans until a budget is full would bias it, or shorten the
  last span.

A span is replaced as a unit: 80% by [MASK] throughout, 10% by random tokens, 10% not at all; again by quantiles.  At
least one word of a row stays visible, so a row of one word has no mask.

Shape suffixes: R rows, N tokens, W words, K spans, G gaps between words."""

import numpy as np

from spmd_lm.data.shuffle import fold_in, uniform

UNSELECTED, MASKED, RANDOM, UNCHANGED = range(4)  # replacements of a token; all but the first are predicted
REPLACEMENT_QUANTILES = (0.8, 0.9)  # below the first a span is MASKED, below the second RANDOM

# Independent random streams of a row.
COUNT_STREAM, LENGTH_STREAM, POSITION_STREAM, RANK_STREAM, REPLACEMENT_STREAM, TOKEN_STREAM = range(6)
LAST = np.uint64(2**64 - 1)  # sorts behind every draw


def choose_replacements(
    word_starts_RN: np.ndarray, lengths_R: np.ndarray, keys_R: np.ndarray, mask_prob: float, max_span: int
) -> np.ndarray:
    """The replacement of each token, uint8 [R, N]: UNSELECTED, MASKED, RANDOM or UNCHANGED.

    word_starts: marks the first token of each word, and of each row.
    lengths: tokens of each row; the others are padding.
    keys: uint64, one per row."""
    real_RN = np.arange(word_starts_RN.shape[1]) < lengths_R[:, None]
    word_RN = np.cumsum(word_starts_RN & real_RN, axis=1, dtype=np.int32) - 1
    words_R = word_RN[:, -1] + 1
    spans_RK = _span_lengths(words_R, keys_R, mask_prob, max_span)
    if spans_RK.shape[1] == 0:
        return np.zeros(word_starts_RN.shape, np.uint8)
    unused = int(words_R.max()) + 1  # a last column, never read, for absent spans
    starts_RK = np.where(spans_RK > 0, _span_starts(words_R, spans_RK, keys_R), unused)
    step_RK = _span_replacements(spans_RK, keys_R).astype(np.int8)
    # A running sum of steps, up at a span's start and down at its end; spans never touch, so steps never meet.
    steps_RW = np.zeros((len(words_R), unused + 1), np.int8)
    np.put_along_axis(steps_RW, starts_RK, step_RK, axis=1)
    np.put_along_axis(steps_RW, starts_RK + spans_RK, -step_RK, axis=1)
    replacements_RW = np.cumsum(steps_RW, axis=1, dtype=np.int8).view(np.uint8)
    return np.where(real_RN, np.take_along_axis(replacements_RW, word_RN, axis=1), UNSELECTED)


def apply_replacements(
    tokens_RN: np.ndarray, replacements_RN: np.ndarray, keys_R: np.ndarray, mask_id: int, text_ids: np.ndarray
) -> np.ndarray:
    """The model's input tokens.  text_ids: ids that random tokens are drawn from."""
    masked_RN = np.where(replacements_RN == MASKED, tokens_RN.dtype.type(mask_id), tokens_RN)
    row, column = np.nonzero(replacements_RN == RANDOM)
    masked_RN[row, column] = text_ids[fold_in(keys_R[row], TOKEN_STREAM, column) % len(text_ids)]
    return masked_RN


def _span_lengths(words_R: np.ndarray, keys_R: np.ndarray, mask_prob: float, max_span: int) -> np.ndarray:
    """Words per span [R, K], not in order of position; 0 where a row has fewer spans."""
    harmonic = np.cumsum(1 / np.arange(1, max_span + 1))
    longest_R = np.clip(words_R - 1, 1, max_span)
    total_R = harmonic[longest_R - 1]
    count_R = np.floor(mask_prob * words_R * total_R / longest_R + uniform(keys_R, COUNT_STREAM)).astype(np.int64)
    k = np.arange(count_R.max(initial=0))
    quantile_RK = (k + uniform(keys_R, LENGTH_STREAM)[:, None]) / np.maximum(count_R, 1)[:, None]
    spans_RK = 1 + np.searchsorted(harmonic, quantile_RK * total_R[:, None], side="right")
    spans_RK = np.where(k < count_R[:, None], np.minimum(spans_RK, longest_R[:, None]), 0)
    # One visible word between any two spans, and at least one: only short rows at high rates lack the room.
    fits_RK = np.cumsum(spans_RK, axis=1) + np.maximum(k, 1) <= words_R[:, None]
    return np.where(fits_RK, spans_RK, 0)


def _span_starts(words_R: np.ndarray, spans_RK: np.ndarray, keys_R: np.ndarray) -> np.ndarray:
    """The first word of each span [R, K]."""
    count = spans_RK.shape[1]
    gaps = np.arange(words_R.max() + 1)
    visible_R = words_R - spans_RK.sum(axis=1)
    draws_RG = fold_in(fold_in(keys_R, POSITION_STREAM)[:, None], gaps)
    draws_RG[gaps > visible_R[:, None]] = LAST
    smallest_RK = np.argpartition(draws_RG, count - 1, axis=1)[:, :count]
    order_RK = np.argsort(np.take_along_axis(draws_RG, smallest_RK, axis=1), axis=1)
    gap_RK = np.take_along_axis(smallest_RK, order_RK, axis=1)  # in random order, so lengths may be in any order
    masked_RG = np.zeros(draws_RG.shape, np.int32)
    np.put_along_axis(masked_RG, gap_RK, spans_RK.astype(np.int32), axis=1)
    masked_before_RG = np.cumsum(masked_RG, axis=1, dtype=np.int32) - masked_RG
    return gap_RK + np.take_along_axis(masked_before_RG, gap_RK, axis=1)


def _span_replacements(spans_RK: np.ndarray, keys_R: np.ndarray) -> np.ndarray:
    """MASKED, RANDOM or UNCHANGED for each span [R, K], independent of its length and position."""
    k, real_RK = np.arange(spans_RK.shape[1]), spans_RK > 0
    draws_RK = np.where(real_RK, fold_in(fold_in(keys_R, RANK_STREAM)[:, None], k), LAST)
    rank_RK = np.argsort(np.argsort(draws_RK, axis=1), axis=1)
    offset_R1 = uniform(keys_R, REPLACEMENT_STREAM)[:, None]
    quantile_RK = (rank_RK + offset_R1) / np.maximum(real_RK.sum(axis=1), 1)[:, None]
    return MASKED + np.searchsorted(REPLACEMENT_QUANTILES, quantile_RK, side="right")
