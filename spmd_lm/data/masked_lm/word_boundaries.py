"""Where words and sentences begin, told by token ids alone: nothing is stored beside the tokens of a corpus.

A word is a run of letters, digits and underscores, all beyond ASCII among them, or a run of other signs; white space
before it belongs to it.  Where a vocabulary marks its pieces (BERT's '##'), a word is what the marks say."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

# What a token is at one of its ends.  The first three are of text as bytes, the next two of marked pieces.
SPACE, LETTER, SIGN, WHOLE, PIECE, SPECIAL = range(6)


def _table() -> np.ndarray:
    """[last of the token before, first of this one]: whether this one begins a word."""
    begins = ~np.eye(6, dtype=bool)
    begins[SPACE] = False
    begins[:, WHOLE], begins[:, PIECE] = True, False
    begins[SPECIAL], begins[:, SPECIAL] = True, True
    return begins


BEGINS = _table()
KIND_OF_BYTE = np.array(
    [
        SPACE if (c := bytes([b])).isspace() else LETTER if c.isalnum() or b >= 128 or c == b"_" else SIGN
        for b in range(256)
    ],
    np.uint8,
)


@dataclasses.dataclass(frozen=True)
class Special:
    """The ids that rows of masked text are made with; no text has them."""

    cls: int
    sep: int
    mask: int
    pad: int


@dataclasses.dataclass(frozen=True)
class Words:
    """Tables over token ids."""

    first: np.ndarray  # uint8 [V]: what a token begins as
    last: np.ndarray  # uint8 [V]: what it ends as
    stops: np.ndarray  # bool [V]: it ends with . ! or ?
    lines: np.ndarray  # bool [V]: it begins with the end of a line

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """Ids that are text, int32."""
        return np.flatnonzero(self.first != SPECIAL).astype(np.int32)

    def begins(self, ids: np.ndarray) -> np.ndarray:
        """bool like ids [..., N]: which tokens begin a word; the first of each row is taken to."""
        starts = np.ones(ids.shape, bool)
        starts[..., 1:] = BEGINS[self.last[ids[..., :-1]], self.first[ids[..., 1:]]]
        return starts

    def sentences(self, ids: np.ndarray) -> np.ndarray:
        """bool like ids [..., N]: which tokens begin a sentence or a line, if they begin a word; by their looks."""
        apart = ~np.isin(self.first, (LETTER, SIGN, PIECE))  # the dot of 3.14 ends nothing
        starts = np.zeros(ids.shape, bool)
        starts[..., 1:] = self.lines[ids[..., 1:]] | (self.stops[ids[..., :-1]] & apart[ids[..., 1:]])
        return starts


def of_bytes(pieces: Sequence[bytes | None]) -> Words:
    """The tables of tokens that are bytes of text; None is a special one."""

    def kind(piece: bytes | None, at: int) -> int:
        return KIND_OF_BYTE[piece[at]] if piece else SPECIAL

    return Words(
        np.array([kind(piece, 0) for piece in pieces], np.uint8),
        np.array([kind(piece, -1) for piece in pieces], np.uint8),
        *_punctuation(pieces),
    )


def of_pieces(pieces: Sequence[str | None], whole: Sequence[bool]) -> Words:
    """The tables of tokens that say whether they begin a word; None is a special one."""
    kinds = [SPECIAL if piece is None else WHOLE if new else PIECE for piece, new in zip(pieces, whole, strict=True)]
    table = np.array(kinds, np.uint8)
    return Words(table, table, *_punctuation([None if piece is None else piece.encode() for piece in pieces]))


def _punctuation(pieces: Sequence[bytes | None]) -> tuple[np.ndarray, np.ndarray]:
    text = [piece or b"" for piece in pieces]
    stops = np.array([piece.endswith((b".", b"!", b"?")) for piece in text], bool)
    return stops, np.array([piece.startswith((b"\n", b"\r")) for piece in text], bool)
