"""The size of a held-out split: near the requested share, whatever the sizes of its documents.

Each document has a number drawn from its contents.  In the order of these numbers, documents below the share are held
out, so a document keeps its split when others come or go.  If long documents make that too much or too little of the
text, the count that comes nearest is taken; failing that, a part of the next document is held out too."""

import math

import numpy as np

SHARE_MARGIN = 0.05  # tolerance of a share, relative to the smallest of all shares, including what is left


def count_held_out(draws: np.ndarray, sizes: np.ndarray, share: float, others: float = 0.0) -> tuple[int, int]:
    """Number of leading documents that are held out, and the size held out of the next one.

    draws: number of each document, ascending, in [0, 1).
    sizes: size of each document.
    others: share held out at the other end; the two never meet if the shares leave any for training."""
    ends = np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
    wanted, margin = share * ends[-1], SHARE_MARGIN * min(share, others or 1, 1 - share - others) * ends[-1]
    below = int(np.searchsorted(ends, wanted, "right")) - 1
    nearest = below + int(below < len(sizes) and ends[below + 1] - wanted < wanted - ends[below])
    for count in (int(np.searchsorted(draws, share)), nearest):
        if abs(ends[count] - wanted) <= margin:
            return count, 0
    return below, math.ceil(wanted - ends[below])


def place_to_cut(text: bytes, at: int) -> int:
    """The start of the line with byte `at`, if the share stays within its margin; else of the character."""
    nearest = at - int(SHARE_MARGIN * min(at, len(text) - at))
    if line := text.rfind(b"\n", max(nearest, 0), at) + 1:
        return line
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return max(at, 0)
