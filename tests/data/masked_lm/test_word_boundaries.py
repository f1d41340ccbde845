import numpy as np
import pytest

from spmd_lm.data.masked_lm.word_boundaries import SPECIAL, WordBoundaries
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer

SPECIALS, WORDS = ByteTokenizer().special_tokens_and_words()


def split(text: str) -> list[str]:
    """Words of a text, as bytes have them."""
    ids = ByteTokenizer().encode(text)
    starts = np.flatnonzero(WORDS.word_starts(ids))
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


def test_a_special_token_is_a_word_of_its_own():
    ids = np.array([65, 66, 0, 67, 258, 68, 32, 0])
    assert WORDS.word_starts(ids).tolist() == [True, False, True, True, True, True, True, True]


def test_rows_are_independent_and_their_first_token_begins_a_word():
    ids = np.frombuffer(b"abcd efgh ", np.uint8).reshape(2, 5)
    assert WORDS.word_starts(ids).tolist() == [[True, False, False, False, True]] * 2


def test_sentences_begin_after_a_full_stop_or_at_a_line_break():
    text = "One. Two 3.14 is x.y! Yes\nline\n\nnext"
    ids = ByteTokenizer().encode(text)
    starts = np.flatnonzero(WORDS.word_starts(ids) & WORDS.sentence_starts(ids))
    assert [text[at:] for at in starts] == [
        " Two 3.14 is x.y! Yes\nline\n\nnext",
        " Yes\nline\n\nnext",
        "\nline\n\nnext",
        "\n\nnext",
    ]


def test_marked_continuations_never_begin_a_word():
    words = WordBoundaries.from_marked([None, "un", "##want", "."], [False, True, False, True])
    ids = np.array([0, 1, 2, 2, 3, 1])
    assert words.word_starts(ids).tolist() == [True, True, False, False, True, True]
    assert words.sentence_starts(ids).tolist() == [False] * 5 + [True]


def test_text_ids_are_all_but_the_special_ones():
    assert WORDS.text_ids.tolist() == [*range(1, 256)] and WORDS.first_kind_V[0] == SPECIAL
    assert sorted([SPECIALS.cls, SPECIALS.sep, SPECIALS.mask, SPECIALS.pad]) == [256, 257, 258, 259]
