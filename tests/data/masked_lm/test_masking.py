"""Statistics over a million tokens, with words as uneven as those of a text; and edge cases."""

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_lm.data.masked_lm.masking import (
    MASKED,
    RANDOM,
    UNCHANGED,
    UNSELECTED,
    apply_replacements,
    choose_replacements,
)
from spmd_lm.data.shuffle import fold_in

ROWS, TOKENS, MASK = 2048, 500, 99
TEXT_IDS = np.arange(1, 99, dtype=np.int32)


def some_rows(rows=ROWS, tokens=TOKENS, longest_word=8, seed=0):
    """word_starts, lengths, keys: words of 1 to `longest_word` tokens, mostly short; a tenth of the rows is short."""
    generator = np.random.default_rng(seed)
    word_starts = generator.random((rows, tokens)) < generator.choice([0.2, 0.5, 1.0], (rows, 1))
    for first in range(0, tokens, longest_word):
        word_starts[:, first] = True
    lengths = np.where(generator.random(rows) < 0.1, generator.integers(1, tokens + 1, rows), tokens)
    word_starts &= np.arange(tokens) < lengths[:, None]
    return word_starts, lengths, fold_in(seed, np.arange(rows))


@pytest.fixture(scope="module")
def drawn():
    word_starts, lengths, keys = some_rows()
    return word_starts, lengths, keys, choose_replacements(word_starts, lengths, keys, 0.15, 3)


@pytest.fixture(scope="module")
def spans(drawn):
    return spans_of(drawn[0], drawn[3])


def spans_of(word_starts, replacements) -> np.ndarray:
    """(words, replacement) of every span: a run of selected words, because no two spans touch."""
    found = []
    for word_start, replacement in zip(word_starts, replacements, strict=True):
        runs = ([*run] for _, run in groupby(replacement[word_start].tolist(), key=lambda kind: kind != UNSELECTED))
        found += [(len(run), *set(run)) for run in runs if run[0] != UNSELECTED]
    return np.array(found)  # ragged, hence an error, if a run had two replacements


def split_words(word_starts, lengths, replacements) -> int:
    """Number of tokens with another replacement than the token before them in their word."""
    inside = ~word_starts[:, 1:] & (np.arange(1, word_starts.shape[1]) < lengths[:, None])
    return int((inside & (replacements[:, 1:] != replacements[:, :-1])).sum())


def test_the_fraction_masked_is_mask_prob(drawn):
    _, lengths, _, replacements = drawn
    assert lengths.sum() > 950_000
    assert abs((replacements != UNSELECTED).sum() / lengths.sum() - 0.15) < 0.002


def test_span_lengths_have_the_stated_distribution(spans):
    words = spans[:, 0]
    assert len(words) > 20_000 and words.max() == 3
    shares = np.bincount(words, minlength=4)[1:] / len(words)
    np.testing.assert_allclose(shares, np.array([6, 3, 2]) / 11, atol=0.005)


@pytest.mark.parametrize("max_span", [1, 2, 5, 10])
def test_span_lengths_for_other_values_of_max_span(max_span):
    word_starts, lengths, keys = some_rows(400)
    replacements = choose_replacements(word_starts, lengths, keys, 0.15, max_span)
    words = spans_of(word_starts, replacements)[:, 0]
    likely = 1 / np.arange(1, max_span + 1)
    shares = np.bincount(words, minlength=max_span + 1)[1:] / len(words)
    np.testing.assert_allclose(shares, likely / likely.sum(), atol=0.02)
    assert abs((replacements != UNSELECTED).sum() / lengths.sum() - 0.15) < 0.005


def test_no_word_is_split_and_padding_is_never_selected(drawn):
    word_starts, lengths, _, replacements = drawn
    assert split_words(word_starts, lengths, replacements) == 0
    assert (replacements[np.arange(TOKENS) >= lengths[:, None]] == UNSELECTED).all()


