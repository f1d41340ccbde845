"""Metrics of a task's validation split, from a model's logits.  E examples, N features, T the context."""

from collections.abc import Mapping, Sequence

import numpy as np

from spmd_lm.config.schema import ExtractiveQA, MultipleChoice
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.evaluation import metrics


def task_metrics(loader: TaskLoader, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Metrics of the logits of all steps, in order.  R rows of a step:

    classification    {"classes": [R, classes]}: eval_loss, eval_accuracy, eval_matthews; of two classes also eval_f1
    multiple_choice   {"choices": [R]}: eval_loss, eval_accuracy
    span              {"spans": [R, T, 2]}, start and end logits: eval_loss, eval_exact_match, eval_f1

    Losses are means in nats.  A span's is the mean of its start's and its end's, over features."""
    if isinstance(loader.objective, ExtractiveQA):
        return _span_metrics(loader, _concatenate(loader, outputs, "spans"), loader.objective.max_answer_length)
    labels_E = loader.task_split.labels
    if isinstance(loader.objective, MultipleChoice):
        logits_EC = _concatenate(loader, outputs, "choices").reshape(-1, loader.objective.choices)
        return _label_metrics(logits_EC, labels_E)
    logits_EK = _concatenate(loader, outputs, "classes")
    predictions_E = logits_EK.argmax(axis=1)
    result = _label_metrics(logits_EK, labels_E)
    result["eval_matthews"] = metrics.matthews_correlation(labels_E, predictions_E)
    if logits_EK.shape[1] == 2:
        result["eval_f1"] = metrics.binary_f1(labels_E, predictions_E)
    return result


def _concatenate(loader: TaskLoader, outputs: Sequence[Mapping[str, np.ndarray]], name: str) -> np.ndarray:
    """The logits of all features, float64 [N, ...], without the rows that pad the last batch."""
    assert len(outputs) == len(loader)
    logits = np.concatenate([np.asarray(output[name], np.float64) for output in outputs])
    return logits[: len(loader.features.example)]


def _label_metrics(logits_EK: np.ndarray, labels_E: np.ndarray) -> dict[str, float]:
    return {
        "eval_loss": float(metrics.negative_log_likelihood(logits_EK, labels_E).mean()),
        "eval_accuracy": metrics.accuracy(labels_E, logits_EK.argmax(axis=1)),
    }


def _span_metrics(loader: TaskLoader, logits_NT2: np.ndarray, max_answer_length: int) -> dict[str, float]:
    features = loader.features
    assert features.end_positions is not None
    not_padding_NT = np.arange(loader.context) < features.length.sum(axis=1, keepdims=True) + 3  # [CLS], two [SEP]
    start_logits_NT, end_logits_NT = np.where(not_padding_NT, np.moveaxis(logits_NT2, 2, 0), -np.inf)
    loss_N = metrics.negative_log_likelihood(start_logits_NT, features.labels)
    loss_N = (loss_N + metrics.negative_log_likelihood(end_logits_NT, features.end_positions)) / 2
    predictions = predict_answers(loader, logits_NT2, max_answer_length)
    answers = [[answer.text for answer in question.answers] for question in loader.task_split.questions]
    return {
        "eval_loss": float(loss_N.mean()),
        "eval_exact_match": float(np.mean([*map(metrics.exact_match, predictions, answers)])),
        "eval_f1": float(np.mean([*map(metrics.answer_f1, predictions, answers)])),
    }


def predict_answers(loader: TaskLoader, logits_NT2: np.ndarray, max_answer_length: int) -> list[str]:
    """For each question the text of the best span in any of its windows.

    The answer is empty where every window scores its [CLS], start and end together, above that span (the lowest null
    score is compared, as by SQuAD 2.0's baselines).  Files without is_impossible (SQuAD 1.1) have no empty answers."""
    features, questions, offset_mapping = (
        loader.features,
        loader.task_split.questions,
        loader.task_split.offset_mapping,
    )
    assert offset_mapping is not None
    best_scores, best_texts = [-np.inf] * len(questions), [""] * len(questions)
    for row, example in enumerate(features.example):
        question_length, context_length = features.length[row]
        if not context_length:
            continue
        first = question_length + 2  # after [CLS] and [SEP]
        start_logits, end_logits = logits_NT2[row, first : first + context_length].T
        score, start, end = metrics.best_span(start_logits, end_logits, max_answer_length)
        if score > best_scores[example]:
            characters = offset_mapping[features.start[row, 1] :]
            best_scores[example] = score
            best_texts[example] = questions[example].context[characters[start, 0] : characters[end, 1]]
    if all(question.is_impossible is None for question in questions):
        return best_texts
    null_scores = np.full(len(questions), np.inf)
    np.minimum.at(null_scores, features.example, logits_NT2[:, 0].sum(axis=1))
    return ["" if null > best else text for null, best, text in zip(null_scores, best_scores, best_texts, strict=True)]
