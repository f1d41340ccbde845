"""Documents that contain evaluation texts are removed, and only those."""

import random

import pytest

from spmd_lm.errors import DataError
from tests.prepare.corpora import WORDS, make, sentence, step, texts, write_lines


def test_a_hundred_planted_leaks_are_removed_and_nothing_else(tmp_path):
    draw = random.Random(1234)
    evaluation = [sentence(seed, 40).split() for seed in range(50)]
    half = write_lines(tmp_path / "eval.jsonl", [{"question": " ".join(words)} for words in evaluation[:25]])
    (tmp_path / "eval.txt").write_text("\n".join(" ".join(words) for words in evaluation[25:]))
    clean, leaking = [sentence(seed, 200) for seed in range(1000, 1500)], []
    for seed in range(100):
        start, at = draw.randrange(27), [0, 200, draw.randrange(200)][min(seed, 2)]
        words = sentence(2000 + seed, 200).split()
        planted = ", ".join(evaluation[seed % 50][start : start + 13]).upper()  # neither case nor punctuation hides it
        leaking.append(" ".join([*words[:at], planted, *words[at:]]))
        near = evaluation[seed % 50][start : start + 12]  # one word less is none
        clean.append(" ".join([*words[:at], *near, *draw.choices(WORDS, k=50)]))
    mixed = clean + leaking
    draw.shuffle(mixed)
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in mixed])
    report = make(tmp_path / "out", source, steps={"leaks": {"files": [half, str(tmp_path / "eval.txt")]}})
    assert texts(tmp_path / "out") == [text for text in mixed if text not in set(leaking)]
    assert step(report, "leaks") == {"name": "leaks", "in": 700, "out": 600, "reasons": {"13-gram": 100}}


def test_documents_with_a_title_of_the_list_are_removed(tmp_path):
    (tmp_path / "titles.txt").write_text("Anarchism\n  Albert   EINSTEIN\n\n")
    given = [
        {"text": f"text {i}", "heading": title} for i, title in enumerate(["anarchism", "Albert Einstein", "", "x"])
    ]
    source = {"path": write_lines(tmp_path / "a.jsonl", given), "title": "heading"}
    report = make(tmp_path / "out", [source], steps={"leaks": {"titles": str(tmp_path / "titles.txt")}})
    assert texts(tmp_path / "out") == ["text 2", "text 3"]
    assert step(report, "leaks")["reasons"] == {"title": 2}


def test_an_evaluation_text_that_is_damaged_ends_it(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"text": \n')
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"eval\.jsonl:1: steps\.leaks\.files: .*Mend it"):
        make(tmp_path / "out", tmp_path / "a.txt", steps={"leaks": {"files": [str(tmp_path / "eval.jsonl")]}})


def test_every_file_of_a_directory_of_evaluation_texts_counts_but_hidden_ones(tmp_path):
    """Names may end with anything: a text that is not looked for stays in the training data."""
    (tmp_path / "evals/.git").mkdir(parents=True)
    names = ["wiki.test.tokens", "README", "deep.bin", ".hidden", ".git/config"]
    found = {name: sentence(seed, 20) for seed, name in enumerate(names)}
    for name, text in found.items():
        (tmp_path / "evals" / name).write_text(text)
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"so {text} it"} for text in found.values()])
    report = make(tmp_path / "out", source, steps={"leaks": {"files": [str(tmp_path / "evals")]}})
    assert step(report, "leaks")["reasons"] == {"13-gram": 3}
    (tmp_path / "evals/picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"picture\.png: steps\.leaks\.files: .* of a directory by a glob"):
        make(tmp_path / "new", source, steps={"leaks": {"files": [str(tmp_path / "evals")]}})
