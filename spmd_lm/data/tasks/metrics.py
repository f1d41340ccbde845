"""Figures of merit, as functions of what was predicted and of what is true.

N examples, K classes or places.  All is float64 on the host."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

# --- classes ----------------------------------------------------------------------------------------------------------


def negative_log_likelihood(logits_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[label] of each row [N], in nats; a place of -inf takes no part."""
    high_N1 = logits_NK.max(axis=1, keepdims=True)
    total_N = np.log(np.exp(logits_NK - high_N1).sum(axis=1)) + high_N1[:, 0]
    return total_N - logits_NK[np.arange(len(labels_N)), labels_N]


def accuracy(truth_N: np.ndarray, predicted_N: np.ndarray) -> float:
    return float(np.mean(truth_N == predicted_N))


def matthews(truth_N: np.ndarray, predicted_N: np.ndarray) -> float:
    """The correlation of two labellings (B. W. Matthews, Biochim. Biophys. Acta 405, 1975), of several classes as R_K
    (J. Gorodkin, Comput. Biol. Chem. 28, 2004); 0 where one of them names a single class."""
    classes = range(1 + max(truth_N.max(), predicted_N.max()))
    true = [int(np.sum(truth_N == k)) for k in classes]
    said = [int(np.sum(predicted_N == k)) for k in classes]
    n, right = len(truth_N), int(np.sum(truth_N == predicted_N))
    dot = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))  # noqa: E731
    spread = (n * n - dot(true, true)) * (n * n - dot(said, said))  # whole numbers: 0 is 0
    return (n * right - dot(true, said)) / spread**0.5 if spread else 0.0


def f1(truth_N: np.ndarray, predicted_N: np.ndarray) -> float:
    """The harmonic mean of precision and recall of class 1; 0 where nothing is of it."""
    named = int(np.sum(truth_N == 1) + np.sum(predicted_N == 1))
    return 2 * int(np.sum((truth_N == 1) & (predicted_N == 1))) / named if named else 0.0


# --- answers ----------------------------------------------------------------------------------------------------------


def best_span(start_N: np.ndarray, end_N: np.ndarray, longest: int) -> tuple[float, int, int]:
    """The greatest start[i] + end[j] with i <= j < i + longest, and its i and j; of equals the first and shortest."""
    n = len(start_N)
    longest = min(longest, n)
    beyond = np.full(longest - 1, -np.inf)
    ends_NL = np.lib.stride_tricks.sliding_window_view(np.concatenate([end_N, beyond]), longest)
    more_N = ends_NL.argmax(axis=1)
    sums_N = start_N + ends_NL[np.arange(n), more_N]
    first = int(sums_N.argmax())
    return float(sums_N[first]), first, first + int(more_N[first])


def normalised(text: str) -> str:
    """An answer as SQuAD's own scoring compares it: without case, punctuation, articles, and white space twice."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(predicted: str, answers: Sequence[str]) -> float:
    """1 if `predicted` is one of the answers, normalised (arXiv:1606.05250); without any, if it is empty
    (arXiv:1806.03822)."""
    return float(normalised(predicted) in map(normalised, _gold(answers)))


def overlap(predicted: str, answers: Sequence[str]) -> float:
    """The best F1 of `predicted` and an answer, as bags of words, normalised (sources as above)."""
    return max(_f1_of_words(normalised(predicted).split(), normalised(answer).split()) for answer in _gold(answers))


def _gold(answers: Sequence[str]) -> Sequence[str]:
    """Answers of which something is left; where there is none, the empty one, as SQuAD 2.0's scoring has it."""
    return [answer for answer in answers if normalised(answer)] or [""]


def _f1_of_words(predicted: list[str], answer: list[str]) -> float:
    if not (predicted and answer):
        return float(predicted == answer)
    common = sum((Counter(predicted) & Counter(answer)).values())
    return 2 * common / (len(predicted) + len(answer))
