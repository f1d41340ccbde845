"""Near duplicates are found where their similarity, computed here from sets of words, is above 0.7; exact ones too."""

import json
import random
import re

import numpy as np
import pytest

from spmd_lm.prepare import chunks, duplicates, shingles
from tests.prepare.corpora import make, sentence, step, texts, write_lines
from tests.published import published

NEAR = {"near_duplicates": {"jaccard": 0.7}}


def similarity(a: str, b: str) -> float:
    first, second = ({*zip(*(text.lower().split()[i:] for i in range(3)), strict=False)} for text in (a, b))
    return len(first & second) / len(first | second)


def test_every_true_pair_of_a_thousand_articles_is_found_and_no_other(tmp_path):
    source = published("minhash_articles_1000.jsonl")
    text_of = {each["id"]: each["text"] for each in map(json.loads, source.read_text().splitlines())}
    pairs = [line.split() for line in source.with_suffix(".truth").read_text().splitlines()]
    report = make(tmp_path / "out", source, steps=NEAR)
    left = set(texts(tmp_path / "out"))
    removed = {name for name, text in text_of.items() if text not in left}
    order = [*text_of]
    assert removed == {max(pair, key=order.index) for pair in pairs}
    assert step(report, "near_duplicates")["reasons"] == {"near duplicate": 10}


def pair_of_similarity(seed: int, wanted: float) -> tuple[str, str]:
    """Two texts of n = 300 words with different ends: s of their 2n - s shingles are shared."""
    words, n = 300, 298
    shared = round(2 * n * wanted / (1 + wanted))
    first = [f"{seed}x{i}" for i in range(words)]
    second = [*first[: shared + 2], *(f"{seed}y{i}" for i in range(words - shared - 2))]
    return " ".join(first), " ".join(second)


def test_pairs_are_found_by_their_similarity(tmp_path):
    """2,000 pairs from 0.5 to 0.95."""
    draw = random.Random(0)
    pairs = [pair_of_similarity(seed, draw.uniform(0.5, 0.95)) for seed in range(2000)]
    truth = np.array([similarity(*pair) for pair in pairs])
    mixed = [(text, i) for i, pair in enumerate(pairs) for text in pair]
    draw.shuffle(mixed)
    make(tmp_path / "out", write_lines(tmp_path / "a.jsonl", [{"text": text} for text, _ in mixed]), steps=NEAR)
    left = {*texts(tmp_path / "out")}
    found = np.array([not {*pair} <= left for pair in pairs])
    assert all(left & {*pair} for pair in pairs)
    assert not found[truth <= 0.7].any()
    for low in np.arange(0.75, 0.95, 0.05):
        in_bin = (truth >= low) & (truth < low + 0.05)
        assert in_bin.sum() > 100 and found[in_bin].mean() > 0.95, low
    survivors = [text for text, _ in mixed if text in left]
    assert texts(tmp_path / "out") == survivors


def test_the_first_of_a_group_stays_though_its_ends_are_not_similar(tmp_path):
    words = [f"w{i}" for i in range(400)]
    chain = [" ".join(words[start : start + 200]) for start in (0, 25, 50, 75)]  # neighbours 0.78, the next but one 0.6
    assert similarity(chain[0], chain[1]) > 0.75 and similarity(chain[0], chain[2]) < 0.7
    order = [chain[2], chain[0], sentence(1, 200), chain[3], chain[1]]
    make(tmp_path / "out", write_lines(tmp_path / "a.jsonl", [{"text": text} for text in order]), steps=NEAR)
    assert texts(tmp_path / "out") == [order[0], order[2]]


