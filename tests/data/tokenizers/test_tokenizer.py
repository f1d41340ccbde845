import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.config.data_sections import PythonStdlib, Synthetic
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer, NumberTokenizer, make_tokenizer
from spmd_lm.errors import ConfigError


@given(st.text())
def test_byte_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint8 and ByteTokenizer().decode(ids) == text


def test_bytes_and_their_text_have_the_same_ids():
    assert ByteTokenizer().encode("é").tolist() == ByteTokenizer().encode(b"\xc3\xa9").tolist() == [0xC3, 0xA9]


@given(st.text())
def test_byte_offsets(text):
    ids, offsets = ByteTokenizer().encode_with_offsets(text)
    assert ids.tolist() == ByteTokenizer().encode(text).tolist() and offsets.dtype == np.int32
    expected = [(at, at + 1) for at, letter in enumerate(text) for _ in letter.encode()]
    assert offsets.reshape(-1, 2).tolist() == [list(each) for each in expected]


def test_numbers_have_no_offsets():
    with pytest.raises(
        ConfigError, match=r"data\.source=synthetic: its tokens form no words\. Use data\.source=python"
    ):
        NumberTokenizer().encode_with_offsets("1 2")


def test_decoding_never_raises():
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"  # half a character
    assert ByteTokenizer().decode(np.array([65, 300], np.int32)) == "A\ufffd"  # an id of the padded vocabulary


def test_a_prompt_keeps_bytes_that_are_not_utf8():
    assert ByteTokenizer().encode(b"\xff".decode("utf-8", "surrogateescape")).tolist() == [0xFF]


def test_number_round_trip():
    assert NumberTokenizer().decode(NumberTokenizer().encode("3 0 70000")) == "3 0 70000"


def test_the_data_source_selects_the_tokenizer():
    assert isinstance(make_tokenizer(PythonStdlib(source="python-stdlib")), ByteTokenizer)
    assert isinstance(make_tokenizer(Synthetic(source="synthetic")), NumberTokenizer)
