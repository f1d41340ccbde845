"""Rows of labelled examples, of bytes that stand for themselves, against a slow and plain making of them."""

import dataclasses
import json
import math
import os
import random
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.data import loader, sources
from spmd_lm.data.examples import LabelledValidation
from spmd_lm.data.tokenizer import ByteTokenizer
from spmd_lm.errors import ConfigError, DataError

SPECIAL, _ = ByteTokenizer().masking()
FIELDS = [field.name for field in dataclasses.fields(Batch)]
OBJECTIVES = {
    "jsonl": {"kind": "classification", "classes": 3},
    "race": {"kind": "multiple_choice"},
    "squad": {"kind": "span", "stride": 9},
}


def words(draw: random.Random, most: int) -> str:
    return " ".join("".join(draw.choices("abcdefghi", k=draw.randint(1, 5))) for _ in range(draw.randint(1, most)))


def write_jsonl(path: Path, draw: random.Random, count: int) -> None:
    rows = [{"text": f"{n} {words(draw, 8)}", "label": draw.randrange(3)} for n in range(count)]
    for row in rows[::2]:
        row["pair"] = words(draw, 8)
    path.write_text("\n".join(map(json.dumps, rows)))


def write_race(path: Path, draw: random.Random, count: int) -> None:
    def article(n: int) -> dict:
        asked = [f"{n} {words(draw, 3)} _"]
        return {
            "article": words(draw, 12),
            "questions": asked,
            "options": [["one", "two", "three", "four"]],
            "answers": [draw.choice("ABCD")],
        }

    path.write_text("\n".join(json.dumps(article(n)) for n in range(count)))


def write_squad(path: Path, draw: random.Random, count: int, impossible: float = 0.25) -> None:
    """Contexts have letters of two and of three bytes, so that characters are not tokens.  Every second answer lies at
    the end of its context."""

    def question(n: int, context: str) -> dict:
        entry: dict = {"id": str(n), "question": f"{n} {words(draw, 4)}?", "answers": []}
        if impossible and draw.random() < impossible:
            return entry | {"is_impossible": True}
        size = draw.randint(1, min(8, len(context) - 1))
        start = len(context) - size if n % 2 else draw.randrange(len(context) - size)
        text = context[start : start + size]
        if text.strip():
            entry["answers"] = [{"text": text, "answer_start": start}, {"text": context, "answer_start": 0}]
            return entry | ({"is_impossible": False} if impossible else {})
        return question(n, context)

    def paragraph(n: int) -> dict:
        context = words(draw, 20).replace("a", "é").replace("b", "→") + " end"
        return {"context": context, "qas": [question(n, context)]}

    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph(n) for n in range(count)]}]}))


WRITERS = {"jsonl": write_jsonl, "race": write_race, "squad": write_squad}


def config(task: str, root: Path, context=32, batch=8, microbatches=2, types=2, seed=5, vocab=260, **data) -> RunConfig:
    """`data` may say where files are, and has the keys of an objective, too."""
    files = {"path": str(root / "train.jsonl"), "validation": str(root / "dev.jsonl"), "tokenizer": "bytes"}
    given = {key: data.pop(key, value) for key, value in files.items()}
    return RunConfig.model_validate(
        {
            "model": {
                "kind": "bert", "layers": 1, "width": 8, "heads": 1, "context": context, "vocab": vocab,
                "token_types": types,
            },
            "objective": {**OBJECTIVES.get(task, {"kind": "classification", "classes": 3}), **data},
            "data": {"source": "task", "task": task, **given},
            "parallel": {"microbatches": microbatches},
            "optim": {"lr": 1e-3},
            "train": {"steps": 1, "batch": batch, "seed": seed, "eval_batches": 1},
        }
    )  # fmt: skip


@pytest.fixture(scope="module", params=WRITERS)
def task(request):
    return request.param


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Files of every task: 37 examples to train on and 21 to be judged by."""
    top = tmp_path_factory.mktemp("tasks")
    for name, write in WRITERS.items():
        (top / name).mkdir()
        write(top / name / "train.jsonl", random.Random(0), 37)
        write(top / name / "dev.jsonl", random.Random(1), 21)
    return top


def corpus(made: RunConfig):
    return sources.load(made.data, 0, made.model.vocab)


def training(task: str, root: Path, **changes):
    made = config(task, root / task, **changes)
    return loader.training(made, corpus(made))


def validation(task: str, root: Path, **changes) -> LabelledValidation:
    made = config(task, root / task, **changes)
    return loader.validation(made, corpus(made))


def joined(rows, steps: int) -> Batch:
    parts = [rows.rows(step, 0, rows.batch_size) for step in range(steps)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def assert_same(actual: Batch, expected: Batch) -> None:
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field), err_msg=field)


# --- how a row is laid ------------------------------------------------------------------------------------------------


def plain_row(a: list[int], b: list[int] | None, context: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, segments and types, as google-research/bert's run_classifier.py makes them."""
    a = list(a)
    if b is None:
        a = a[: context - 2]
    else:
        b = list(b)
        while len(a) + len(b) > context - 3:
            (a if len(a) > len(b) else b).pop()
    tokens, types = [SPECIAL.cls, *a, SPECIAL.sep], [0] * (len(a) + 2)
    if b is not None:
        tokens, types = [*tokens, *b, SPECIAL.sep], [*types, *[1] * (len(b) + 1)]
    empty = context - len(tokens)
    return [*tokens, *[SPECIAL.pad] * empty], [1] * len(tokens) + [0] * empty, [*types, *[0] * empty]


