import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_lm.config.data_sections import PythonStdlib, Synthetic, Text
from spmd_lm.data.corpus import hold_out, load_data, split_documents
from spmd_lm.data.text_files import Document
from spmd_lm.errors import ConfigError, DataError

NAMES = st.lists(st.integers(0).map(str), min_size=2, max_size=40, unique=True)
FRACTION = st.floats(0.01, 0.99)


def text(path: object, **keys: float):
    return load_data(Text(source="text", path=str(path), **keys), seed=0, vocab_size=256)


def documents(tokens: np.ndarray) -> set[bytes]:
    return set(bytes(tokens).split(b"\0"))


@given(names=NAMES, fraction=FRACTION)
def test_neither_split_is_ever_empty(names, fraction):
    assert 0 < sum(hold_out(names, fraction)) < len(names)


@given(names=NAMES, fraction=FRACTION)
def test_a_document_stays_in_its_split_when_others_are_added(names, fraction):
    """A document that had moved to fill an empty split may move back."""
    fewer = names[: max(2, len(names) // 2)]
    before, after = hold_out(fewer, fraction), hold_out(names, fraction)
    assert sum(a != b for a, b in zip(before, after, strict=False)) <= 1


LARGE = st.tuples(st.integers(20_000, 60_000), st.lists(st.integers(1, 300), min_size=1, max_size=30))
SIZES = st.one_of(
    LARGE.map(lambda drawn: [drawn[0], *drawn[1]]),
    st.tuples(st.integers(60, 2000), st.integers(2, 40)).map(lambda drawn: [drawn[0]] * drawn[1]),
    st.integers(500, 5000).map(lambda size: [size]),
    st.lists(st.integers(300, 5000), min_size=2, max_size=2),
    st.just([1 + n % 9 for n in range(2500)]),
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, share=st.floats(0.005, 0.5), alike=st.booleans(), seed=st.integers(0, 99))
def test_the_share_that_is_asked_for_is_held_out_whatever_the_sizes(sizes, share, alike, seed):
    """The share is within a twentieth and the character at the cut; nothing is lost; order and names do not count."""
    letters = random.Random(seed)
    texts = [b"x" * size if alike else bytes(letters.choices([10, *range(97, 123)], k=size)) for size in sizes]
    given = [Document(f"{number}.txt", Path("x"), text) for number, text in enumerate(texts)]
    train, validation = split_documents(given, share)
    held_out, total = (sum(len(each.text) for each in part) for part in (validation, given))
    assert abs(held_out - share * total) <= max(1, 0.05 * share * total)
    whole = Counter(each.text for each in given)
    parts = Counter(each.text for each in (*train, *validation))
    assert (parts - whole).total() <= 2 and held_out + sum(len(each.text) for each in train) == total
    letters.shuffle(given)
    renamed = [each._replace(name=f"other{number}") for number, each in enumerate(given)]
    again = split_documents(renamed, share)
    assert [[each.text for each in part] for part in again] == [[d.text for d in part] for part in (train, validation)]


def test_a_cut_divides_no_character():
    document = Document("a", Path("a"), "\N{SNOWMAN}\N{CYRILLIC SMALL LETTER A}x".encode() * 50)
    for share in np.linspace(0.01, 0.5, 40):
        train, validation = split_documents([document], share)
        assert (train[0].text.decode() + validation[0].text.decode()).encode() == document.text


def test_a_cut_is_between_two_lines_if_there_are_any():
    document = Document("a", Path("a"), b"".join(b"line %d\n" % i for i in range(1000)))
    for share in np.linspace(0.05, 0.5, 10):
        train, validation = split_documents([document], share)
        assert train[0].text.endswith(b"\n") and validation[0].text.startswith(b"line ")


def test_the_same_files_by_other_names_and_in_another_order_are_the_same_run(tmp_path):
    texts = [f"{number} " * (5000 if number == 3 else 7) for number in range(9)]
    for number, content in enumerate(texts):
        (tmp_path / f"a{number}.txt").write_text(content)
        (tmp_path / f"b{8 - number}.txt").write_text(content)
    one, other = text(tmp_path / "a*.txt"), text(tmp_path / "b*.txt")
    assert one.fingerprint == other.fingerprint and not one.warning
    backwards = Text(source="text", path=[str(tmp_path / f"a{number}.txt") for number in reversed(range(9))])
    assert load_data(backwards, 0, 256).fingerprint == one.fingerprint


def test_another_share_than_was_asked_for_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    assert "WARNING: 33.3% are held out, not data.validation_fraction=1.0%" in (
        text(tmp_path, validation_fraction=0.01).describe()
    )
    (tmp_path / "b.txt").write_text("x" * 10_000)
    told = load_data(Text(source="text", path=str(tmp_path)), 0, 256, rules=1).describe()
    assert "% are held out, not data.validation_fraction=10.0%" in told, "names alone decide there"


def test_a_run_that_began_by_older_rules_keeps_its_tokens(tmp_path):
    """sha256 of both splits, as the same files gave before."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 40)
    data = Text(source="text", path=str(tmp_path), validation_fraction=0.4)
    held_out = hold_out([f"{number}.txt" for number in range(5)], 0.4)
    parts = [[(f"{n} " * 40).encode() for n in range(5) if held_out[n] == part] for part in (False, True)]
    corpus = load_data(data, 0, 256, rules=1)
    assert [bytes(corpus.train), bytes(corpus.validation)] == [b"\0".join(part) for part in parts]
    one = load_data(Text(source="text", path=str(tmp_path / "0.txt")), 0, 256, rules=1)
    assert one.train.size == 72 and bytes(one.train) + bytes(one.validation) == b"0 " * 40


def test_the_fraction_is_of_the_documents():
    held_out = sum(hold_out([f"chapter {number}" for number in range(5000)], 0.1))
    assert abs(held_out - 500) < 4 * math.sqrt(5000 * 0.1 * 0.9)


def test_two_documents_of_one_name_go_to_different_splits():
    assert hold_out(["a.txt", "a.txt"], 0.1) == [True, False]
    assert hold_out(["a.txt", "a.txt"], 0.99) == [True, False]


def test_documents_stay_whole_and_are_separated(tmp_path):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(name * 3)
    corpus = text(tmp_path, validation_fraction=0.5)
    train, validation = (bytes(side).split(b"\0") for side in (corpus.train, corpus.validation))
    assert sorted(train + validation) == [name.encode() * 3 for name in "abcdef"]
    assert len(train) == 3 and corpus.num_documents == 6 and corpus.num_bytes == 18


@pytest.mark.parametrize("length", [10, 99, 1003])
def test_a_single_document_is_cut_by_position(tmp_path, length):
    content = bytes(range(1, 101)) * 11
    (tmp_path / "a.txt").write_bytes(content[:length].replace(b"\x80", b"?"))
    corpus = text(tmp_path / "a.txt")
    assert corpus.train.size == int(0.9 * length)
    assert bytes(corpus.train) + bytes(corpus.validation) == content[:length]


def test_a_token_beyond_the_vocabulary_is_reported_with_its_file_and_offset(tmp_path):
    (tmp_path / "a.txt").write_text("caf\u00e9")
    with pytest.raises(
        DataError, match=r"a\.txt: token 195 at offset 3 is not below model\.vocab=128.*model\.vocab=196"
    ):
        load_data(Text(source="text", path=str(tmp_path)), seed=0, vocab_size=128)


def test_the_fingerprint_depends_on_the_content_and_on_the_split(tmp_path):
    (tmp_path / "a.txt").write_text("to be or not to be")
    (tmp_path / "b.txt").write_text("to be or not to be")
    one, same = text(tmp_path / "a.txt"), text(tmp_path / "b.txt")
    assert one.fingerprint == same.fingerprint and len(one.fingerprint) == 64
    assert text(tmp_path / "a.txt", validation_fraction=0.5).fingerprint != one.fingerprint
    (tmp_path / "b.txt").write_text("to be or not to bE")
    assert text(tmp_path / "b.txt").fingerprint != one.fingerprint


def test_the_description_has_the_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 20_000)
    line = text(tmp_path / "a.txt").describe()
    assert "1 document, 0.02 MB, 18,000 training tokens, 2,000 validation tokens, sha256 " in line and "\n" not in line


def test_the_standard_library_is_megabytes_in_both_splits_and_reproducible():
    data = PythonStdlib(source="python-stdlib")
    corpus = load_data(data, seed=0, vocab_size=256)
    assert corpus.train.dtype == np.uint8 and corpus.train.size > 4e6 and corpus.validation.size > 4e5
    assert load_data(data, seed=1, vocab_size=256).fingerprint == corpus.fingerprint


@pytest.mark.parametrize(("branching", "vocab"), [(1, 7), (2, 64), (4, 256), (4, 50), (8, 8)])
def test_the_chain_has_the_stated_entropy(branching, vocab):
    data = Synthetic(source="synthetic", branching=branching)
    corpus = load_data(data, seed=3, vocab_size=vocab)
    pairs = np.zeros((vocab, vocab))
    np.add.at(pairs, (corpus.train[:-1].astype(int), corpus.train[1:].astype(int)), 1)
    assert (np.count_nonzero(pairs, axis=1) == branching).all()
    assert (np.count_nonzero(pairs, axis=0) == branching).all()
    conditional = pairs / pairs.sum(axis=1, keepdims=True)
    entropy = -(pairs[pairs > 0] * np.log(conditional[pairs > 0])).sum() / pairs.sum()
    # The plug-in estimate falls short by about vocab * (branching - 1) / 2n = 4e-4 nat at most.
    assert entropy == pytest.approx(data.entropy, abs=1e-3)


def test_validation_tokens_follow_the_same_chain():
    corpus = load_data(Synthetic(source="synthetic", branching=3), seed=0, vocab_size=100)
    seen = set(zip(corpus.train[:-1].tolist(), corpus.train[1:].tolist(), strict=True))
    assert len(seen) == 300
    assert set(zip(corpus.validation[:-1].tolist(), corpus.validation[1:].tolist(), strict=True)) <= seen


def test_a_chain_depends_on_its_seed_alone():
    data = Synthetic(source="synthetic")
    first, again, other = (load_data(data, seed=seed, vocab_size=1000) for seed in (0, 0, 1))
    assert first.train.dtype == np.uint16 and first.train.size == 2**20 and first.validation.size == 2**16
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert "Markov chain of 1.3863 nat per token" in first.describe()


def test_a_chain_cannot_have_more_branches_than_tokens():
    with pytest.raises(ConfigError, match=r"data\.branching=9.*model\.vocab=8.*Use data\.branching=4"):
        load_data(Synthetic(source="synthetic", branching=9), seed=0, vocab_size=8)
