"""Which words of a row are hidden, and what stands in their place: Megatron's and ALBERT's n-gram masking.

Spans are chosen first, then places for them.  A row of W words gets rate * W / E[n] spans (the fraction is drawn), of
n = 1..max_span words with probability proportional to 1/n; their lengths are the quantiles of that distribution behind
one random offset, so that proportions hold in every row and no span is cut short to meet a budget.  Then one of all the
arrangements is drawn in which no two spans touch: K of the F + 1 gaps that the F words left to read make, without
replacement, hence each is as likely.  Drawing spans until a budget is full would bias both: the last one would be
shorter than stated, or the rate higher.  The expected share of words hidden is exactly `rate`, and of tokens as well,
for a place does not depend on how long its words are.

A span is hidden as one: 80% as [MASK] throughout, 10% as random tokens, 10% as it is; quantiles again.  In a row of
fewer than max_span + 1 words a span is shorter than the row, which keeps a word to be read by; of one word nothing is
hidden.

R rows, N tokens, W words, K spans."""

import numpy as np

from spmd_lm.data.shuffle import fold

OPEN, MASKED, RANDOM, KEPT = range(4)  # what becomes of a token
SHARES = (0.8, 0.9)  # below the first a span is MASKED, below the second RANDOM

COUNT, LENGTH, PLACE, FATE, FATES_OF, TOKEN = range(6)  # what a row draws


def choose(begins_RN: np.ndarray, lengths_R: np.ndarray, keys_R: np.ndarray, rate: float, max_span: int) -> np.ndarray:
    """What becomes of each token, uint8 [R, N].

    begins: which tokens begin a word, the first of each row among them; lengths: tokens of each row, the others are
    padding; keys: of each row's draws, uint64."""
    real_RN = np.arange(begins_RN.shape[1]) < lengths_R[:, None]
    word_RN = np.cumsum(begins_RN & real_RN, axis=1, dtype=np.int32) - 1
    words_R = word_RN[:, -1] + 1
    spans_RK = _spans(words_R, keys_R, rate, max_span)
    if spans_RK.shape[1] == 0:
        return np.zeros(begins_RN.shape, np.uint8)
    starts_RK = _places(words_R, spans_RK, keys_R)
    fates_RW = _painted(words_R, starts_RK, spans_RK, _fates(spans_RK, keys_R))
    return np.where(real_RN, np.take_along_axis(fates_RW, word_RN, axis=1), OPEN)


def hide(
    tokens_RN: np.ndarray, fates_RN: np.ndarray, keys_R: np.ndarray, mask: int, ordinary: np.ndarray
) -> np.ndarray:
    """The tokens as the model reads them.  ordinary: the ids that random tokens are drawn from, each on its own."""
    hidden_RN = np.where(fates_RN == MASKED, tokens_RN.dtype.type(mask), tokens_RN)
    row, place = np.nonzero(fates_RN == RANDOM)
    hidden_RN[row, place] = ordinary[fold(keys_R[row], TOKEN, place) % len(ordinary)]
    return hidden_RN


def uniform(*values: np.ndarray | int) -> np.ndarray:
    """A number in [0, 1) that is of these naturals, elementwise."""
    return (fold(*values) >> 11) * 2.0**-53


def _spans(words_R: np.ndarray, keys_R: np.ndarray, rate: float, max_span: int) -> np.ndarray:
    """Words of each span [R, K], in no order of place; 0 where a row has fewer."""
    harmonic = np.cumsum(1 / np.arange(1, max_span + 1))
    longest_R = np.clip(words_R - 1, 1, max_span)
    total_R = harmonic[longest_R - 1]
    count_R = np.floor(rate * words_R * total_R / longest_R + uniform(keys_R, COUNT)).astype(np.int64)
    k = np.arange(count_R.max(initial=0))
    quantile_RK = (k + uniform(keys_R, LENGTH)[:, None]) / np.maximum(count_R, 1)[:, None]
    spans_RK = 1 + np.searchsorted(harmonic, quantile_RK * total_R[:, None], side="right")
    spans_RK = np.where(k < count_R[:, None], np.minimum(spans_RK, longest_R[:, None]), 0)
    # Room for a word between any two, and one at least: always there, but in short rows of high rates.
    fits_RK = np.cumsum(spans_RK, axis=1) + np.maximum(k, 1) <= words_R[:, None]
    return np.where(fits_RK, spans_RK, 0)


def _places(words_R: np.ndarray, spans_RK: np.ndarray, keys_R: np.ndarray) -> np.ndarray:
    """The first word of each span [R, K]."""
    count = spans_RK.shape[1]
    gaps = np.arange(words_R.max() + 1)
    left_R = words_R - spans_RK.sum(axis=1)
    draws_RG = fold(fold(keys_R, PLACE)[:, None], gaps)
    draws_RG[gaps > left_R[:, None]] = 2**64 - 1
    smallest_RK = np.argpartition(draws_RG, count - 1, axis=1)[:, :count]
    order_RK = np.argsort(np.take_along_axis(draws_RG, smallest_RK, axis=1), axis=1)
    gap_RK = np.take_along_axis(smallest_RK, order_RK, axis=1)  # in random order, so that lengths may be in any
    hidden_RG = np.zeros(draws_RG.shape, np.int32)
    np.put_along_axis(hidden_RG, gap_RK, spans_RK.astype(np.int32), axis=1)
    before_RG = np.cumsum(hidden_RG, axis=1, dtype=np.int32) - hidden_RG
    return gap_RK + np.take_along_axis(before_RG, gap_RK, axis=1)


def _fates(spans_RK: np.ndarray, keys_R: np.ndarray) -> np.ndarray:
    """Of each span [R, K], whatever its length and its place."""
    k, real_RK = np.arange(spans_RK.shape[1]), spans_RK > 0
    draws_RK = np.where(real_RK, fold(fold(keys_R, FATE)[:, None], k), np.uint64(2**64 - 1))
    rank_RK = np.argsort(np.argsort(draws_RK, axis=1), axis=1)
    quantile_RK = (rank_RK + uniform(keys_R, FATES_OF)[:, None]) / np.maximum(real_RK.sum(axis=1), 1)[:, None]
    return MASKED + np.searchsorted(SHARES, quantile_RK, side="right")


def _painted(words_R: np.ndarray, starts_RK: np.ndarray, spans_RK: np.ndarray, fates_RK: np.ndarray) -> np.ndarray:
    """The fate of each word, uint8 [R, W + 2]: up where a span starts, down where it ends, never both at one word."""
    beyond = int(words_R.max()) + 1
    steps_RW = np.zeros((len(words_R), beyond + 1), np.int8)
    real_RK = spans_RK > 0
    for at, fate in ((starts_RK, fates_RK), (starts_RK + spans_RK, -fates_RK)):
        np.put_along_axis(steps_RW, np.where(real_RK, at, beyond), np.where(real_RK, fate, 0).astype(np.int8), axis=1)
    return np.cumsum(steps_RW, axis=1, dtype=np.int8).view(np.uint8)