def test_a_span_has_one_replacement_independent_of_its_length(drawn, spans):
    replacements = drawn[3]
    for n in (1, 2, 3):
        shares = np.bincount(spans[spans[:, 0] == n, 1], minlength=4)[1:] / (spans[:, 0] == n).sum()
        np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.015)
    tokens = np.bincount(replacements.ravel(), minlength=4)[1:] / (replacements != UNSELECTED).sum()
    np.testing.assert_allclose(tokens, [0.8, 0.1, 0.1], atol=0.005)


def test_every_position_is_equally_likely_except_at_the_ends():
    rows, words = 20_000, 40
    word_starts = np.ones((rows, words), bool)
    replacements = choose_replacements(word_starts, np.full(rows, words), fold_in(3, np.arange(rows)), 0.15, 3)
    share = (replacements != UNSELECTED).mean(axis=0)
    assert np.abs(share[4:-4] - 0.155).max() < 0.01  # four standard deviations
    assert share.mean() == pytest.approx(0.15, abs=1e-3) and share.min() > 0.1


def test_what_replaces_selected_tokens(drawn):
    _, _, keys, replacements = drawn
    tokens = np.full((ROWS, TOKENS), 1000, np.int32)
    masked = apply_replacements(tokens, replacements, keys, MASK, TEXT_IDS)
    assert (masked[replacements == MASKED] == MASK).all()
    assert (masked[(replacements == UNSELECTED) | (replacements == UNCHANGED)] == 1000).all()
    counts = np.bincount(masked[replacements == RANDOM], minlength=100)
    assert (counts[1:99] > 0).all() and counts.sum() == counts[1:99].sum()
    expected = counts.sum() / 98
    assert np.abs(counts[1:99] - expected).max() < 5 * math.sqrt(expected)
    assert (tokens == 1000).all()


def test_a_row_depends_on_its_key_alone():
    word_starts, lengths, keys = some_rows(64)
    whole = choose_replacements(word_starts, lengths, keys, 0.15, 3)
    for rows in (slice(0, 1), slice(5, 9), slice(40, 64), slice(None, None, -7)):
        np.testing.assert_array_equal(
            choose_replacements(word_starts[rows], lengths[rows], keys[rows], 0.15, 3), whole[rows]
        )
    assert (choose_replacements(word_starts, lengths, keys + 1, 0.15, 3) != whole).any(axis=1).mean() > 0.9


@settings(deadline=None)
@given(
    tokens=st.integers(1, 30),
    rate=st.floats(0.01, 0.49),
    max_span=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    longest_word=st.integers(1, 30),
)
def test_a_row_keeps_a_visible_word_and_spans_do_not_touch(tokens, rate, max_span, seed, longest_word):
    word_starts, lengths, keys = some_rows(20, tokens, longest_word, seed)
    replacements = choose_replacements(word_starts, lengths, keys, rate, max_span)
    assert split_words(word_starts, lengths, replacements) == 0
    assert ((replacements == UNSELECTED) & word_starts).any(axis=1).all()
    spans = spans_of(word_starts, replacements)
    assert len(spans) == 0 or spans[:, 0].max() <= max_span


def test_short_rows_are_masked_at_mask_prob_too():
    for words in (2, 3, 4, 7, 12):
        word_starts = np.ones((30_000, words), bool)
        replacements = choose_replacements(
            word_starts, np.full(30_000, words), fold_in(words, np.arange(30_000)), 0.15, 3
        )
        assert (replacements != UNSELECTED).mean() == pytest.approx(0.15, abs=0.004)


def test_no_rows_and_rows_of_one_word_have_nothing_masked():
    none = choose_replacements(np.ones((0, 4), bool), np.zeros(0, int), np.zeros(0, np.uint64), 0.15, 3)
    assert none.shape == (0, 4)
    one = choose_replacements(np.eye(1, 8, dtype=bool).repeat(50, 0), np.full(50, 8), fold_in(1, np.arange(50)), 0.4, 3)
    assert (one == UNSELECTED).all()