def assert_rows(rows: Batch, expected: list[tuple[list[int], list[int], list[int]]]) -> None:
    for field, values in zip(("tokens", "segments", "types"), zip(*expected, strict=True), strict=True):
        assert getattr(rows, field)[: len(expected)].tolist() == [*values], field


@settings(max_examples=60)
@given(
    texts=st.lists(
        st.tuples(st.text("abé", max_size=40), st.none() | st.text("xyz→", max_size=40)), min_size=1, max_size=6
    ),
    context=st.integers(8, 40),
)
def test_a_row_is_as_bert_makes_it(tmp_path_factory, texts, context):
    root = tmp_path_factory.mktemp("texts")
    lines = [{"text": a, "label": 0} | ({} if b is None else {"pair": b}) for a, b in texts]
    for name in ("train.jsonl", "dev.jsonl"):
        (root / name).write_text("\n".join(map(json.dumps, lines)))
    made = config("jsonl", root, context=context, batch=8, microbatches=1)
    rows = loader.validation(made, corpus(made)).rows(0, 0, 8)
    expected = [plain_row(list(a.encode()), None if b is None else list(b.encode()), context) for a, b in texts]
    assert_rows(rows, expected)


def test_a_batch_has_what_the_step_asks_for(task, root):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "data"))
    for types in (0, 2):
        made = config(task, root / task, types=types)
        expected = abstract_batch(made)
        shardings = jax.tree.map(lambda _: sharding, expected)
        for rows in (loader.training(made, corpus(made)), loader.validation(made, corpus(made))):
            batch, host = rows.batch(0, shardings), rows.rows(0, 0, 8)
            for field in FIELDS:
                asked, placed, read = (getattr(each, field) for each in (expected, batch, host))
                assert (asked is None) == (placed is None) == (read is None), field
                if asked is not None:
                    assert (placed.shape, placed.dtype, read.dtype) == (asked.shape, asked.dtype, asked.dtype), field
                    np.testing.assert_array_equal(placed, read.reshape(asked.shape), err_msg=field)


def test_positions_and_samples_count(task, root):
    rows = training(task, root).rows(3, 2, 7)
    assert (rows.positions == np.arange(32)).all() and rows.samples.tolist() == [2, 3, 4, 5, 6]


@given(step=st.integers(0, 10**9), cuts=st.sets(st.integers(1, 7)))
@settings(max_examples=20)
def test_rows_do_not_depend_on_how_they_are_asked_for(task, root, step, cuts):
    rows = training(task, root)
    parts = [rows.rows(step, start, stop) for start, stop in pairwise([0, *sorted(cuts), 8])]
    assert_same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), rows.rows(step, 0, 8))


# --- which rows there are ---------------------------------------------------------------------------------------------


