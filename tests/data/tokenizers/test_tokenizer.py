import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.config.schema import PythonStdlib, Synthetic
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer, NumberTokenizer, make
from spmd_lm.errors import ConfigError


@given(st.text())
def test_bytes_there_and_back(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint8 and ByteTokenizer().decode(ids) == text


def test_bytes_and_their_text_have_the_same_ids():
    assert ByteTokenizer().encode("é").tolist() == ByteTokenizer().encode(b"\xc3\xa9").tolist() == [0xC3, 0xA9]


@given(st.text())
def test_each_byte_knows_its_character(text):
    ids, offsets = ByteTokenizer().located(text)
    assert ids.tolist() == ByteTokenizer().encode(text).tolist() and offsets.dtype == np.int32
    expected = [(at, at + 1) for at, letter in enumerate(text) for _ in letter.encode()]
    assert offsets.reshape(-1, 2).tolist() == [list(each) for each in expected]


def test_numbers_have_no_characters():
    with pytest.raises(ConfigError, match=r"data\.source=synthetic: a chain has no words\. Use data\.source=python"):
        NumberTokenizer().located("1 2")


def test_what_is_not_text_is_shown_and_does_not_raise():
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"  # half a character
    assert ByteTokenizer().decode(np.array([65, 300], np.int32)) == "A\ufffd"  # an id of the padded vocabulary


def test_a_prompt_keeps_the_bytes_that_were_typed():
    assert ByteTokenizer().encode(b"\xff".decode("utf-8", "surrogateescape")).tolist() == [0xFF]


def test_numbers_there_and_back():
    assert NumberTokenizer().decode(NumberTokenizer().encode("3 0 70000")) == "3 0 70000"


def test_the_source_decides():
    assert isinstance(make(PythonStdlib(source="python-stdlib")), ByteTokenizer)
    assert isinstance(make(Synthetic(source="synthetic")), NumberTokenizer)
