"""Statistics of a million tokens, of words as uneven as those of a text; and the corners."""

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_lm.data.masked_lm import masking
from spmd_lm.data.masked_lm.masking import KEPT, MASKED, OPEN, RANDOM
from spmd_lm.data.shuffle import fold

ROWS, TOKENS, MASK = 2048, 500, 99
ORDINARY = np.arange(1, 99, dtype=np.int32)


def some_rows(rows=ROWS, tokens=TOKENS, longest_word=8, seed=0):
    """begins, lengths, keys: words of 1 to `longest_word` tokens, short ones likelier; a tenth of the rows is short."""
    generator = np.random.default_rng(seed)
    begins = generator.random((rows, tokens)) < generator.choice([0.2, 0.5, 1.0], (rows, 1))
    for first in range(0, tokens, longest_word):
        begins[:, first] = True
    lengths = np.where(generator.random(rows) < 0.1, generator.integers(1, tokens + 1, rows), tokens)
    begins &= np.arange(tokens) < lengths[:, None]
    return begins, lengths, fold(seed, np.arange(rows))


@pytest.fixture(scope="module")
def drawn():
    begins, lengths, keys = some_rows()
    return begins, lengths, keys, masking.choose(begins, lengths, keys, 0.15, 3)


@pytest.fixture(scope="module")
def spans(drawn):
    return spans_of(drawn[0], drawn[3])


def spans_of(begins, fates) -> np.ndarray:
    """(words, fate) of every span, wherever it is: a run of hidden words, for no two spans touch."""
    found = []
    for begin, fate in zip(begins, fates, strict=True):
        runs = ([*run] for _, run in groupby(fate[begin].tolist(), key=lambda kind: kind != OPEN))
        found += [(len(run), *set(run)) for run in runs if run[0] != OPEN]
    return np.array(found)  # ragged, hence refused, if a run had two fates


def split_words(begins, lengths, fates) -> int:
    """How many tokens differ in their fate from the one before them in their word."""
    inside = ~begins[:, 1:] & (np.arange(1, begins.shape[1]) < lengths[:, None])
    return int((inside & (fates[:, 1:] != fates[:, :-1])).sum())


def test_the_share_hidden_is_the_rate(drawn):
    _, lengths, _, fates = drawn
    assert lengths.sum() > 950_000
    assert abs((fates != OPEN).sum() / lengths.sum() - 0.15) < 0.002


def test_spans_have_the_lengths_stated(spans):
    words = spans[:, 0]
    assert len(words) > 20_000 and words.max() == 3
    shares = np.bincount(words, minlength=4)[1:] / len(words)
    np.testing.assert_allclose(shares, np.array([6, 3, 2]) / 11, atol=0.005)


@pytest.mark.parametrize("max_span", [1, 2, 5, 10])
def test_spans_of_other_lengths(max_span):
    begins, lengths, keys = some_rows(400)
    fates = masking.choose(begins, lengths, keys, 0.15, max_span)
    words = spans_of(begins, fates)[:, 0]
    likely = 1 / np.arange(1, max_span + 1)
    shares = np.bincount(words, minlength=max_span + 1)[1:] / len(words)
    np.testing.assert_allclose(shares, likely / likely.sum(), atol=0.02)
    assert abs((fates != OPEN).sum() / lengths.sum() - 0.15) < 0.005


def test_no_word_is_split_and_padding_is_left_alone(drawn):
    begins, lengths, _, fates = drawn
    assert split_words(begins, lengths, fates) == 0
    assert (fates[np.arange(TOKENS) >= lengths[:, None]] == OPEN).all()


def test_a_span_has_one_fate_whatever_its_length(drawn, spans):
    fates = drawn[3]
    for n in (1, 2, 3):
        shares = np.bincount(spans[spans[:, 0] == n, 1], minlength=4)[1:] / (spans[:, 0] == n).sum()
        np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.015)
    tokens = np.bincount(fates.ravel(), minlength=4)[1:] / (fates != OPEN).sum()
    np.testing.assert_allclose(tokens, [0.8, 0.1, 0.1], atol=0.005)


def test_every_place_is_as_likely_but_at_the_ends():
    rows, words = 20_000, 40
    begins = np.ones((rows, words), bool)
    fates = masking.choose(begins, np.full(rows, words), fold(3, np.arange(rows)), 0.15, 3)
    share = (fates != OPEN).mean(axis=0)
    assert np.abs(share[4:-4] - 0.155).max() < 0.01  # four standard deviations
    assert share.mean() == pytest.approx(0.15, abs=1e-3) and share.min() > 0.1


def test_what_stands_in_place_of_hidden_tokens(drawn):
    _, _, keys, fates = drawn
    tokens = np.full((ROWS, TOKENS), 1000, np.int32)
    hidden = masking.hide(tokens, fates, keys, MASK, ORDINARY)
    assert (hidden[fates == MASKED] == MASK).all()
    assert (hidden[(fates == OPEN) | (fates == KEPT)] == 1000).all()
    counts = np.bincount(hidden[fates == RANDOM], minlength=100)
    assert (counts[1:99] > 0).all() and counts.sum() == counts[1:99].sum()
    expected = counts.sum() / 98
    assert np.abs(counts[1:99] - expected).max() < 5 * math.sqrt(expected)
    assert (tokens == 1000).all()


def test_a_row_is_of_its_key_alone():
    begins, lengths, keys = some_rows(64)
    whole = masking.choose(begins, lengths, keys, 0.15, 3)
    for rows in (slice(0, 1), slice(5, 9), slice(40, 64), slice(None, None, -7)):
        np.testing.assert_array_equal(masking.choose(begins[rows], lengths[rows], keys[rows], 0.15, 3), whole[rows])
    assert (masking.choose(begins, lengths, keys + 1, 0.15, 3) != whole).any(axis=1).mean() > 0.9


@settings(deadline=None)
@given(
    tokens=st.integers(1, 30),
    rate=st.floats(0.01, 0.49),
    max_span=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    longest_word=st.integers(1, 30),
)
def test_a_row_keeps_a_word_and_spans_stay_apart(tokens, rate, max_span, seed, longest_word):
    begins, lengths, keys = some_rows(20, tokens, longest_word, seed)
    fates = masking.choose(begins, lengths, keys, rate, max_span)
    assert split_words(begins, lengths, fates) == 0
    assert ((fates == OPEN) & begins).any(axis=1).all()
    spans = spans_of(begins, fates)
    assert len(spans) == 0 or spans[:, 0].max() <= max_span


def test_short_rows_are_hidden_at_the_rate_too():
    for words in (2, 3, 4, 7, 12):
        begins = np.ones((30_000, words), bool)
        fates = masking.choose(begins, np.full(30_000, words), fold(words, np.arange(30_000)), 0.15, 3)
        assert (fates != OPEN).mean() == pytest.approx(0.15, abs=0.004)


def test_no_rows_and_one_word_give_nothing_hidden():
    none = masking.choose(np.ones((0, 4), bool), np.zeros(0, int), np.zeros(0, np.uint64), 0.15, 3)
    assert none.shape == (0, 4)
    one = masking.choose(np.eye(1, 8, dtype=bool).repeat(50, 0), np.full(50, 8), fold(1, np.arange(50)), 0.4, 3)
    assert (one == OPEN).all()
