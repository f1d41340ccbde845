import numpy as np
import pytest

from spmd_lm.data.masked_lm.word_boundaries import SPECIAL, of_pieces
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer

SPECIALS, WORDS = ByteTokenizer().masking()


def split(text: str) -> list[str]:
    """Words of a text, as bytes have them."""
    ids = ByteTokenizer().encode(text)
    starts = np.flatnonzero(WORDS.begins(ids))
    return [bytes(part).decode() for part in np.split(ids, starts[1:])]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("to be, or", ["to", " be", ",", " or"]),
        ("snake_case42 x2", ["snake_case42", " x2"]),
        ("  if x:\n    y", ["  if", " x", ":", "\n    y"]),
        ("a == b)):\n", ["a", " ==", " b", ")):", "\n"]),
        ("café 力加勝 ok", ["café", " 力加勝", " ok"]),
        ("don't", ["don", "'", "t"]),
    ],
)
def test_words_of_bytes(text, words):
    assert split(text) == words


def test_a_special_token_stands_alone():
    ids = np.array([65, 66, 0, 67, 258, 68, 32, 0])
    assert WORDS.begins(ids).tolist() == [True, False, True, True, True, True, True, True]


def test_rows_are_apart_and_the_first_token_begins_a_word():
    ids = np.frombuffer(b"abcd efgh ", np.uint8).reshape(2, 5)
    assert WORDS.begins(ids).tolist() == [[True, False, False, False, True]] * 2


def test_sentences_begin_after_a_stop_and_lines_where_they_do():
    text = "One. Two 3.14 is x.y! Yes\nline\n\nnext"
    ids = ByteTokenizer().encode(text)
    starts = np.flatnonzero(WORDS.begins(ids) & WORDS.sentences(ids))
    assert [text[at:] for at in starts] == [
        " Two 3.14 is x.y! Yes\nline\n\nnext",
        " Yes\nline\n\nnext",
        "\nline\n\nnext",
        "\n\nnext",
    ]


def test_marked_pieces_go_on_whatever_stands_before():
    words = of_pieces([None, "un", "##want", "."], [False, True, False, True])
    ids = np.array([0, 1, 2, 2, 3, 1])
    assert words.begins(ids).tolist() == [True, True, False, False, True, True]
    assert words.sentences(ids).tolist() == [False] * 5 + [True]


def test_ordinary_ids_are_the_ones_that_text_has():
    assert WORDS.ordinary.tolist() == [*range(1, 256)] and WORDS.first[0] == SPECIAL
    assert sorted([SPECIALS.cls, SPECIALS.sep, SPECIALS.mask, SPECIALS.pad]) == [256, 257, 258, 259]
