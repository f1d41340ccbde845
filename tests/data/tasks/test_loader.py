"""Rows of task features against a plain, slow implementation."""

import json
import random
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import abstract_batch
from spmd_lm.data.corpus import make_loader
from tests.published import published
from tests.task_files import (
    FIELDS,
    SPECIAL,
    all_rows,
    assert_rows,
    assert_same,
    config,
    corpus,
    plain_row,
    plain_rows,
    row_keys,
    training,
    validation,
    write_squad,
)


@settings(max_examples=60)
@given(
    texts=st.lists(
        st.tuples(st.text("abé", max_size=40), st.none() | st.text("xyz→", max_size=40)), min_size=1, max_size=6
    ),
    context=st.integers(8, 40),
)
def test_truncation_is_that_of_bert(tmp_path_factory, texts, context):
    root = tmp_path_factory.mktemp("texts")
    lines = [{"text": a, "label": 0} | ({} if b is None else {"pair": b}) for a, b in texts]
    for name in ("train.jsonl", "dev.jsonl"):
        (root / name).write_text("\n".join(map(json.dumps, lines)))
    made = config("jsonl", root, context=context, batch=8, microbatches=1)
    rows = make_loader(made, corpus(made), "validation").rows(0, 0, 8)
    expected = [plain_row(list(a.encode()), None if b is None else list(b.encode()), context) for a, b in texts]
    assert_rows(rows, expected)


def test_batches_have_the_fields_shapes_and_dtypes_of_the_step(task, root):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "data"))
    for types in (0, 2):
        made = config(task, root / task, types=types)
        expected = abstract_batch(made)
        shardings = jax.tree.map(lambda _: sharding, expected)
        for rows in (
            make_loader(made, corpus(made), "training"),
            make_loader(made, corpus(made), "validation"),
        ):
            batch, host = rows.batch(0, shardings), rows.rows(0, 0, 8)
            for field in FIELDS:
                asked, placed, read = (getattr(each, field) for each in (expected, batch, host))
                assert (asked is None) == (placed is None) == (read is None), field
                if asked is not None:
                    assert (placed.shape, placed.dtype, read.dtype) == (asked.shape, asked.dtype, asked.dtype), field
                    np.testing.assert_array_equal(placed, read.reshape(asked.shape), err_msg=field)


def test_positions_and_samples_count(task, root):
    rows = training(task, root).rows(3, 2, 7)
    assert (rows.positions == np.arange(32)).all() and rows.sample_ids.tolist() == [2, 3, 4, 5, 6]


@given(step=st.integers(0, 10**9), cuts=st.sets(st.integers(1, 7)))
@settings(max_examples=20)
def test_rows_do_not_depend_on_how_they_are_split(task, root, step, cuts):
    rows = training(task, root)
    parts = [rows.rows(step, start, stop) for start, stop in pairwise([0, *sorted(cuts), 8])]
    assert_same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), rows.rows(step, 0, 8))