def test_exact_duplicates_differ_in_white_space_and_composition_alone(tmp_path):
    given = ["a cafe\u0301  b", "a caf\u00e9 b\n", "A caf\u00e9 b", "x y", "x\ty ", "x z"]
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in given])
    report = make(tmp_path / "out", source, steps={"exact_duplicates": True})
    assert texts(tmp_path / "out") == [given[0], given[2], given[3], given[5]]
    assert step(report, "exact_duplicates") == {
        "name": "exact_duplicates",
        "in": 6,
        "out": 4,
        "reasons": {"duplicate": 2},
    }


def test_ranges_of_keys_and_chunks_change_nothing(tmp_path, monkeypatch):
    """300 documents, one of them shared by many, in chunks of 7 and ranges of 1,000 keys."""
    given = [sentence(seed % 90, 60) + f" {seed % 5}" for seed in range(300)]
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in given])
    steps = {"exact_duplicates": True, **NEAR}
    make(tmp_path / "one", source, steps=steps)
    monkeypatch.setattr("spmd_lm.prepare.chunks.CHUNK_DOCUMENTS", 7)
    monkeypatch.setattr(duplicates, "RANGE_KEYS", 1000)
    monkeypatch.setattr(duplicates, "MAX_SHINGLES", 300)
    make(tmp_path / "two", source, steps=steps)
    assert texts(tmp_path / "one") == texts(tmp_path / "two") == given[:90]


def test_ranges_have_every_key_once_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "RANGE_KEYS", 50)
    draw, runs = np.random.default_rng(0), []
    for number in range(3):
        run = np.stack([np.sort(draw.integers(0, 2**64, 100, np.uint64)), np.arange(100, dtype=np.uint64)])
        np.save(chunks.chunk_path(tmp_path, number).with_suffix(".bands.npy"), run)
        runs.append(run + np.array([[0], [100 * number]], np.uint64))
    cleaned = duplicates.CleanedChunks(tmp_path, np.array([0, 100, 200, 300]))
    ranges = [*duplicates.key_ranges(cleaned, "bands")]
    everything = np.concatenate(runs, axis=1)
    assert len(ranges) == 6 and max(keys.shape[1] for keys in ranges) < 80
    assert (np.concatenate(ranges, axis=1) == everything[:, np.argsort(everything[0])]).all()


def test_shingles_are_those_of_a_set_of_words():
    for a, b in [(sentence(1, 50), sentence(1, 50)[:150]), ("One, TWO three four", "one two three five"), ("a", "a")]:
        plain = [text.replace(",", "") for text in (a, b)]
        expected = similarity(*plain) if len(a.split()) > 2 else 1
        assert shingles.jaccard(*map(shingles.shingle_set, (a, b))) == pytest.approx(expected)
    assert shingles.jaccard(shingles.shingle_set("--"), shingles.shingle_set("..")) == 0


def test_words_are_the_same_whatever_part_of_a_text_is_in_memory(monkeypatch):
    text = sentence(3, 500)
    whole = shingles.word_hashes(text)
    monkeypatch.setattr(shingles, "PART", 17)
    assert (shingles.word_hashes(text) == whole).all() and len(whole) == 500


def test_rows_of_a_band_follow_the_threshold():
    assert [shingles.rows_per_band(threshold) for threshold in (0.5, 0.7, 0.8, 0.9)] == [3, 5, 6, 10]


def test_words_are_those_of_a_regular_expression():
    """Letters, digits and underscores of any script, in lower case: equal hashes for equal words, and for no others."""
    text = "Naïve, “quoted” — snake_case x2\u00a0Ünï ΑΒΓ αβγ 東京 cafe\u0301 don't ___ q" + "w" * 1000 + " naïve!"
    words = re.findall(r"\w+", text.lower())
    hashes = shingles.word_hashes(text).tolist()
    assert len(hashes) == len(words) and len({*hashes}) == len({*words})
    assert {*zip(words, hashes, strict=True)} == {*dict(zip(words, hashes, strict=True)).items()}
    many = [f"{i:x}" for i in range(100_000)]
    assert len({*shingles.word_hashes(" ".join(many)).tolist()}) == len(many)