def plain_rows(root: Path, side: str, task: str, context: int = 32) -> list[tuple]:
    """Each row, its label and its end."""
    read = [json.loads(line) for line in (root / task / f"{side}.jsonl").read_text().splitlines()]
    if task == "jsonl":
        ids = lambda row, key: [*row[key].encode()] if key in row else None  # noqa: E731
        return [(plain_row(ids(row, "text"), ids(row, "pair"), context), row["label"], None) for row in read]
    made = []
    if task == "race":
        for row in read:
            for option in row["options"][0]:
                asked = row["questions"][0].replace("_", option)
                made.append(
                    (plain_row(row["article"].encode(), asked.encode(), context), "ABCD".index(row["answers"][0]), None)
                )
        return made
    for paragraph in read[0]["data"][0]["paragraphs"]:
        text, (entry,) = paragraph["context"], paragraph["qas"]
        asked, whole = entry["question"].encode()[: context // 4], text.encode()
        room = context - 3 - len(asked)
        for begin in range(0, len(whole), min(9, room)):
            row = plain_row(asked, whole[begin : begin + room], context)
            label = end = 0
            if entry["answers"]:
                answer = entry["answers"][0]
                first = len(text[: answer["answer_start"]].encode())
                last = first + len(answer["text"].encode()) - 1
                if begin <= first and last < begin + room:
                    label, end = (place - begin + len(asked) + 2 for place in (first, last))
            made.append((row, label, end))
            if begin + room >= len(whole):
                break
    return made


def keys(rows: Batch) -> list[tuple]:
    ends = rows.ends if rows.ends is not None else [None] * len(rows.labels)
    each = zip(rows.tokens.tolist(), rows.labels.tolist(), ends, strict=True)
    return [(tuple(tokens), label, end if end is None else int(end)) for tokens, label, end in each]


def test_validation_is_every_row_in_order_and_weight_0_at_the_end(task, root):
    held_out, expected = validation(task, root), plain_rows(root, "dev", task)
    assert len(held_out) == -(-len(expected) // 8) > 1, "whatever train.eval_batches says"
    rows = joined(held_out, len(held_out))
    assert_rows(rows, [row for row, _, _ in expected])
    assert keys(rows)[: len(expected)] == [(tuple(row[0]), label, end) for row, label, end in expected]
    firsts = np.arange(len(rows.labels)) % held_out.together == 0
    real = np.arange(len(rows.labels)) < len(expected)
    assert (rows.label_weights == (firsts & real)).all() and not real.all()
    assert held_out.count == 21


def test_each_example_comes_once_in_every_epoch(task, root):
    rows, expected = training(task, root), plain_rows(root, "train", task)
    together, seen = rows.together, keys(joined(rows, 3 * len(expected)))
    expected = [(tuple(row[0]), label, end) for row, label, end in expected]
    groups = lambda of: [tuple(of[at : at + together]) for at in range(0, len(of), together)]  # noqa: E731
    orders = [groups(seen[epoch * len(expected) : (epoch + 1) * len(expected)]) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == sorted(groups(expected)), "a question's choices follow each other"
    assert orders[0] != orders[1] != orders[2] and groups(expected) not in orders
    assert keys(joined(training(task, root, seed=6), 1)) != seen[:8] == keys(joined(training(task, root), 1))


def test_choices_of_one_question_share_its_label_and_its_weight(root):
    rows = joined(training("race", root, batch=16, context=128), 4)
    labels, weights = (each.reshape(-1, 4) for each in (rows.labels, rows.label_weights))
    assert (labels == labels[:, :1]).all() and set(labels.flat) == {0, 1, 2, 3}
    assert (weights == [1, 0, 0, 0]).all()
    for row, ids in enumerate(rows.tokens.tolist()):
        shown = bytes(token for token in ids if token < 256)
        assert shown.endswith((b"one", b"two", b"three", b"four")[row % 4])


@pytest.mark.parametrize("impossible", [0.25, 0])
@given(context=st.integers(8, 60), stride=st.integers(1, 40), seed=st.integers(0, 100))
@settings(max_examples=25)
def test_windows_show_all_of_a_context_and_answers_are_found_where_they_stand(
    tmp_path_factory, impossible, context, stride, seed
):
    root = tmp_path_factory.mktemp("squad")
    for name in ("train.jsonl", "dev.jsonl"):
        write_squad(root / name, random.Random(seed), 5, impossible)
    made = config("squad", root, context=context, stride=stride, batch=4, microbatches=1)
    held_out = loader.validation(made, corpus(made))
    rows = joined(held_out, len(held_out))
    paragraphs = json.loads((root / "dev.jsonl").read_text())["data"][0]["paragraphs"]
    for example, paragraph in enumerate(paragraphs):
        (entry,) = paragraph["qas"]
        whole, found, reached = paragraph["context"].encode(), 0, 0
        for row in np.flatnonzero(held_out.table.example == example):
            ids = rows.tokens[row]
            first, last = np.flatnonzero(ids == SPECIAL.sep)
            assert bytes(ids[1:first].astype(np.uint8)) == entry["question"].encode()[: context // 4]
            begin = held_out.table.begin[row, 1] - held_out.table.begin[held_out.table.example == example][0, 1]
            shown = bytes(ids[first + 1 : last].astype(np.uint8))
            assert begin <= reached and whole[begin : begin + len(shown)] == shown, "no gap"
            reached = begin + len(shown)
            label, end = rows.labels[row], rows.ends[row]
            answer = entry["answers"][0]["text"].encode() if entry["answers"] else None
            if label:
                assert first < label <= end < last and bytes(ids[label : end + 1].astype(np.uint8)) == answer
                found += 1
            else:
                assert end == 0
        assert reached == len(whole)
        if answer is not None and len(answer) + min(stride, context - 3 - first) <= context - 2 - first:
            assert found, "windows that overlap by as much as an answer show it whole"


# --- figures ----------------------------------------------------------------------------------------------------------


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
        truth = [label for _, label, _ in plain_rows(root, "dev", task)][:: held_out.together]
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
    held_out = loader.validation(made, corpus(made))
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
    held_out = loader.validation(made, corpus(made))
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


# --- the corpus -------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_all_that_is_read(task, root, tmp_path):
    made = config(task, root / task)
    assert corpus(made).fingerprint == corpus(made).fingerprint and len(corpus(made).fingerprint) == 64
    prints = {corpus(made).fingerprint}
    old, new = {"jsonl": ('"label": 1', '"label": 2'), "race": ('["A"]', '["B"]'), "squad": ("?", "!")}[task]
    for side in ("train", "dev"):
        text = (root / task / f"{side}.jsonl").read_text()
        assert old in text
        (tmp_path / "changed.jsonl").write_text(text.replace(old, new, 1))
        key = "path" if side == "train" else "validation"
        prints.add(corpus(config(task, root / task, **{key: str(tmp_path / "changed.jsonl")})).fingerprint)
    assert len(prints) == 3


def test_gold_answers_are_in_the_fingerprint(tmp_path):
    for name in ("train.jsonl", "dev.jsonl"):
        write_squad(tmp_path / name, random.Random(2), 3, impossible=0)
    before = corpus(config("squad", tmp_path)).fingerprint
    tree = json.loads((tmp_path / "dev.jsonl").read_text())
    del tree["data"][0]["paragraphs"][2]["qas"][0]["answers"][1]
    (tmp_path / "dev.jsonl").write_text(json.dumps(tree))
    assert corpus(config("squad", tmp_path)).fingerprint != before


def test_the_description_has_the_figures(root, tmp_path):
    made = corpus(config("jsonl", root / "jsonl"))
    assert made.name == f"jsonl, {root}/jsonl/train.jsonl"
    line = made.describe()
    assert line.startswith(f"{made.name}: 37 examples to train on, 21 held out, ") and "left out" not in line
    assert line.endswith(f" tokens, sha256 {made.fingerprint[:12]}") and "\n" not in line
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text("sentence1\tsentence2\tgold_label\na\tb\tneutral\na\tcd\t-\n")
    assert (
        "1 examples to train on, 1 held out, 2 lines left out, 4 tokens" in corpus(config("mnli", tmp_path)).describe()
    )


def test_a_label_that_is_no_class_is_named_with_its_line(root):
    made = config("jsonl", root / "jsonl", classes=2)
    for make in (loader.training, loader.validation):
        with pytest.raises(DataError, match=r"\.jsonl: line \d+: label 2 is not below objective\.classes=2\. Use .*=3"):
            make(made, corpus(made))


def test_vocabularies_of_files_are_checked(root, tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghi"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    with pytest.raises(ConfigError, match=r"model\.vocab=13 is less than the 14 tokens of data\.tokenizer=.*vocab=14"):
        corpus(config("jsonl", root / "jsonl", tokenizer=str(tmp_path), vocab=13))
    (tmp_path / "vocab.txt").write_text("\n".join(pieces[:4]))
    made = config("jsonl", root / "jsonl", tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match=r"^data\.tokenizer=.*: it has no \[MASK\]\. Use data\.tokenizer=bytes"):
        loader.training(made, corpus(made))


def test_rows_of_word_pieces_are_those_of_the_library():
    """Its own template and truncation; the room is even, for of equals it cuts the other."""
    if "SPMD_LM_DATA" not in os.environ:
        pytest.skip("SPMD_LM_DATA is not set: a published vocabulary and MNLI are looked for there")
    from tokenizers.processors import BertProcessing

    shared = Path(os.environ["SPMD_LM_DATA"])
    path = str(shared / "mnli_dev_matched_raw_first.tsv")
    vocabulary = str(shared / "bert_base_uncased_vocab.txt")
    made = config("mnli", shared, path=path, validation=path, tokenizer=vocabulary, vocab=30522, context=33, batch=52)
    read = corpus(made)
    rows = loader.validation(made, read).rows(0, 0, 51)
    library = read.tokenizer.library
    library.post_processor = BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    library.enable_truncation(33, strategy="longest_first")
    library.enable_padding(length=33, pad_id=0)
    pairs = [line.split("\t")[1:3] for line in Path(path).read_text().splitlines()[1:]]
    encoded = [library.encode(a, b) for a, b in pairs]
    assert any(each.overflowing for each in encoded)
    assert_rows(rows, [(each.ids, each.attention_mask, each.type_ids) for each in encoded])