def test_validation_has_every_row_in_order_and_padding_of_weight_0(task, root):
    held_out, expected = validation(task, root), plain_rows(root / task / "dev.jsonl", task)
    assert len(held_out) == -(-len(expected) // 8) > 1, "whatever train.eval_batches says"
    rows = all_rows(held_out, len(held_out))
    assert_rows(rows, [row for row, _, _ in expected])
    assert row_keys(rows)[: len(expected)] == [(tuple(row[0]), label, end) for row, label, end in expected]
    firsts = np.arange(len(rows.labels)) % held_out.rows_per_example == 0
    real = np.arange(len(rows.labels)) < len(expected)
    assert (rows.label_weights == (firsts & real)).all() and not real.all()
    assert len(held_out.task_split.labels) == 21


def test_each_example_occurs_once_per_epoch(task, root):
    rows, expected = training(task, root), plain_rows(root / task / "train.jsonl", task)
    together, seen = rows.rows_per_example, row_keys(all_rows(rows, 3 * len(expected)))
    expected = [(tuple(row[0]), label, end) for row, label, end in expected]

    def groups(rows: list) -> list[tuple]:
        return [tuple(rows[at : at + together]) for at in range(0, len(rows), together)]

    orders = [groups(seen[epoch * len(expected) : (epoch + 1) * len(expected)]) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == sorted(groups(expected)), "a question's choices follow each other"
    assert orders[0] != orders[1] != orders[2] and groups(expected) not in orders
    assert (
        row_keys(all_rows(training(task, root, seed=6), 1)) != seen[:8] == row_keys(all_rows(training(task, root), 1))
    )


def test_choices_of_a_question_share_its_label_and_its_weight(root):
    rows = all_rows(training("race", root, batch=16, context=128), 4)
    labels, weights = (each.reshape(-1, 4) for each in (rows.labels, rows.label_weights))
    assert (labels == labels[:, :1]).all() and set(labels.flat) == {0, 1, 2, 3}
    assert (weights == [1, 0, 0, 0]).all()
    for row, ids in enumerate(rows.tokens.tolist()):
        shown = bytes(token for token in ids if token < 256)
        assert shown.endswith((b"one", b"two", b"three", b"four")[row % 4])


@pytest.mark.parametrize("impossible", [0.25, 0])
@given(context=st.integers(8, 60), doc_stride=st.integers(1, 40), seed=st.integers(0, 100))
@settings(max_examples=25)
def test_windows_cover_the_context_and_labels_point_at_the_answer(
    tmp_path_factory, impossible, context, doc_stride, seed
):
    root = tmp_path_factory.mktemp("squad")
    for name in ("train.jsonl", "dev.jsonl"):
        write_squad(root / name, random.Random(seed), 5, impossible)
    made = config("squad", root, context=context, doc_stride=doc_stride, batch=4, microbatches=1)
    held_out = make_loader(made, corpus(made), "validation")
    rows = all_rows(held_out, len(held_out))
    paragraphs = json.loads((root / "dev.jsonl").read_text())["data"][0]["paragraphs"]
    for example, paragraph in enumerate(paragraphs):
        (entry,) = paragraph["qas"]
        whole, found, reached = paragraph["context"].encode(), 0, 0
        for row in np.flatnonzero(held_out.features.example == example):
            ids = rows.tokens[row]
            first, last = np.flatnonzero(ids == SPECIAL.sep)
            assert bytes(ids[1:first].astype(np.uint8)) == entry["question"].encode()[: context // 4]
            begin = (
                held_out.features.start[row, 1] - held_out.features.start[held_out.features.example == example][0, 1]
            )
            shown = bytes(ids[first + 1 : last].astype(np.uint8))
            assert begin <= reached and whole[begin : begin + len(shown)] == shown, "no gap"
            reached = begin + len(shown)
            label, end = rows.labels[row], rows.end_positions[row]
            answer = entry["answers"][0]["text"].encode() if entry["answers"] else None
            if label:
                assert first < label <= end < last and bytes(ids[label : end + 1].astype(np.uint8)) == answer
                found += 1
            else:
                assert end == 0
        assert reached == len(whole)
        if answer is not None and len(answer) + min(doc_stride, context - 3 - first) <= context - 2 - first:
            assert found, "windows that overlap by as much as an answer show it whole"


def test_rows_of_published_articles(tmp_path):
    """RACE: some articles are longer than a row, and questions are of all forms."""
    articles = published("race_dev_middle.jsonl").read_text()
    (tmp_path / "dev.jsonl").write_text("".join(articles.splitlines(keepends=True)[:40]))
    made = config("race", tmp_path, path=str(tmp_path / "dev.jsonl"), context=1024, batch=400)
    held_out, expected = (
        make_loader(made, corpus(made), "validation"),
        plain_rows(tmp_path / "dev.jsonl", "race", 1024),
    )
    rows, lengths = all_rows(held_out, len(held_out)), {sum(row[1]) for row, _, _ in expected}
    assert len(lengths) > 50 and max(lengths) == 1024, "some are cut, some are not"
    assert_rows(rows, [row for row, _, _ in expected])
    assert rows.labels[: len(expected)].tolist() == [label for _, label, _ in expected]
