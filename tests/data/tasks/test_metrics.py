"""Scores against figures worked out by hand, and against formulas of another form."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.data.tasks import metrics

LABELLINGS = st.integers(1, 40).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2))


def arrays(*labellings: list[int]) -> list[np.ndarray]:
    return [np.array(each) for each in labellings]


def test_matthews_of_two_classes_by_hand():
    """6 true positives, 2 false negatives, 1 false positive, 3 true negatives: 16 / sqrt(8 x 4 x 7 x 5)."""
    truth, said = arrays([1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [1] + [0] * 3)
    assert metrics.matthews(truth, said) == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5), rel=1e-15)
    assert metrics.f1(truth, said) == pytest.approx(12 / 15)
    assert metrics.accuracy(truth, said) == 0.75


@given(LABELLINGS)
def test_matthews_is_the_correlation_of_indicators(labellings):
    """R_K, as Gorodkin defines it: covariances of one column for each class, summed."""
    truth, said = arrays(*labellings)
    x, y = (np.eye(4)[labels] - np.eye(4)[labels].mean(axis=0) for labels in (truth, said))
    spread = math.sqrt((x * x).sum() * (y * y).sum())
    expected = (x * y).sum() / spread if spread > 1e-9 else 0
    assert metrics.matthews(truth, said) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("truth", "said", "matthews", "f1"),
    [
        ([0, 1, 2], [0, 1, 2], 1, 1),
        ([0, 1, 0, 1], [1, 0, 1, 0], -1, 0),
        ([0, 1, 0, 1], [1, 1, 1, 1], 0, 2 / 3),
        ([0, 0], [0, 0], 0, 0),
    ],
)
def test_the_ends_of_the_scale(truth, said, matthews, f1):
    assert metrics.matthews(*arrays(truth, said)) == pytest.approx(matthews)
    assert metrics.f1(*arrays(truth, said)) == pytest.approx(f1)


@given(LABELLINGS)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(labellings):
    truth, said = arrays(*labellings)
    right, true, named = sum((truth == 1) & (said == 1)), sum(truth == 1), sum(said == 1)
    expected = 2 / (true / right + named / right) if right else 0
    assert metrics.f1(truth, said) == pytest.approx(expected)


def test_the_likelihood_of_a_label():
    logits = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]) + np.array([[3.0], [-800.0]])
    nll = metrics.negative_log_likelihood(logits, np.array([1, 1]))
    assert nll == pytest.approx([math.log(4), -math.log(0.8)], rel=1e-12)
    masked = np.array([[0.0, 0.0, -np.inf, -np.inf], [1e4, 0.0, 0.0, -np.inf]])
    assert metrics.negative_log_likelihood(masked, np.array([0, 0])) == pytest.approx([math.log(2), 0])


@given(
    logits=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12),
    longest=st.integers(1, 15),
)
def test_the_best_span_of_all_there_are(logits, longest):
    start, end = np.array(logits, float).T
    n = len(start)
    spans = [(start[i] + end[j], i, j) for i in range(n) for j in range(i, min(i + longest, n))]
    best = max(spans, key=lambda span: span[0])  # of equals the first: by start, then by length
    assert metrics.best_span(start, end, longest) == best


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, a dog\tand an 'ox'!", "cat dog and ox"),
        ("theatre of Athens", "theatre of athens"),
        ("a", ""),
        ("$1.5 million", "15 million"),
        ("“Quoted”", "“quoted”"),  # punctuation is ASCII's alone
        ("a-b", "ab"),  # punctuation goes first: this is no article
    ],
)
def test_normalised_answers(text, normal):
    assert metrics.normalised(text) == normal


@pytest.mark.parametrize(
    ("said", "answers", "exact", "f1"),
    [
        ("The Denver Broncos", ["Denver Broncos", "Broncos"], 1, 1),
        ("Denver Broncos of Denver", ["Denver Broncos", "Carolina"], 0, 2 / 3),
        ("Denver", ["Broncos", "in Denver"], 0, 2 / 3),
        ("a b b", ["b b b c"], 0, 2 * 2 / (2 + 4)),  # of b as many as both have; the article is none
        ("Denver", ["Carolina"], 0, 0),
        ("", [], 1, 1),
        ("Denver", [], 0, 0),
        ("", ["Denver"], 0, 0),
        ("the", ["The", "Denver"], 0, 0),  # an answer of which nothing is left is no answer
        ("an", ["The"], 1, 1),
    ],
)
def test_answers_are_scored_as_squad_scores_them(said, answers, exact, f1):
    assert metrics.exact_match(said, answers) == exact
    assert metrics.overlap(said, answers) == pytest.approx(f1)
