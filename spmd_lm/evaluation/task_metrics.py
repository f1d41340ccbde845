"""Metrics of a task's validation split, from logits; float64 on the host.

Shape suffixes: E examples, N features or rows, T the context, K classes or positions."""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from spmd_lm.config.schema import ExtractiveQA, MultipleChoice
from spmd_lm.data.tasks.loader import TaskLoader


def task_metrics(loader: TaskLoader, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Metrics of the logits of all steps, in order.  R rows of a step:

    classification    {"classes": [R, classes]}: eval_loss, eval_accuracy, eval_matthews; of two classes also eval_f1
    multiple_choice   {"choices": [R]}: eval_loss, eval_accuracy
    span              {"spans": [R, T, 2]}, start and end logits: eval_loss, eval_exact_match, eval_f1

    Losses are means in nats.  A span's loss is the mean of its start's and its end's, over features."""
    assert len(outputs) == len(loader)
    (name,) = outputs[0]
    logits = np.concatenate([np.asarray(output[name], np.float64) for output in outputs])
    logits = logits[: len(loader.features.example)]  # the other rows pad the last batch
    if isinstance(loader.objective, ExtractiveQA):
        return _span_metrics(loader, logits, loader.objective.max_answer_length)
    if isinstance(loader.objective, MultipleChoice):
        logits = logits.reshape(-1, loader.objective.choices)
    labels_E, predictions_E = loader.task_split.labels, logits.argmax(axis=1)
    result = {
        "eval_loss": float(negative_log_likelihood(logits, labels_E).mean()),
        "eval_accuracy": accuracy(labels_E, predictions_E),
    }
    if isinstance(loader.objective, MultipleChoice):
        return result
    result["eval_matthews"] = matthews_correlation(labels_E, predictions_E)
    if logits.shape[1] == 2:
        result["eval_f1"] = binary_f1(labels_E, predictions_E)
    return result


def _span_metrics(loader: TaskLoader, logits_NT2: np.ndarray, max_answer_length: int) -> dict[str, float]:
    features = loader.features
    assert features.end_positions is not None
    not_padding_NT = np.arange(loader.context) < features.length.sum(axis=1, keepdims=True) + 3  # [CLS], two [SEP]
    start_logits_NT, end_logits_NT = np.where(not_padding_NT, np.moveaxis(logits_NT2, 2, 0), -np.inf)
    loss_N = negative_log_likelihood(start_logits_NT, features.labels)
    loss_N = (loss_N + negative_log_likelihood(end_logits_NT, features.end_positions)) / 2
    predictions = predict_answers(loader, logits_NT2, max_answer_length)
    answers = [[answer.text for answer in question.answers] for question in loader.task_split.questions]
    exact_matches, f1s = zip(*map(answer_scores, predictions, answers), strict=True)
    return {
        "eval_loss": float(loss_N.mean()),
        "eval_exact_match": float(np.mean(exact_matches)),
        "eval_f1": float(np.mean(f1s)),
    }


def predict_answers(loader: TaskLoader, logits_NT2: np.ndarray, max_answer_length: int) -> list[str]:
    """The text of the best span in any window of each question.  The answer is empty if every window scores its [CLS],
    start and end together, above that span (the lowest null score is compared, as in SQuAD 2.0's baselines).  Files
    without is_impossible (SQuAD 1.1) have no empty answers."""
    features, questions = loader.features, loader.task_split.questions
    offset_mapping = loader.task_split.offset_mapping
    assert offset_mapping is not None
    best_scores, best_texts = [-np.inf] * len(questions), [""] * len(questions)
    for row, example in enumerate(features.example):
        question_length, context_length = features.length[row]
        if not context_length:
            continue
        first = question_length + 2  # after [CLS] and [SEP]
        start_logits, end_logits = logits_NT2[row, first : first + context_length].T
        score, start, end = best_span(start_logits, end_logits, max_answer_length)
        if score > best_scores[example]:
            characters = offset_mapping[features.start[row, 1] :]
            best_scores[example] = score
            best_texts[example] = questions[example].context[characters[start, 0] : characters[end, 1]]
    if all(question.is_impossible is None for question in questions):
        return best_texts
    null_scores = np.full(len(questions), np.inf)
    np.minimum.at(null_scores, features.example, logits_NT2[:, 0].sum(axis=1))
    return ["" if null > best else text for null, best, text in zip(null_scores, best_scores, best_texts, strict=True)]


# --- formulas ---------------------------------------------------------------------------------------------------------


def negative_log_likelihood(logits_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[label] of each row [N], in nats; logits of -inf are masked out."""
    max_N1 = logits_NK.max(axis=1, keepdims=True)
    logsumexp_N = np.log(np.exp(logits_NK - max_N1).sum(axis=1)) + max_N1[:, 0]
    return logsumexp_N - logits_NK[np.arange(len(labels_N)), labels_N]


def accuracy(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    return float(np.mean(labels_N == predictions_N))


def matthews_correlation(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """Matthews correlation (B. W. Matthews, Biochim. Biophys. Acta 405, 1975), or R_K for more than two classes (J.
    Gorodkin, Comput. Biol. Chem. 28, 2004).  0 if labels or predictions are all of one class."""
    n, correct = len(labels_N), int(np.sum(labels_N == predictions_N))
    classes = 1 + max(labels_N.max(), predictions_N.max())
    # Python's integers, so that a zero denominator is exactly 0.
    true, predicted = (np.bincount(each, minlength=classes).tolist() for each in (labels_N, predictions_N))
    true_predicted = sum(t * p for t, p in zip(true, predicted, strict=True))
    denominator = (n * n - sum(t * t for t in true)) * (n * n - sum(p * p for p in predicted))
    return (n * correct - true_predicted) / denominator**0.5 if denominator else 0.0


def binary_f1(labels_N: np.ndarray, predictions_N: np.ndarray) -> float:
    """Harmonic mean of precision and recall of class 1; 0 if it neither occurs nor is predicted."""
    true_positives = int(np.sum((labels_N == 1) & (predictions_N == 1)))
    positives = int(np.sum(labels_N == 1) + np.sum(predictions_N == 1))
    return 2 * true_positives / positives if positives else 0.0


def best_span(start_logits_N: np.ndarray, end_logits_N: np.ndarray, max_answer_length: int) -> tuple[float, int, int]:
    """The highest start_logits[i] + end_logits[j] with i <= j < i + max_answer_length, i and j; among equals the first,
    then the shortest."""
    n = len(start_logits_N)
    max_answer_length = min(max_answer_length, n)
    padded = np.concatenate([end_logits_N, np.full(max_answer_length - 1, -np.inf)])
    end_logits_NL = np.lib.stride_tricks.sliding_window_view(padded, max_answer_length)
    length_N = end_logits_NL.argmax(axis=1)  # best span's from each start, minus 1
    scores_N = start_logits_N + end_logits_NL[np.arange(n), length_N]
    start = int(scores_N.argmax())
    return float(scores_N[start]), start, start + int(length_N[start])


def normalize_answer(text: str) -> str:
    """Normalizes as SQuAD's evaluation script does: no case, punctuation, articles or extra white space."""
    no_punctuation = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", no_punctuation).split())


def answer_scores(prediction: str, answers: Sequence[str]) -> tuple[float, float]:
    """Exact match (1 or 0) and the highest bag-of-words F1 with any of the answers, normalized (arXiv:1606.05250).  As
    in SQuAD 2.0's evaluation script, without answers the empty prediction is right (arXiv:1806.03822), and answers that
    normalization leaves empty are ignored."""
    prediction = normalize_answer(prediction)
    gold = [*filter(None, map(normalize_answer, answers))] or [""]
    return float(prediction in gold), max(_bag_of_words_f1(prediction.split(), answer.split()) for answer in gold)


def _bag_of_words_f1(prediction: list[str], answer: list[str]) -> float:
    if not (prediction and answer):
        return float(prediction == answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer))
