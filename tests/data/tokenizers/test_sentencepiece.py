import io
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.config.data_sections import Text
from spmd_lm.data.corpus import load_data
from spmd_lm.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from spmd_lm.data.tokenizers.tokenizer import make_tokenizer
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary
from spmd_lm.errors import ConfigError, DataError

sentencepiece = pytest.importorskip("sentencepiece")
TEXTS = ["the cat sat on the mat", "a hat and a cat, \u00fcn\u00ef", "the end of it. a story"] * 60
BERT = {"pad_piece": "[PAD]", "user_defined_symbols": ["[CLS]", "[SEP]", "[MASK]"]}


def model(kind: str = "unigram", **settings) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=written,
        model_type=kind,
        vocab_size=320,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
        **settings,
    )
    return written.getvalue()


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def saved(request, tmp_path_factory):
    """The package's own reading of a model, and the tokenizer of a directory that has it."""
    directory, content = tmp_path_factory.mktemp(request.param), model(request.param)
    (directory / "tokenizer.model").write_bytes(content)
    package = sentencepiece.SentencePieceProcessor(model_proto=content)
    return package, make_tokenizer(Text(source="text", path="x", tokenizer=str(directory)))


@given(text=st.text())
def test_ids_and_text_are_the_package_s(saved, text):
    package, tokenizer = saved
    ids = tokenizer.encode(text)
    assert ids.tolist() == package.encode(text) and tokenizer.decode(ids) == package.decode(package.encode(text))
    with_offsets, offsets = tokenizer.encode_with_offsets(text)
    assert with_offsets.tolist() == ids.tolist() and offsets.dtype == np.int32
    assert (offsets[:, 0] <= offsets[:, 1]).all() and offsets.max(initial=0) <= len(text)


def test_its_own_symbols_end_documents(saved):
    package, tokenizer = saved
    assert isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.vocab_size == package.vocab_size()
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 1)
    assert 2 not in tokenizer.encode("</s> the cat </s>")


def test_offsets_are_of_characters(saved):
    ids, offsets = saved[1].encode_with_offsets("\u00fc cat")
    assert offsets[-1].tolist()[1] == 5 and len(ids) == len(offsets)


def test_a_run_reads_text_with_it(tmp_path):
    (tmp_path / "spiece.model").write_bytes(model())
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(" ".join(TEXTS))
    data = Text(source="text", path=str(tmp_path / "*.txt"), tokenizer=str(tmp_path / "spiece.model"))
    corpus = load_data(data, 0, 400)
    assert (
        corpus.train.size and (corpus.train == 2).sum() == 5 - 1
    )  # between the documents, of which the end of one is held out
    with pytest.raises(ConfigError, match=r"model.vocab=9 is less than"):
        load_data(data, 0, 9)
    copy_vocabulary(data.tokenizer, tmp_path / "copy")
    again = SentencePieceTokenizer(str(tmp_path / "copy"))
    assert again.encode("the cat").tolist() == corpus.tokenizer.encode("the cat").tolist()


def test_words_begin_at_its_marks(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model(**BERT))
    tokenizer = SentencePieceTokenizer(str(tmp_path))
    special, words = tokenizer.special_tokens_and_words()
    assert special.mask == tokenizer.token_to_id["[MASK]"]
    ids = tokenizer.encode("the cat sat")
    assert words.word_starts(ids[None])[0].sum() == 3
    (tmp_path / "tokenizer.model").write_bytes(model())
    with pytest.raises(ConfigError, match="it has no"):
        SentencePieceTokenizer(str(tmp_path)).special_tokens_and_words()


@pytest.mark.parametrize("content", [b"", b"junk", b"\n\x03abc", model()[:200]])
def test_a_damaged_model_is_told(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer.model: (not a SentencePiece model|it has 0 tokens)"):
        SentencePieceTokenizer(str(tmp_path))


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(model())
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"pip install 'spmd-lm\[sentencepiece\]'"):
        SentencePieceTokenizer(str(tmp_path))
