"""Ids are those of the tokenizer, documents whole and in order, splits of each text's own, shards as full as can be."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from spmd_lm.data.token_files.shard import open_shard
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer
from spmd_lm.data.tokenizers.vocabulary import vocabulary_hash
from spmd_lm.errors import DataError
from spmd_lm.prepare import chunks, tokens
from spmd_lm.prepare.schema import SplitShares
from spmd_lm.prepare.splits import SPLITS, Bound, Splits, choose_splits
from tests.prepare.corpora import id_arrays, make, sentence, step, texts, write_lines
from tests.published import published

TEXTS = [sentence(seed, 20 + seed % 60) for seed in range(300)]


@pytest.fixture
def source(tmp_path):
    return write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])


def test_ids_are_those_of_the_vocabulary(tmp_path, source, monkeypatch):
    monkeypatch.setattr(tokens, "BATCH_BYTES", 1000)
    vocabulary = published("bert_base_uncased_vocab.txt")
    copy = tmp_path / "vocab.txt"
    copy.write_bytes(vocabulary.read_bytes())
    report = make(tmp_path / "out", source, tokenizer=str(copy))
    tokenizer = SubwordTokenizer(str(copy))
    expected = [[*tokenizer.encode(text).tolist(), tokenizer.eos_token_id] for text in TEXTS]
    assert [ids.tolist() for ids in id_arrays(tmp_path / "out")] == expected
    assert (tmp_path / "out/tokenizer/vocab.txt").read_bytes() == copy.read_bytes()
    assert report["tokenizer"] == vocabulary_hash(str(copy)) and report["vocab_size"] == 30522
    assert report["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize("chunk_documents", [40, 1000])
def test_shards_are_as_full_as_whole_documents_make_them(chunk_documents, tmp_path, source, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_DOCUMENTS", chunk_documents)
    report = make(tmp_path / "out", source, shard_tokens=1000)
    assert texts(tmp_path / "out") == TEXTS
    names = report["splits"]["train"]["shards"]
    shards = [open_shard(tmp_path / "out" / name) for name in names]
    assert names == [f"train/shard-{i:05}" for i in range(len(names))] and len(names) > 20
    for shard, following in itertools.pairwise(shards):
        assert shard.header.tokens <= 1000 < shard.header.tokens + following.offsets[1]
    counts = report["splits"]["train"]
    assert counts["tokens"] == sum(shard.header.tokens for shard in shards) == sum(len(text) + 1 for text in TEXTS)
    assert counts["documents"] == 300 and counts["text_bytes"] == sum(map(len, TEXTS))


def test_a_document_longer_than_a_shard_has_one_of_its_own(tmp_path):
    given = ["a" * 5, "b" * 100, "c" * 5, "d" * 5]
    report = make(
        tmp_path / "out", write_lines(tmp_path / "b.jsonl", [{"text": text} for text in given]), shard_tokens=12
    )
    sizes = [open_shard(tmp_path / "out" / name).header.tokens for name in report["splits"]["train"]["shards"]]
    assert sizes == [6, 101, 12] and texts(tmp_path / "out") == given


def test_the_split_of_a_text_is_its_own(tmp_path, source):
    """Texts at the bounds are excepted, which make the shares what they are to be."""
    shares = {"validation": 0.1, "test": 0.2}
    make(tmp_path / "out", source, split=shares)
    in_split = {text: split for split in SPLITS for text in texts(tmp_path / "out", split)}
    others = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in [*reversed(TEXTS[::2]), "another"]])
    make(tmp_path / "half", others, split=shares, workers=2)
    found = {text: split for split in SPLITS for text in texts(tmp_path / "half", split)}
    assert sum(in_split.get(text, split) != split for text, split in found.items()) < 20


CORPORA = {
    "one large": [sentence(0, 9000), *(sentence(seed, 9) for seed in range(1, 9))],
    "one alone": ["\N{SNOWMAN} " * 3000],
    "two": [sentence(0, 2000), sentence(1, 2000)],
    "equal sizes": [f"{number:04}" * 99 for number in range(13)],
    "many small": [f"{number}" for number in range(1500)],
    "copies": [sentence(number % 3, 400) for number in range(12)],
}


@pytest.mark.parametrize("case", CORPORA)
def test_shares_of_the_text_are_those_that_are_asked_for(case, tmp_path):
    """Sizes and order of the documents do not matter; what is held out ends or begins within one at most."""
    given, shares = CORPORA[case], {"validation": 0.02, "test": 0.3}
    reports = []
    for name, order in {"forth": given, "back": given[::-1]}.items():
        source = write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in order])
        reports.append(make(tmp_path / name, source, split=shares, steps={"min_tokens": 1}))
    assert [report["warnings"] for report in reports] == [[], []]
    forth, back = ({split: sorted(texts(tmp_path / name, split)) for split in SPLITS} for name in ("forth", "back"))
    assert forth == back and {*forth["train"]}.isdisjoint(forth["validation"] + forth["test"])
    total = sum(len(text.encode()) for text in given)
    for split, share in shares.items():
        assert abs(sum(len(text.encode()) for text in forth[split]) - share * total) <= max(20, 0.05 * share * total)
    if case == "one alone":
        assert "".join(forth["test"] + forth["train"] + forth["validation"]) == given[0]
    assert step(reports[0], "min_tokens")["out"] == len(given)


SIZES = st.one_of(
    st.tuples(st.integers(20_000, 10**8), st.lists(st.integers(1, 300), min_size=1, max_size=30)).map(
        lambda drawn: [drawn[0], *drawn[1]]
    ),
    st.tuples(st.integers(1, 2000), st.integers(1, 40)).map(lambda drawn: [drawn[0]] * drawn[1]),
    st.lists(st.integers(1, 5000), min_size=1, max_size=2),
    st.integers(1, 2500).map(lambda count: [1 + number % 9 for number in range(count)]),
)


@settings(max_examples=200, deadline=None)
@given(
    sizes=SIZES,
    validation=st.one_of(st.just(0.0), st.floats(0.005, 0.5)),
    test=st.one_of(st.just(0.0), st.floats(0.005, 0.49)),
    seed=st.integers(0, 99),
)
def test_shares_are_those_that_are_asked_for_whatever_the_sizes(sizes, validation, test, seed):
    """The error is a twentieth of each and of the training text, and a byte."""
    rng = np.random.default_rng(seed)
    digests, lengths = rng.integers(0, 2**64, len(sizes), dtype=np.uint64), np.array(sizes, np.uint64)
    shares = SplitShares(validation=validation, test=test)
    splits, shuffled = choose_splits(digests, lengths, shares), rng.permutation(len(sizes))
    assert splits == choose_splits(digests[shuffled], lengths[shuffled], shares)
    held_out = {"validation": int(lengths[digests < np.uint64(splits.validation.digest)].sum())}
    held_out["test"] = int(lengths[digests > np.uint64(splits.test.digest)].sum())
    for split, share in {"validation": validation, "test": test}.items():
        wanted, found = share * sum(sizes), held_out[split] + getattr(splits, split).size
        margin = 0.05 * min(x for x in (validation, test, 1 - validation - test) if x) * sum(sizes)
        assert abs(found - wanted) <= max(1, margin) + 1e-6 * sum(sizes) if share else not found
    assert sum(held_out.values()) <= sum(sizes)


@given(st.text(min_size=1, max_size=40), st.integers(0, 99), st.integers(0, 99))
def test_the_parts_of_a_text_are_all_of_it_and_divide_no_character(text, at_end, at_start):
    splits = Splits(Bound(7, at_end), Bound(7, at_start))
    parts = [*splits.divide(3, 7, text.encode("utf-8", "replace"))]
    assert "".join(part.text.decode() for part in parts).encode() == text.encode("utf-8", "replace")
    order = [SPLITS.index(split) for split in ("test", "train", "validation")]
    assert [part.split for part in parts] == [split for split in order if split in {part.split for part in parts}]
    assert [part.split for part in splits.divide(3, 6, b"a")] == [SPLITS.index("validation")]
    assert [part.split for part in splits.divide(3, 8, b"a")] == [SPLITS.index("test")]


def test_another_share_of_the_text_than_was_asked_for_is_told(tmp_path):
    """The text is too short; or documents that are too short are removed."""
    report = make(tmp_path / "little", write_lines(tmp_path / "a.jsonl", [{"text": "one"}]), split={"test": 0.001})
    told = (
        "33.33% of the text is in the split test, not split.test=0.10%. Name more sources, or lower steps.min_tokens."
    )
    assert told in report["warnings"]
    given = [{"text": "a" * 5000}, *({"text": f"{number}"} for number in range(3000))]
    report = make(
        tmp_path / "short", write_lines(tmp_path / "b.jsonl", given), split={"validation": 0.3}, steps={"min_tokens": 9}
    )
    assert any("not split.validation=30.00%" in line for line in report["warnings"])


def test_documents_of_few_tokens_are_counted_by_the_tokenizer(tmp_path):
    given = ["a" * 127, "b" * 128, "é" * 64]
    source = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in given])
    report = make(tmp_path / "out", source, steps={"min_tokens": 128})
    assert texts(tmp_path / "out") == given[1:]
    assert step(report, "min_tokens")["reasons"] == {"fewer than 128 tokens": 1}
    with pytest.raises(DataError, match=r"no document is left of 3: min_tokens removed 3 \(.* Lower steps"):
        make(tmp_path / "none", source, steps={"min_tokens": 1000})


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_tokenizer_is_trained_on_the_training_split_alone(kind, tmp_path):
    """A word that only validation texts have trains no token."""
    given = [sentence(0, 30_000), *(sentence(seed, 50) for seed in range(1, 200))]  # of which the first is divided
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in given])
    make(tmp_path / "bytes", source, split={"validation": 0.3})
    training = texts(tmp_path / "bytes")
    assert (len(training) + len(texts(tmp_path / "bytes", "validation"))) == len(given) + 1
    keys = {"tokenizer": {"train": kind, "vocab_size": 800}}
    report = make(tmp_path / "out", source, **keys, split={"validation": 0.3})
    alone = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in training])
    make(tmp_path / "alone", alone, **keys)
    trained = (tmp_path / "out/tokenizer/tokenizer.json").read_text()
    assert trained == (tmp_path / "alone/tokenizer/tokenizer.json").read_text()
    assert Tokenizer.from_str(trained).get_vocab_size() <= 800 and report["vocab_size"] <= 800
    tokenizer = SubwordTokenizer(str(tmp_path / "out/tokenizer"))
    decoded = tokenizer.decode(id_arrays(tmp_path / "out")[0][:-1])
    assert decoded.strip() == training[0].strip() and tokenizer.eos_token_id == report["eos_token_id"] is not None
    assert json.loads((tmp_path / "out/manifest.json").read_text())["tokenizer"] == vocabulary_hash(
        str(tmp_path / "out/tokenizer")
    )


def test_a_sample_of_the_training_split_is_bounded_and_the_same(tmp_path, source):
    keys = {"train": "bpe", "vocab_size": 400}
    for name, most in [("all", 2**20), ("part", 5000), ("again", 5000)]:
        make(tmp_path / name, source, tokenizer=keys | {"sample_bytes": most})
    files = {name: (tmp_path / name / "tokenizer/tokenizer.json").read_bytes() for name in ("all", "part", "again")}
    assert files["part"] == files["again"] != files["all"]


def test_a_batch_is_encoded_as_its_texts_are(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_bytes(published("bert_base_uncased_vocab.txt").read_bytes())
    tokenizer = SubwordTokenizer(str(vocabulary))
    given = ["", "one [MASK] two", "naïve — test", "x" * 300]
    batch = tokenizer.encode_batch([text.encode() for text in given])
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in given]
    assert all(ids.dtype == tokenizer.dtype for ids in batch)


def vocabulary_of(kind: str, directory: Path) -> SubwordTokenizer:
    if kind == "bert":
        (directory / "vocab.txt").write_bytes(published("bert_base_uncased_vocab.txt").read_bytes())
    elif kind == "gpt2":
        (directory / "vocab.json").write_bytes(published("gpt2_encoder.json").read_bytes())
        (directory / "merges.txt").write_bytes(published("gpt2_vocab.bpe").read_bytes())
    else:
        words = {"<unk>": 0, "\u2581": 1} | {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 2)}
        tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>", fuse_unk=True))
        if kind == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        else:  # as Llama 2's
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.save(str(directory / "tokenizer.json"))
    return SubwordTokenizer(str(directory))


CUTS = {"bert": tokens.KNOWN_CUTS, "gpt2": tokens.KNOWN_CUTS, "metaspace": tokens.LIKELY_CUTS, "llama2": None}


@pytest.mark.parametrize("kind", CUTS)
def test_a_long_document_has_the_ids_of_all_of_it(kind, tmp_path, monkeypatch):
    """Parts are tokenized apart where that gives the same ids, to save memory."""
    tokenizer = vocabulary_of(kind, tmp_path)
    text = published("tinyshakespeare.txt").read_text()[:60_000] + published("wikitext2_test.txt").read_text()[:60_000]
    text = text[:30_000].upper() + text[30_000:]
    monkeypatch.setattr(tokens, "BATCH_BYTES", 1000)
    assert tokens.cuts_of(tokenizer) == CUTS[kind]
    assert len([*tokens.parts_of_document(text.encode(), CUTS[kind] or tokens.LIKELY_CUTS)]) > 100
    source = write_lines(tmp_path / "a.jsonl", [{"text": "short"}, {"text": text}])
    make(tmp_path / "out", source, tokenizer=str(tmp_path))
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    assert id_arrays(tmp_path / "out")[1].tolist() == [*tokenizer.encode(text).tolist(), *eos]


FRAGMENTS = [
    *"'sS1.-。，、！「他们のカ\u0301\u3099é한א1٣\U0001f600",
    "'s",
    "'ll",
    "THE",
    "ſt",
    " a",
    " 他",
    "。\n",
    ", ",
    "Ⅷ½",
]
FRAGMENTS += ["<|endoftext|>", "[SEP]", *"\t\r\xa0\x1c\x85\u2028\u1680", *"  \n\u3000" * 6]  # white space is half of it


@pytest.fixture(scope="module", params=["gpt2", "bert"])
def known(request, tmp_path_factory) -> SubwordTokenizer:
    return vocabulary_of(request.param, tmp_path_factory.mktemp("known"))


@given(text=st.lists(st.sampled_from(FRAGMENTS), min_size=4, max_size=12).map("".join))
@settings(max_examples=500, deadline=None)
def test_ids_of_any_text_are_those_of_its_parts(known, text):
    """The words of the pre-tokenizer are equal too, which any vocabulary would divide further."""
    data = text.encode()
    assert tokens.divides(known, data, tokens.KNOWN_CUTS)
    for found in tokens.KNOWN_CUTS.finditer(data):
        parts = data[: found.end()].decode(), data[found.end() :].decode()
        assert [*words_of(known, parts[0]), *words_of(known, parts[1])] == words_of(known, text)


def words_of(tokenizer: SubwordTokenizer, text: str) -> list[str]:
    normalizer = tokenizer.backend.normalizer
    normal = normalizer.normalize_str(text) if normalizer else text
    return [word for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(normal)]


@pytest.mark.parametrize(
    "text", ["NO SMALL LETTER, " * 3000, "слово за слово " * 2000, "他们说，这是一个测试。" * 2000, "x,\n" * 20_000]
)
def test_text_without_small_letters_is_divided_too(text, monkeypatch):
    monkeypatch.setattr(tokens, "BATCH_BYTES", 1000)
    parts = [*tokens.parts_of_document(text.encode(), tokens.KNOWN_CUTS)]
    assert max(map(len, parts)) < 1100 and b"".join(parts) == text.encode()


def test_a_vocabulary_whose_added_tokens_span_words_does_not_divide(tmp_path):
    tokenizer = vocabulary_of("gpt2", tmp_path)
    assert tokens.cuts_of(tokenizer) and tokenizer.encode("<|endoftext|>").tolist() == [tokenizer.eos_token_id]
    for token in ("two words", AddedToken("<x>", rstrip=True)):
        (tmp_path / "vocab.json").unlink(missing_ok=True)
        tokenizer.backend.add_tokens([token])
        tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
        assert tokens.cuts_of(SubwordTokenizer(str(tmp_path))) is None
