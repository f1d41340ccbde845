"""Metrics against values computed by hand, and against other forms of their formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.evaluation import task_metrics as metrics
from spmd_lm.evaluation.evaluate import text_metrics

LABELS_AND_PREDICTIONS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2)
)


def arrays(*pair: list[int]) -> list[np.ndarray]:
    return [np.array(each) for each in pair]


def test_several_losses_are_summed_and_told_apart():
    first = {"masked_lm": (6.0, 1.0, 2.0), "sentence_order": (1.0, 1.0, 4.0)}  # loss, weight of the correct, weight
    second = {"masked_lm": (2.0, 0.0, 2.0), "sentence_order": (1.0, 3.0, 4.0)}
    assert text_metrics([first, second]) == (
        {
            "eval_loss": 2.25,
            "eval_perplexity": math.exp(2.0),
            "eval_masked_lm_loss": 2.0,
            "eval_masked_lm_accuracy": 0.25,
            "eval_sentence_order_loss": 0.25,
            "eval_sentence_order_accuracy": 0.5,
        },
        4.0,
    )


@pytest.mark.parametrize(("loss", "perplexity"), [(math.nan, math.nan), (800.0, math.inf), (0.0, 1.0)])
def test_a_perplexity_is_as_finite_as_its_loss(loss, perplexity):
    found, _ = text_metrics([{"tokens": (loss, 0.0, 1.0)}])
    assert found["eval_perplexity"] == pytest.approx(perplexity, nan_ok=True)


def test_matthews_of_two_classes_by_hand():
    """6 true positives, 2 false negatives, 1 false positive, 3 true negatives: 16 / sqrt(8 x 4 x 7 x 5)."""
    labels, predictions = arrays([1] * 8 + [0] * 4, [1] * 6 + [0] * 2 + [1] + [0] * 3)
    assert metrics.matthews_correlation(labels, predictions) == pytest.approx(
        (6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5), rel=1e-15
    )
    assert metrics.binary_f1(labels, predictions) == pytest.approx(12 / 15)
    assert metrics.accuracy(labels, predictions) == 0.75


@given(LABELS_AND_PREDICTIONS)
def test_matthews_is_the_correlation_of_one_hot_vectors(pair):
    """R_K, as Gorodkin defines it: covariances of one column for each class, summed."""
    labels, predictions = arrays(*pair)
    x, y = (np.eye(4)[labels] - np.eye(4)[labels].mean(axis=0) for labels in (labels, predictions))
    spread = math.sqrt((x * x).sum() * (y * y).sum())
    expected = (x * y).sum() / spread if spread > 1e-9 else 0
    assert metrics.matthews_correlation(labels, predictions) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("labels", "predictions", "matthews", "f1"),
    [
        ([0, 1, 2], [0, 1, 2], 1, 1),
        ([0, 1, 0, 1], [1, 0, 1, 0], -1, 0),
        ([0, 1, 0, 1], [1, 1, 1, 1], 0, 2 / 3),
        ([0, 0], [0, 0], 0, 0),
    ],
)
def test_extreme_values(labels, predictions, matthews, f1):
    assert metrics.matthews_correlation(*arrays(labels, predictions)) == pytest.approx(matthews)
    assert metrics.binary_f1(*arrays(labels, predictions)) == pytest.approx(f1)


@given(LABELS_AND_PREDICTIONS)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(pair):
    labels, predictions = arrays(*pair)
    right, true, named = sum((labels == 1) & (predictions == 1)), sum(labels == 1), sum(predictions == 1)
    expected = 2 / (true / right + named / right) if right else 0
    assert metrics.binary_f1(labels, predictions) == pytest.approx(expected)


def test_negative_log_likelihood():
    logits = np.log([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]) + np.array([[3.0], [-800.0]])
    nll = metrics.negative_log_likelihood(logits, np.array([1, 1]))
    assert nll == pytest.approx([math.log(4), -math.log(0.8)], rel=1e-12)
    masked = np.array([[0.0, 0.0, -np.inf, -np.inf], [1e4, 0.0, 0.0, -np.inf]])
    assert metrics.negative_log_likelihood(masked, np.array([0, 0])) == pytest.approx([math.log(2), 0])


@given(
    logits=st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=12),
    max_answer_length=st.integers(1, 15),
)
def test_the_best_span_is_that_of_a_search_of_all(logits, max_answer_length):
    start, end = np.array(logits, float).T
    n = len(start)
    spans = [(start[i] + end[j], i, j) for i in range(n) for j in range(i, min(i + max_answer_length, n))]
    best = max(spans, key=lambda span: span[0])  # of equal ones the first, then the shortest
    assert metrics.best_span(start, end, max_answer_length) == best


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
def test_normalized_answers(text, normal):
    assert metrics.normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("predictions", "answers", "exact", "f1"),
    [
        ("The Denver Broncos", ["Denver Broncos", "Broncos"], 1, 1),
        ("Denver Broncos of Denver", ["Denver Broncos", "Carolina"], 0, 2 / 3),
        ("Denver", ["Broncos", "in Denver"], 0, 2 / 3),
        ("a b b", ["b b b c"], 0, 2 * 2 / (2 + 4)),  # b counts as often as in both; the article does not count
        ("Denver", ["Carolina"], 0, 0),
        ("", [], 1, 1),
        ("Denver", [], 0, 0),
        ("", ["Denver"], 0, 0),
        ("the", ["The", "Denver"], 0, 0),  # an answer that normalization leaves empty does not count
        ("an", ["The"], 1, 1),
    ],
)
def test_answers_are_scored_as_squad_scores_them(predictions, answers, exact, f1):
    assert metrics.answer_scores(predictions, answers) == (exact, pytest.approx(f1))
