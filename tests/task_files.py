"""Small files of every kind of task, loaders of them, and a plain, slow implementation of their rows.  Tokens are
bytes."""

import dataclasses
import json
import random
import re
from pathlib import Path

import jax
import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.tasks.loader import TaskLoader
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer

SPECIAL, _ = ByteTokenizer().special_tokens_and_words()
FIELDS = [field.name for field in dataclasses.fields(Batch)]
OBJECTIVES = {
    "jsonl": {"kind": "classification", "classes": 3},
    "race": {"kind": "multiple_choice"},
    "squad": {"kind": "span", "doc_stride": 9},
}


def random_words(draw: random.Random, most: int) -> str:
    return " ".join("".join(draw.choices("abcdefghi", k=draw.randint(1, 5))) for _ in range(draw.randint(1, most)))


def write_jsonl(path: Path, draw: random.Random, count: int) -> None:
    rows = [{"text": f"{n} {random_words(draw, 8)}", "label": draw.randrange(3)} for n in range(count)]
    for row in rows[::2]:
        row["pair"] = random_words(draw, 8)
    path.write_text("\n".join(map(json.dumps, rows)))


def write_race(path: Path, draw: random.Random, count: int) -> None:
    def article(n: int) -> dict:
        questions = [f"{n} {random_words(draw, 3)} _"]
        return {
            "article": random_words(draw, 12),
            "questions": questions,
            "options": [["one", "two", "three", "four"]],
            "answers": [draw.choice("ABCD")],
        }

    path.write_text("\n".join(json.dumps(article(n)) for n in range(count)))


def write_squad(path: Path, draw: random.Random, count: int, impossible: float = 0.25) -> None:
    """Contexts have letters of two and three bytes, so that characters are not tokens.  Every second answer is at the
    end of its context."""

    def question(n: int, context: str) -> dict:
        entry: dict = {"id": str(n), "question": f"{n} {random_words(draw, 4)}?", "answers": []}
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
        context = random_words(draw, 20).replace("a", "é").replace("b", "→") + " end"
        return {"context": context, "qas": [question(n, context)]}

    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph(n) for n in range(count)]}]}))


WRITERS = {"jsonl": write_jsonl, "race": write_race, "squad": write_squad}


def config(task: str, root: Path, context=32, batch=8, microbatches=2, types=2, seed=5, vocab=260, **data) -> RunConfig:
    """data: paths, and keys of the objective."""
    files = {"path": str(root / "train.jsonl"), "validation_path": str(root / "dev.jsonl"), "tokenizer": "bytes"}
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


def corpus(run: RunConfig):
    return load_data(run.data, 0, run.model.vocab)


def training(task: str, root: Path, **changes):
    run = config(task, root / task, **changes)
    return make_loader(run, corpus(run), "training")


def validation(task: str, root: Path, **changes) -> TaskLoader:
    run = config(task, root / task, **changes)
    return make_loader(run, corpus(run), "validation")


def all_rows(rows, steps: int) -> Batch:
    parts = [rows.rows(step, 0, rows.batch_size) for step in range(steps)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def assert_same(actual: Batch, expected: Batch) -> None:
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field), err_msg=field)


def plain_row(a: list[int], b: list[int] | None, context: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, attention mask and token types, as in google-research/bert's run_classifier.py."""
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
    padding = context - len(tokens)
    return [*tokens, *[SPECIAL.pad] * padding], [1] * len(tokens) + [0] * padding, [*types, *[0] * padding]


def assert_rows(rows: Batch, expected: list[tuple[list[int], list[int], list[int]]]) -> None:
    for field, values in zip(("tokens", "segments", "token_type_ids"), zip(*expected, strict=True), strict=True):
        assert getattr(rows, field)[: len(expected)].tolist() == [*values], field


def plain_rows(path: Path, task: str, context: int = 32) -> list[tuple]:
    """(row, label, end position) of each row of one of the files above, or of a published one of its kind."""
    values = [json.loads(line) for line in path.read_text().splitlines()]
    if task == "jsonl":
        pairs = [[list(value[key].encode()) if key in value else None for key in ("text", "pair")] for value in values]
        return [(plain_row(*pair, context), value["label"], None) for pair, value in zip(pairs, values, strict=True)]
    rows = []
    if task == "race":
        for row in values:
            article = row["article"].encode()
            for question, options, answer in zip(row["questions"], row["options"], row["answers"], strict=True):
                for option in options:
                    filled = question.replace("_", option) if "_" in question else question + " " + option
                    text = re.sub(r"\s+", " ", filled).strip().encode()
                    rows.append((plain_row(article, text, context), "ABCD".index(answer), None))
        return rows
    for paragraph in values[0]["data"][0]["paragraphs"]:
        text, (entry,) = paragraph["context"], paragraph["qas"]
        question, whole = entry["question"].encode()[: context // 4], text.encode()
        room = context - 3 - len(question)
        for begin in range(0, len(whole), min(OBJECTIVES["squad"]["doc_stride"], room)):
            row = plain_row(question, whole[begin : begin + room], context)
            label = end = 0
            if entry["answers"]:
                answer = entry["answers"][0]
                first = len(text[: answer["answer_start"]].encode())
                last = first + len(answer["text"].encode()) - 1
                if begin <= first and last < begin + room:
                    label, end = (token - begin + len(question) + 2 for token in (first, last))
            rows.append((row, label, end))
            if begin + room >= len(whole):
                break
    return rows


def row_keys(rows: Batch) -> list[tuple]:
    """(tokens, label, end position) of each row."""
    ends = rows.end_positions if rows.end_positions is not None else [None] * len(rows.labels)
    columns = zip(rows.tokens.tolist(), rows.labels.tolist(), ends, strict=True)
    return [(tuple(tokens), label, end if end is None else int(end)) for tokens, label, end in columns]
