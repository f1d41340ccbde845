"""Starts of words and sentences, from token ids alone: a corpus stores nothing but its tokens.

A word is a run of letters, digits and underscores (every byte beyond ASCII counts as a letter), or a run of other
signs; white space before it belongs to it.  In a vocabulary that marks continuations (BERT's '##') or beginnings
(SentencePiece's U+2581), the marks define words.

Shape suffixes: V vocabulary, N tokens."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# Kinds of a token's two ends.  The first three are for tokens that are bytes of text, the next two for marked tokens.
SPACE, LETTER, SIGN, WORD_START, CONTINUATION, SPECIAL = range(6)


# bool [6, 6]: True if a token begins a word, by the last kind of the token before it and its own first kind.
STARTS_WORD = ~np.eye(6, dtype=bool)
STARTS_WORD[SPACE] = False
STARTS_WORD[:, WORD_START], STARTS_WORD[:, CONTINUATION] = True, False
STARTS_WORD[SPECIAL], STARTS_WORD[:, SPECIAL] = True, True


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids that rows are assembled with; encoded text contains none of them."""

    cls: int
    sep: int
    mask: int
    pad: int


@dataclasses.dataclass(frozen=True)
class WordBoundaries:
    """Tables over token ids that locate starts of words and sentences."""

    first_kind_V: np.ndarray  # uint8: the kind of the token's first character
    last_kind_V: np.ndarray  # uint8: the kind of its last character
    ends_sentence_V: np.ndarray  # bool: the token ends with . ! or ?
    starts_line_V: np.ndarray  # bool: the token begins with a line break

    @classmethod
    def from_bytes(cls, tokens: Sequence[bytes | None]) -> "WordBoundaries":
        """Tables for tokens that are bytes of text; None is a special token."""
        first = [_kind(token[:1]) if token else SPECIAL for token in tokens]
        last = [_kind(token[-1:]) if token else SPECIAL for token in tokens]
        return cls(
            np.array(first, np.uint8),
            np.array(last, np.uint8),
            np.array([token is not None and token.endswith((b".", b"!", b"?")) for token in tokens], bool),
            np.array([token is not None and token.startswith((b"\n", b"\r")) for token in tokens], bool),
        )

    @classmethod
    def from_marked(cls, tokens: Sequence[str | None], starts_word: Sequence[bool]) -> "WordBoundaries":
        """Tables for tokens marked as beginning a word or not; None is a special token."""
        kinds = np.where(starts_word, WORD_START, CONTINUATION).astype(np.uint8)
        kinds[[token is None for token in tokens]] = SPECIAL
        spelled = cls.from_bytes([None if token is None else token.encode() for token in tokens])
        return dataclasses.replace(spelled, first_kind_V=kinds, last_kind_V=kinds)

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """Ids of all but special tokens, int32."""
        return np.flatnonzero(self.first_kind_V != SPECIAL).astype(np.int32)

    def word_starts(self, ids: np.ndarray) -> np.ndarray:
        """Mask of tokens that begin a word, bool like ids [..., N]; each row's first token does."""
        starts = np.ones(ids.shape, bool)
        starts[..., 1:] = STARTS_WORD[self.last_kind_V[ids[..., :-1]], self.first_kind_V[ids[..., 1:]]]
        return starts

    def sentence_starts(self, ids: np.ndarray) -> np.ndarray:
        """Mask of tokens that begin a sentence or a line, by punctuation, if they begin a word; bool like ids
        [..., N]."""
        separate_V = ~np.isin(self.first_kind_V, (LETTER, SIGN, CONTINUATION))  # the dot of 3.14 ends no sentence
        starts = np.zeros(ids.shape, bool)
        after_stop = self.ends_sentence_V[ids[..., :-1]] & separate_V[ids[..., 1:]]
        starts[..., 1:] = self.starts_line_V[ids[..., 1:]] | after_stop
        return starts


def _kind(byte: bytes) -> int:
    if byte.isspace():
        return SPACE
    return LETTER if byte.isalnum() or byte >= b"\x80" or byte == b"_" else SIGN
