"""How much of a corpus is held out: near the share that is asked for, whatever the sizes of its documents.

Documents are in an order of their own, by numbers that their contents draw.  The first ones are held out, those whose
number is below the share; so a document stays where it is when others come or go.  Where long documents make that
another share of the text, as many are held out as come near it; and where none do, a part of the next one as well."""

import math

import numpy as np

SHARE_MARGIN = 0.05
"""How far off a share may be, relative to itself and to the share that is left."""


def count_held_out(draws: np.ndarray, sizes: np.ndarray, share: float, others: float = 0.0) -> tuple[int, int]:
    """How many of the first documents are held out, and what size of the next one.

    draws: of each document, ascending, in [0, 1).  sizes: of each.  others: what more is held out, from the other end:
    the two never meet, if the shares leave any for training."""
    ends = np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
    wanted, margin = share * ends[-1], SHARE_MARGIN * min(share, others or 1, 1 - share - others) * ends[-1]
    below = int(np.searchsorted(ends, wanted, "right")) - 1
    nearest = below + int(below < len(sizes) and ends[below + 1] - wanted < wanted - ends[below])
    for count in (int(np.searchsorted(draws, share)), nearest):
        if abs(ends[count] - wanted) <= margin:
            return count, 0
    return below, math.ceil(wanted - ends[below])


def place_to_cut(text: bytes, at: int) -> int:
    """The start of the line that the byte at this place is in, if that makes no other share; else of its character."""
    nearest = at - int(SHARE_MARGIN * min(at, len(text) - at))
    if line := text.rfind(b"\n", max(nearest, 0), at) + 1:
        return line
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 0)
