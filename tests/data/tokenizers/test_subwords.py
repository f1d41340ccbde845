"""Vocabulary files: small ones made here, and published ones where SPMD_LM_DATA has them."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.config.data_sections import PythonStdlib, Text
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data
from spmd_lm.data.masked_lm.rows import MaskedLMLoader
from spmd_lm.data.token_array import TokensInMemory
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer, SubwordTokenizer, make_tokenizer
from spmd_lm.data.tokenizers.vocabulary import bytes_to_unicode
from spmd_lm.errors import ConfigError, DataError
from tests.published import published

TINY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "want",
    "##want",
    "##ed",
    "wa",
    "un",
    "runn",
    "##ing",
    ",",
    ".",
    "a",
]


def wordpiece(root: Path, *pieces: str, **config: object) -> Path:
    (root / "vocab.txt").write_text("\n".join(pieces or TINY) + "\n", "utf-8")
    if config:
        (root / "tokenizer_config.json").write_text(json.dumps(config))
    return root / "vocab.txt"


def byte_level(
    root: Path, more: tuple[str, ...] = ("<|endoftext|>",), merges: tuple[str, ...] = ("Ġ a", "b c")
) -> Path:
    made = ["".join(merge.split()) for merge in merges]
    ids = {piece: number for number, piece in enumerate([*bytes_to_unicode(), *made, *more])}
    (root / "vocab.json").write_text(json.dumps(ids))
    (root / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return root / "vocab.json"


def test_wordpiece(tmp_path):
    tokenizer = SubwordTokenizer(str(wordpiece(tmp_path)))
    ids = tokenizer.encode("UNwantéd, running [MASK]. xyz")
    pieces = ["un", "##want", "##ed", ",", "runn", "##ing", "[UNK]", "[UNK]", "[UNK]", ".", "[UNK]"]
    assert [TINY[number] for number in ids] == pieces, "[MASK] in a text is plain text"
    assert ids.dtype == np.uint8 and tokenizer.vocab_size == len(TINY) and tokenizer.eos_token_id == TINY.index("[SEP]")
    assert tokenizer.decode(ids[:6]) == "unwanted, running"
    assert tokenizer.decode([*ids[:3], 4000]) == "unwanted"


def test_tokenizer_config_sets_the_case(tmp_path):
    tokenizer = SubwordTokenizer(str(wordpiece(tmp_path, do_lower_case=False)))
    assert [TINY[number] for number in tokenizer.encode("un Un")] == ["un", "[UNK]"]


def test_tokens_added_to_a_byte_level_vocabulary_are_spelled_as_they_are(tmp_path):
    """Other tokens are spelled with a letter per byte."""
    library = SubwordTokenizer(str(byte_level(tmp_path, ("<s>", "</s>", "<mask>", "<pad>")))).backend
    library.add_tokens(["two words", "\u00e9t\u00e9"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = SubwordTokenizer(str(tmp_path))
    ids = tokenizer.encode("a two words")
    assert ids[-1] == tokenizer.token_to_id["two words"]
    _, words = tokenizer.special_tokens_and_words()
    assert {tokenizer.token_to_id["two words"], tokenizer.token_to_id["\u00e9t\u00e9"]} <= set(words.text_ids.tolist())
    assert words.word_starts(np.array([ids])).tolist() == [[True, True, False]], "white space begins a word"


@pytest.mark.parametrize("piece", ["two words", "\u65e5\u672c", "\u0120\u65e5", "\u200b", "a\n"])
def test_a_token_with_a_letter_of_no_byte_is_spelled_as_the_library_decodes_it(tmp_path, piece):
    tokenizer = SubwordTokenizer(str(byte_level(tmp_path, ("<s>", "</s>", "<mask>", "<pad>", piece))))
    token_id = tokenizer.token_to_id[piece]
    assert tokenizer.bytes_per_token[token_id] == len(tokenizer.decode([token_id]).encode())
    tokenizer.special_tokens_and_words()


def test_word_boundaries_agree_with_the_library(tmp_path):
    tokenizer = SubwordTokenizer(str(wordpiece(tmp_path)))
    special, words = tokenizer.special_tokens_and_words()
    assert (special.pad, special.cls, special.sep, special.mask) == (0, 2, 3, 4)
    assert not {0, 1, 2, 3, 4} & {*words.text_ids.tolist()} and len(words.text_ids) == len(TINY) - 5
    assert_words_of_the_library(tokenizer, "unwanted running, a wanted. unwanteding")


def assert_words_of_the_library(tokenizer, text: str) -> None:
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    expected = [True, *(a != b for a, b in pairwise(encoding.word_ids))]
    _, words = tokenizer.special_tokens_and_words()
    assert words.word_starts(np.array(encoding.ids)).tolist() == expected


@given(st.text())
def test_byte_level_round_trip(tmp_path_factory, text):
    tokenizer = SubwordTokenizer(str(byte_level(tmp_path_factory.getbasetemp())))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and ids.dtype == np.uint16
    assert tokenizer.encode(text.encode()).tolist() == ids.tolist()


def test_wordpiece_offsets(tmp_path):
    text = "  UNwantéd, ru\u0301nning\u200b."
    tokenizer = SubwordTokenizer(str(wordpiece(tmp_path)))
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids.tolist() == tokenizer.encode(text).tolist() and ids.dtype == np.uint8
    assert [text[a:b] for a, b in offsets] == ["UN", "want", "éd", ",", "ru\u0301nn", "ing", "."]
    assert tokenizer.encode_with_offsets("")[1].shape == (0, 2)


@given(st.text(" abcé→😀"))
def test_byte_level_offsets(tmp_path_factory, text):
    tokenizer = SubwordTokenizer(str(byte_level(tmp_path_factory.getbasetemp())))
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids.tolist() == tokenizer.encode(text).tolist()
    for number, (first, stop) in zip(ids, offsets, strict=True):
        assert tokenizer.decode([number]).strip("\ufffd") in text[first:stop]
    assert {at for first, stop in offsets for at in range(first, stop)} == {*range(len(text))}


def test_byte_level_word_boundaries(tmp_path):
    tokenizer = SubwordTokenizer(str(byte_level(tmp_path, ("<|endoftext|>", "<s>", "</s>", "<mask>", "<pad>"))))
    special, words = tokenizer.special_tokens_and_words()
    assert special.mask == tokenizer.vocab_size - 2 and tokenizer.eos_token_id == 258
    ids = tokenizer.encode(" abc a  bc.\nx")  # Ġa bc Ġa Ġ Ġ bc . Ċ x
    assert words.word_starts(ids).tolist() == [True, False, True, True, False, False, True, True, False]
    assert words.sentence_starts(ids).tolist() == [False] * 7 + [True, False]
    assert tokenizer.decode([257, 5000, 257]) == "bcbc"


def test_a_prompt_that_is_not_utf8(tmp_path):
    tokenizer = SubwordTokenizer(str(byte_level(tmp_path)))
    assert tokenizer.decode(tokenizer.encode(b"a\xff".decode("utf-8", "surrogateescape"))) == "a\ufffd"


@pytest.mark.parametrize("half", ["\ud800", "\udbff", "\udc00", "\udc7f", "\udd00", "\udfff", "\ude00\ud83d"])
def test_half_of_a_surrogate_pair_is_a_missing_character(tmp_path, half):
    """JSON and YAML may have it."""
    for tokenizer in (ByteTokenizer(), SubwordTokenizer(str(byte_level(tmp_path)))):
        assert tokenizer.decode(tokenizer.encode(f"a{half}b")) == "a" + "\ufffd" * len(half) + "b"


def test_a_tokenizer_json_and_a_directory(tmp_path):
    first = SubwordTokenizer(str(wordpiece(tmp_path)))
    first.backend.enable_truncation(2)
    first.backend.enable_padding(length=9)
    first.backend.save(str(tmp_path / "any.json"))
    ids = first.backend.encode("unwanted", add_special_tokens=False).ids
    assert len(ids) == 9, "as the file says; a corpus is neither truncated nor padded"
    assert (
        SubwordTokenizer(str(tmp_path / "any.json")).encode("unwanted").tolist()
        == SubwordTokenizer(str(tmp_path)).encode("unwanted").tolist()
    )
    byte_level(tmp_path)
    assert SubwordTokenizer(str(tmp_path)).vocab_size == len(TINY), "vocab.txt comes before vocab.json"
    (tmp_path / "any.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "vocab.txt").unlink()
    assert SubwordTokenizer(str(tmp_path)).vocab_size == len(TINY)


def test_masked_rows_of_wordpieces(tmp_path):
    tokenizer = SubwordTokenizer(str(wordpiece(tmp_path)))
    text = ("unwanted running, a wanted. " * 200).encode()
    config = RunConfig.model_validate(
        {
            "model": {"kind": "bert", "layers": 1, "width": 8, "heads": 1, "context": 64, "vocab": len(TINY)},
            "objective": {"kind": "masked_lm"},
            "data": {"source": "python-stdlib"},
            "optim": {"lr": 0.1},
            "train": {"steps": 1, "batch": 16},
        }
    )
    tokens = TokensInMemory(tokenizer.encode(text), tokenizer.eos_token_id)
    rows = MaskedLMLoader(tokens, tokenizer, config, "training").rows(0, 0, 16)
    special, words = tokenizer.special_tokens_and_words()
    assert (rows.targets[:, 0] == special.cls).all() and (rows.label_weights == 1).all()
    inside = ~words.word_starts(rows.targets)[:, 1:]
    assert (rows.loss_weights[:, 1:] == rows.loss_weights[:, :-1])[inside].all() and inside.sum() > 200


# --- errors -----------------------------------------------------------------------------------------------------------


def refused(name: object) -> str:
    with pytest.raises(DataError) as error:
        make_tokenizer(PythonStdlib(source="python-stdlib", tokenizer=str(name)))
    assert error.value.code == 4
    return str(error.value)


def test_missing_files(tmp_path):
    message = refused(tmp_path / "vocab.txt")
    assert message.startswith(f"data.tokenizer={tmp_path}/vocab.txt: no such file") and "or `bytes`" in message
    assert "this directory has no tokenizer.json, vocab.txt, vocab.json" in refused(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0, "<unk>": 1}')
    assert f"{tmp_path}/merges.txt: no such file" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"[UNK]\na\n[UNK]\n", "line 3: '[UNK]' is on line 1 already"),
        ("vocab.txt", b"[UNK]\n\na\n", "line 2: is empty"),
        ("vocab.txt", b"a\nb\n", "there is no [UNK] among its 2 lines"),
        ("vocab.txt", b"[UNK]\n\xff\n", "byte 6 is not UTF-8"),
        ("tokenizer.json", b"{", "not JSON: "),
        ("tokenizer.json", b"[1]", "expected a JSON object, got a list"),
        ("tokenizer.json", b'{"model": {"type": "?"}}', "cannot read this tokenizer.json"),
        ("vocab.json", b'{"a": "b"}', "neither a tokenizer.json, which has a `model`, nor tokens with their ids"),
        ("vocab.json", b'{"a": 0, "b": 0}', "2 tokens share 1 ids"),
        ("vocab.json", b'{"a": 0}', "255 of the 256 bytes have no token, the first"),
    ],
)
def test_malformed_vocabularies(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert f"{tmp_path}/{name}: " in (said := refused(tmp_path)) and message in said


def test_merges_of_another_vocabulary(tmp_path):
    byte_level(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nb c\nx y\n")
    assert f"{tmp_path}/merges.txt: 'x y' is not a pair of tokens of vocab.json that merge" in refused(tmp_path)


def test_a_vocabulary_larger_than_the_model(tmp_path):
    name = str(wordpiece(tmp_path))
    with pytest.raises(
        ConfigError, match=rf"model\.vocab=10 is less than the 15 tokens of data\.tokenizer={name}"
    ) as error:
        load_data(PythonStdlib(source="python-stdlib", tokenizer=name), seed=0, vocab_size=10)
    assert error.value.code == 2 and str(error.value).endswith("Use model.vocab=15 or more.")


def test_masked_text_needs_the_special_tokens(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*: it has no \[MASK\]\. Use data\.tokenizer=bytes"):
        SubwordTokenizer(
            str(wordpiece(tmp_path, *(piece for piece in TINY if piece != "[MASK]")))
        ).special_tokens_and_words()
    with pytest.raises(ConfigError, match=r"has no \[CLS\], \[SEP\], \[MASK\], \[PAD\]\."):
        SubwordTokenizer(str(byte_level(tmp_path))).special_tokens_and_words()


def test_tokens_that_do_not_show_where_words_begin(tmp_path):
    pieces = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]", "a"]
    plan = {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {p: n for n, p in enumerate(pieces)}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match=r"its WordLevel tokens do not show where words begin\. Use data\.tokenizer="):
        SubwordTokenizer(str(tmp_path)).special_tokens_and_words()


# --- corpora ----------------------------------------------------------------------------------------------------------


def test_documents_are_separated_if_there_is_a_separator(tmp_path):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text("a unwanted" if name != "c" else "  \n")
    (tmp_path / "of").mkdir()
    data = {"source": "text", "path": str(tmp_path / "?.txt"), "validation_fraction": 0.43}
    corpus = load_data(Text(**data, tokenizer=str(wordpiece(tmp_path / "of"))), 0, 100)
    document, end = [TINY.index(piece) for piece in ("a", "un", "##want", "##ed")], TINY.index("[SEP]")
    both = [part.tolist() for part in (corpus.train, corpus.validation)]
    assert [token for part in both for token in part if token != end] == document * 5 and sum(
        map(len, both)
    ) == 5 * 4 + 6 - 2
    wordpiece(tmp_path / "of", *(piece for piece in TINY if piece != "[SEP]"))
    joined = load_data(Text(**data, tokenizer=str(tmp_path / "of")), 0, 100)
    assert sum(map(len, (joined.train, joined.validation))) == 5 * 4


# --- published vocabularies -------------------------------------------------------------------------------------------


def copied(tmp_path: Path, **files: str) -> Path:
    """A directory with published files under the names that vocabularies have."""
    for name, source in files.items():
        shutil.copyfile(published(source), tmp_path / name.replace("_", "."))
    return tmp_path


def golden(key: str) -> dict:
    return json.loads(published("tokenization_golden.json").read_text())[key]


def test_published_ids_of_gpt2(tmp_path):
    tokenizer = SubwordTokenizer(str(copied(tmp_path, vocab_json="gpt2_encoder.json", merges_txt="gpt2_vocab.bpe")))
    vectors = golden("gpt2_bpe")["vectors"]
    assert len(vectors) > 20 and [tokenizer.encode(each["text"]).tolist() for each in vectors] == [
        v["ids"] for v in vectors
    ]
    assert all(tokenizer.decode(each["ids"]) == each["text"] for each in vectors)
    assert tokenizer.vocab_size == 50257 and tokenizer.eos_token_id == 50256 and tokenizer.dtype == np.uint16
    text = published("tinyshakespeare.txt").read_text()
    cut = int(0.9 * len(text))
    counts = golden("corpus_counts")["tinyshakespeare"]
    train, held = tokenizer.encode(text[:cut]), tokenizer.encode(text[cut:])
    assert (len(train), len(held)) == (counts["gpt2_train_tokens"], counts["gpt2_val_tokens"])


def test_published_ids_of_bert(tmp_path):
    tokenizer = SubwordTokenizer(str(copied(tmp_path, vocab_txt="bert_base_uncased_vocab.txt")))
    vectors = golden("bert_wordpiece_uncased")["vectors"]
    special, _ = tokenizer.special_tokens_and_words()
    assert (special.pad, special.cls, special.sep, special.mask) == (0, 101, 102, 103) and tokenizer.vocab_size == 30522
    for each in vectors:
        assert [special.cls, *tokenizer.encode(each["text"]), special.sep] == each["ids"]
    sample = published("bert_sample_text.txt").read_text("utf-8")
    assert len(tokenizer.encode(sample)) == golden("corpus_counts")["bert_sample_text"]["wordpieces"]
    assert_words_of_the_library(tokenizer, sample)


def test_published_cases_of_small_vocabularies(tmp_path):
    for case in golden("bert_tiny_vocab"):
        if "vocab" in case:
            path = wordpiece(tmp_path, *case["vocab"], do_lower_case=case.get("lower", True))
            tokenizer = SubwordTokenizer(str(path))
            assert [case["vocab"][number] for number in tokenizer.encode(case["text"])] == case["tokens"]
    for case in golden("gpt2_tiny_vocab"):
        root = tmp_path / "gpt2"
        root.mkdir()
        (root / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(case["vocab"])}))
        (root / "merges.txt").write_text("#version: 0.2\n" + "\n".join(case["merges"]) + "\n")
        (root / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": case["add_prefix_space"]}))
        assert SubwordTokenizer(str(root)).encode(case["text"]).tolist() == case["ids"]
