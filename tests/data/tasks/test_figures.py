"""What is made of logits, against plain sums over the rows that they are of."""

import json
import math
import random

import numpy as np
import pytest

from spmd_lm.data import loader
from spmd_lm.data.tasks.rows import LabelledValidation
from tests.labelled import config, corpus, joined, plain_rows, validation, write_squad


def logits_of(rows: LabelledValidation, name: str, every: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Of each step; those of rows that fill the last batch are as wild as they can be."""
    missing = len(rows) * rows.batch_size - len(every)
    wild = np.concatenate([every, np.full((missing, *every.shape[1:]), 1e30)]).astype(np.float32)
    return [{name: part} for part in np.split(wild, len(rows))]


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def entropy_of(logits, label: int) -> float:
    return math.log(math.fsum(math.exp(each) for each in logits)) - float(logits[label])


@pytest.mark.parametrize(("batch", "microbatches"), [(4, 1), (16, 2), (32, 4)])
def test_figures_of_classes_and_choices(root, batch, microbatches):
    for task, name, classes in (("jsonl", "classes", 3), ("race", "choices", 4)):
        held_out = validation(task, root, batch=batch, microbatches=microbatches)
        truth = [label for _, label, _ in plain_rows(root / task / "dev.jsonl", task)][:: held_out.rows_per_example]
        logits = drawn(21, classes)
        figures = held_out.figures(logits_of(held_out, name, logits if task == "jsonl" else logits.reshape(-1)))
        said = [max(range(classes), key=row.__getitem__) for row in logits.tolist()]
        loss = sum(entropy_of(row, label) for row, label in zip(logits.tolist(), truth, strict=True)) / 21
        assert figures["eval_loss"] == pytest.approx(loss, rel=1e-12)
        assert figures["eval_accuracy"] == sum(a == b for a, b in zip(said, truth, strict=True)) / 21
        more = ["eval_matthews"] if task == "jsonl" else []
        assert [*figures] == ["eval_loss", "eval_accuracy", *more]
        assert all(type(each) is float for each in figures.values())


def test_two_classes_have_an_f1(tmp_path):
    rows = [{"text": "x", "label": label} for label in [1, 1, 1, 0, 0]]
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    made = config("jsonl", tmp_path, classes=2)
    held_out = loader.make_validation_loader(made, corpus(made))
    figures = held_out.figures(logits_of(held_out, "classes", np.eye(2)[[1, 1, 0, 1, 0]]))
    assert figures["eval_f1"] == pytest.approx(2 / 3) and figures["eval_accuracy"] == 0.6
    assert figures["eval_matthews"] == pytest.approx((2 * 1 - 1 * 1) / math.sqrt(3 * 2 * 3 * 2))


def plain_span_loss(held_out: LabelledValidation, logits: np.ndarray) -> float:
    rows = joined(held_out, len(held_out))
    losses = []
    for row, each in enumerate(logits):
        inside = rows.segments[row].astype(bool)
        for part, labels in ((0, rows.labels), (1, rows.ends)):
            losses.append(entropy_of(each[inside, part].tolist(), labels[row]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("batch", [4, 24])
def test_figures_of_spans(root, batch):
    held_out = validation("squad", root, batch=batch, longest=6)
    logits = drawn(len(held_out.table.example), 32, 2)
    figures = held_out.figures(logits_of(held_out, "spans", logits))
    assert [*figures] == ["eval_loss", "eval_exact_match", "eval_f1"]
    assert figures["eval_loss"] == pytest.approx(plain_span_loss(held_out, logits), rel=1e-12)
    assert figures == validation("squad", root, longest=6).figures(
        logits_of(validation("squad", root), "spans", logits)
    )


def say(held_out: LabelledValidation, wanted) -> np.ndarray:
    """Logits [N, 32, 2] that prefer, of each row, the places that `wanted` names of it and its label."""
    rows = joined(held_out, len(held_out))
    logits = np.zeros((len(held_out.table.example), 32, 2))
    for row, each in enumerate(logits):
        start, end, height = wanted(row, int(rows.labels[row]), int(rows.ends[row]))
        each[start, 0] += height
        each[end, 1] += height
    return logits


def test_right_answers_score_1_and_no_answer_where_there_is_none(root):
    held_out = validation("squad", root)
    paragraphs = json.loads((root / "squad" / "dev.jsonl").read_text())["data"][0]["paragraphs"]
    answered = [bool(each["qas"][0]["answers"]) for each in paragraphs]
    rows = joined(held_out, len(held_out))
    example, labels = held_out.table.example, rows.labels
    shown = [any(labels[: len(example)][example == e]) for e in range(21)]
    right = say(held_out, lambda row, label, end: (label, end, 9.0 if label else 4.0))
    figures = held_out.figures(logits_of(held_out, "spans", right))
    share = sum(a <= b for a, b in zip(answered, shown, strict=True)) / 21
    assert share > 0.9 and figures["eval_exact_match"] == pytest.approx(share), "answers cut in two are not found"
    silent = held_out.figures(logits_of(held_out, "spans", say(held_out, lambda *_: (0, 0, 9.0))))
    assert 0 < 1 - sum(answered) / 21 == pytest.approx(silent["eval_exact_match"]) == pytest.approx(silent["eval_f1"])


def test_one_row_that_does_not_prefer_nothing_is_enough(root):
    """The least of the rows' scores of no answer is compared, as SQuAD 2.0's baselines do."""
    held_out = validation("squad", root)
    example = held_out.table.example
    last = {e: row for row, e in enumerate(example)}
    several = [e for e in range(21) if sum(example == e) > 1]
    logits = say(held_out, lambda row, *_: (0, 0, 0.0 if row == last[example[row]] else 9.0))
    logits[:, 15, :] += 1.0
    said = held_out._answers(np.asarray(logits, np.float64), 30)
    assert several and all(said[e] for e in several)


def test_questions_of_files_that_know_no_others_are_always_answered(tmp_path):
    for name in ("train.jsonl", "dev.jsonl"):
        write_squad(tmp_path / name, random.Random(2), 9, impossible=0)
    made = config("squad", tmp_path)
    held_out = loader.make_validation_loader(made, corpus(made))
    said = held_out._answers(say(held_out, lambda *_: (0, 0, 9.0)), 30)
    contexts = [each["context"] for each in json.loads((tmp_path / "dev.jsonl").read_text())["data"][0]["paragraphs"]]
    assert all(answer and answer in context for answer, context in zip(said, contexts, strict=True))


def test_an_answer_is_of_the_context_and_not_too_long(root):
    """The question's own words, [SEP] and padding are preferred, and never said."""
    held_out = validation("squad", root, longest=3)
    rows = joined(held_out, len(held_out))
    wild = np.where((rows.types == 0)[..., None], 50.0, drawn(*rows.types.shape, 2))[: len(held_out.table.example)]
    wild[:, 0] = -99
    paragraphs = json.loads((root / "squad" / "dev.jsonl").read_text())["data"][0]["paragraphs"]
    for answer, paragraph in zip(held_out._answers(wild, 3), paragraphs, strict=True):
        assert answer and answer in paragraph["context"] and len(answer.encode()) <= 3 * 3
