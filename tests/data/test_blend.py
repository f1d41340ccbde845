from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.data.blend import MAX_PERIOD, Blend, order, whole_weights

WEIGHTS = st.lists(st.integers(1, 400), min_size=2, max_size=20)


def drift(corpus: np.ndarray, weights: list) -> float:
    """The furthest that a corpus is from its proportion, over all prefixes."""
    counts = np.cumsum(corpus[:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, len(corpus) + 1)[:, None] * np.array([float(w / sum(weights)) for w in weights])
    return float(np.abs(counts - due).max())


@given(weights=WEIGHTS)
def test_every_prefix_is_within_tijdeman_s_bound(weights):
    corpus, bound = order(weights), 1 - 1 / (2 * len(weights) - 2)
    assert np.bincount(corpus, minlength=len(weights)).tolist() == weights
    assert drift(corpus, weights) <= bound + 1e-9


@pytest.mark.parametrize("k", [2, 8, 20])
def test_decimal_weights_hold_at_every_prefix_of_a_long_run(k):
    """Ten periods and more, with weights as files have them."""
    rng = np.random.default_rng(k)
    weights = [float(w) for w in (rng.integers(1, 1000, k) / 1000).round(3)]
    blend, exact = Blend(weights), [Fraction(str(w)) for w in weights]
    corpus, _ = blend.locate(np.arange(10 * blend.period + 7))
    assert drift(corpus, exact) < 1


def test_always_taking_the_furthest_behind_drifts():
    """The one-line order that was not taken."""
    weights = [1] * 9 + [2] * 2 + [3] * 9
    counts, corpus = np.zeros(20), []
    for n in range(1, sum(weights) + 1):
        corpus.append(int(np.argmax(n * np.array(weights) / sum(weights) - counts)))
        counts[corpus[-1]] += 1
    assert drift(np.array(corpus), weights) > 1 > drift(order(weights), weights)


@given(weights=WEIGHTS, start=st.integers(0, 10**12))
def test_a_sample_is_found_without_those_before_it(weights, start):
    blend = Blend(weights)
    corpus, nth = blend.locate(np.arange(start, start + 50))
    counts = blend.counts_before(start)
    for n, i in enumerate(corpus.tolist()):
        assert nth[n] == counts[i] and blend.index_of(i, int(nth[n])) == start + n
        counts[i] += 1
    assert (counts == blend.counts_before(start + 50)).all()


def test_weights_are_whole_numbers():
    assert whole_weights([0.1, 0.2, 0.7]) == [1, 2, 7] and whole_weights([3, 1.5]) == [2, 1]
    assert whole_weights([1e-9, 1.0]) == [1, MAX_PERIOD - 1]
    rounded = whole_weights([1 / 3, 2 / 7, 0.123456789])
    exact = np.array([1 / 3, 2 / 7, 0.123456789])
    assert sum(rounded) == MAX_PERIOD
    np.testing.assert_allclose(np.array(rounded) / MAX_PERIOD, exact / exact.sum(), atol=1e-6)
