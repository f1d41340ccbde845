import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.config.schema import PythonStdlib, Synthetic
from spmd_lm.data.tokenizer import ByteTokenizer, NumberTokenizer, make


@given(st.text())
def test_bytes_there_and_back(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint8 and ByteTokenizer().decode(ids) == text


def test_bytes_and_their_text_have_the_same_ids():
    assert ByteTokenizer().encode("é").tolist() == ByteTokenizer().encode(b"\xc3\xa9").tolist() == [0xC3, 0xA9]


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
