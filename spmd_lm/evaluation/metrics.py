"""Metrics as functions of predictions and labels.  N examples, K classes or positions; float64 on the host."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

# --- classification ---------------------------------------------------------------------------------------------------


def negative_log_likelihood(logits_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[label] of each row [N], in nats; logits of -inf are masked out."""
    max_N1 = logits_NK.max(axis=1, keepdims=True)
    logsumexp_N = np.log(np.exp(logits_NK - max_N1).sum(axis=1)) + max_N1[:, 0]
    return logsumexp_N - logits_NK[np.arange(len(labels_N)), labels_N]


def accuracy(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    return float(np.mean(labels_N == predictions_N))


def matthews_correlation(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """Matthews correlation (B. W. Matthews, Biochim. Biophys. Acta 405, 1975); of more than two classes R_K
    (J. Gorodkin, Comput. Biol. Chem. 28, 2004).  0 where labels or predictions are all of one class."""
    # Python's integers, so that a zero denominator is exactly 0.
    n, correct = len(labels_N), int(np.sum(labels_N == predictions_N))
    classes = range(1 + max(labels_N.max(), predictions_N.max()))
    true = [int(np.sum(labels_N == k)) for k in classes]
    predicted = [int(np.sum(predictions_N == k)) for k in classes]
    true_true = sum(t * t for t in true)
    true_predicted = sum(t * p for t, p in zip(true, predicted, strict=True))
    predicted_predicted = sum(p * p for p in predicted)
    denominator = (n * n - true_true) * (n * n - predicted_predicted)
    return (n * correct - true_predicted) / denominator**0.5 if denominator else 0.0


def binary_f1(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 where it neither occurs nor is predicted."""
    true_positives = int(np.sum((labels_N == 1) & (predictions_N == 1)))
    positives = int(np.sum(labels_N == 1) + np.sum(predictions_N == 1))
    return 2 * true_positives / positives if positives else 0.0


# --- question answering -----------------------------------------------------------------------------------------------


def best_span(start_logits_N: np.ndarray, end_logits_N: np.ndarray, max_answer_length: int) -> tuple[float, int, int]:
    """The highest start_logits[i] + end_logits[j] with i <= j < i + max_answer_length, and its i and j; of equal ones
    the first, then the shortest."""
    n = len(start_logits_N)
    max_answer_length = min(max_answer_length, n)
    padded = np.concatenate([end_logits_N, np.full(max_answer_length - 1, -np.inf)])
    end_logits_NL = np.lib.stride_tricks.sliding_window_view(padded, max_answer_length)
    length_N = end_logits_NL.argmax(axis=1)  # of the best span from each start, minus 1
    scores_N = start_logits_N + end_logits_NL[np.arange(n), length_N]
    start = int(scores_N.argmax())
    return float(scores_N[start]), start, start + int(length_N[start])


def normalize_answer(text: str) -> str:
    """An answer as SQuAD's evaluation script compares it: without case, punctuation, articles and extra white space."""
    no_punctuation = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", no_punctuation).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction equals one of the answers, normalized (arXiv:1606.05250); without answers, if it is empty
    (arXiv:1806.03822)."""
    return float(normalize_answer(prediction) in map(normalize_answer, _gold_answers(answers)))


def answer_f1(prediction: str, answers: Sequence[str]) -> float:
    """The highest F1 of the prediction and one of the answers, as bags of normalized words (papers as above)."""
    words = normalize_answer(prediction).split()
    return max(_bag_of_words_f1(words, normalize_answer(answer).split()) for answer in _gold_answers(answers))


def _gold_answers(answers: Sequence[str]) -> Sequence[str]:
    """The answers that normalization leaves non-empty; if none, the empty one, as in SQuAD 2.0's evaluation script."""
    return [answer for answer in answers if normalize_answer(answer)] or [""]


def _bag_of_words_f1(prediction: list[str], answer: list[str]) -> float:
    if not (prediction and answer):
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer))
