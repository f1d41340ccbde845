"""Metrics of tasks against plain sums over the rows."""

import json
import math
import random

import numpy as np
import pytest

from spmd_lm.data.corpus import make_loader
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.evaluation.task_metrics import predict_answers, task_metrics
from tests.task_files import all_rows, config, corpus, plain_rows, validation, write_squad


def outputs_of(rows: TaskLoader, name: str, logits: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Logits by step; those of the rows that pad the last batch are huge."""
    padding = len(rows) * rows.batch_size - len(logits)
    padded = np.concatenate([logits, np.full((padding, *logits.shape[1:]), 1e30)]).astype(np.float32)
    return [{name: part} for part in np.split(padded, len(rows))]


def random_logits(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def cross_entropy(logits, label: int) -> float:
    return math.log(math.fsum(math.exp(each) for each in logits)) - float(logits[label])


@pytest.mark.parametrize(("batch", "microbatches"), [(4, 1), (16, 2), (32, 4)])
def test_metrics_of_classes_and_choices(root, batch, microbatches):
    for task, name, classes in (("jsonl", "classes", 3), ("race", "choices", 4)):
        held_out = validation(task, root, batch=batch, microbatches=microbatches)
        truth = [label for _, label, _ in plain_rows(root / task / "dev.jsonl", task)][:: held_out.rows_per_example]
        logits = random_logits(21, classes)
        result = task_metrics(held_out, outputs_of(held_out, name, logits if task == "jsonl" else logits.reshape(-1)))
        predictions = [max(range(classes), key=row.__getitem__) for row in logits.tolist()]
        loss = sum(cross_entropy(row, label) for row, label in zip(logits.tolist(), truth, strict=True)) / 21
        assert result["eval_loss"] == pytest.approx(loss, rel=1e-12)
        assert result["eval_accuracy"] == sum(a == b for a, b in zip(predictions, truth, strict=True)) / 21
        more = ["eval_matthews"] if task == "jsonl" else []
        assert [*result] == ["eval_loss", "eval_accuracy", *more]
        assert all(type(each) is float for each in result.values())


def test_two_classes_have_an_f1(tmp_path):
    rows = [{"text": "x", "label": label} for label in [1, 1, 1, 0, 0]]
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    made = config("jsonl", tmp_path, classes=2)
    held_out = make_loader(made, corpus(made), "validation")
    result = task_metrics(held_out, outputs_of(held_out, "classes", np.eye(2)[[1, 1, 0, 1, 0]]))
    assert result["eval_f1"] == pytest.approx(2 / 3) and result["eval_accuracy"] == 0.6
    assert result["eval_matthews"] == pytest.approx((2 * 1 - 1 * 1) / math.sqrt(3 * 2 * 3 * 2))


def plain_span_loss(held_out: TaskLoader, logits: np.ndarray) -> float:
    rows = all_rows(held_out, len(held_out))
    losses = []
    for row, each in enumerate(logits):
        inside = rows.segments[row].astype(bool)
        for part, labels in ((0, rows.labels), (1, rows.end_positions)):
            losses.append(cross_entropy(each[inside, part].tolist(), labels[row]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("batch", [4, 24])
def test_metrics_of_spans(root, batch):
    held_out = validation("squad", root, batch=batch, max_answer_length=6)
    logits = random_logits(len(held_out.features.example), 32, 2)
    result = task_metrics(held_out, outputs_of(held_out, "spans", logits))
    assert [*result] == ["eval_loss", "eval_exact_match", "eval_f1"]
    assert result["eval_loss"] == pytest.approx(plain_span_loss(held_out, logits), rel=1e-12)
    assert result == task_metrics(
        validation("squad", root, max_answer_length=6), outputs_of(validation("squad", root), "spans", logits)
    )


def prefer(held_out: TaskLoader, choose) -> np.ndarray:
    """Logits [N, 32, 2] that are high at (start, end, height) = choose(row, label, end position)."""
    rows = all_rows(held_out, len(held_out))
    logits = np.zeros((len(held_out.features.example), 32, 2))
    for row, each in enumerate(logits):
        start, end, height = choose(row, int(rows.labels[row]), int(rows.end_positions[row]))
        each[start, 0] += height
        each[end, 1] += height
    return logits


def test_correct_answers_score_1_and_empty_ones_where_there_is_no_answer(root):
    held_out = validation("squad", root)
    paragraphs = json.loads((root / "squad" / "dev.jsonl").read_text())["data"][0]["paragraphs"]
    answered = [bool(each["qas"][0]["answers"]) for each in paragraphs]
    rows = all_rows(held_out, len(held_out))
    example, labels = held_out.features.example, rows.labels
    shown = [any(labels[: len(example)][example == e]) for e in range(21)]
    right = prefer(held_out, lambda row, label, end: (label, end, 9.0 if label else 4.0))
    result = task_metrics(held_out, outputs_of(held_out, "spans", right))
    share = sum(a <= b for a, b in zip(answered, shown, strict=True)) / 21
    assert share > 0.9 and result["eval_exact_match"] == pytest.approx(share), "answers cut in two are not found"
    silent = task_metrics(held_out, outputs_of(held_out, "spans", prefer(held_out, lambda *_: (0, 0, 9.0))))
    assert 0 < 1 - sum(answered) / 21 == pytest.approx(silent["eval_exact_match"]) == pytest.approx(silent["eval_f1"])


def test_one_window_that_prefers_an_answer_is_enough(root):
    """The lowest null score of a question's windows is compared, as by SQuAD 2.0's baselines."""
    held_out = validation("squad", root)
    example = held_out.features.example
    last = {e: row for row, e in enumerate(example)}
    several = [e for e in range(21) if sum(example == e) > 1]
    logits = prefer(held_out, lambda row, *_: (0, 0, 0.0 if row == last[example[row]] else 9.0))
    logits[:, 15, :] += 1.0
    answers = predict_answers(held_out, np.asarray(logits, np.float64), 30)
    assert several and all(answers[e] for e in several)


def test_squad_1_has_no_empty_answers(tmp_path):
    for name in ("train.jsonl", "dev.jsonl"):
        write_squad(tmp_path / name, random.Random(2), 9, impossible=0)
    made = config("squad", tmp_path)
    held_out = make_loader(made, corpus(made), "validation")
    answers = predict_answers(held_out, prefer(held_out, lambda *_: (0, 0, 9.0)), 30)
    contexts = [each["context"] for each in json.loads((tmp_path / "dev.jsonl").read_text())["data"][0]["paragraphs"]]
    assert all(answer and answer in context for answer, context in zip(answers, contexts, strict=True))


def test_answers_are_spans_of_the_context_and_not_too_long(root):
    """The question, [SEP] and padding have higher logits."""
    held_out = validation("squad", root, max_answer_length=3)
    rows = all_rows(held_out, len(held_out))
    logits = np.where((rows.token_type_ids == 0)[..., None], 50.0, random_logits(*rows.token_type_ids.shape, 2))[
        : len(held_out.features.example)
    ]
    logits[:, 0] = -99
    paragraphs = json.loads((root / "squad" / "dev.jsonl").read_text())["data"][0]["paragraphs"]
    for answer, paragraph in zip(predict_answers(held_out, logits, 3), paragraphs, strict=True):
        assert answer and answer in paragraph["context"] and len(answer.encode()) <= 3 * 3
