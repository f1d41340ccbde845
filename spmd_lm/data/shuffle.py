"""Random numbers and permutations by key, with no state and no table.

Where element i of an epoch lands costs O(1): a run seeks to any step at once, and each process computes its own rows.
Own arithmetic, for numpy's generators may change their streams between versions, and a resumed run may not."""

import numpy as np
from numpy.typing import ArrayLike

# Pairs of rounds.  Two make a strong permutation of wide halves (Luby and Rackoff, 1988); ours are a few bits wide.
ROUNDS = 4


@np.errstate(over="ignore")  # arithmetic is modulo 2**64
def fold(*values: ArrayLike) -> np.ndarray:
    """One 64-bit key of several naturals, or of arrays of them, elementwise: splitmix64, chained."""
    key: np.ndarray = np.asarray(0, np.uint64)
    for value in values:
        key = (key ^ np.asarray(value, np.uint64)) + 0x9E3779B97F4A7C15
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB
        key = key ^ (key >> 31)
    return key


def permute(index: ArrayLike, n: int, key: ArrayLike) -> np.ndarray:
    """Where `index` < n lands in the permutation of range(n) that `key` names; elementwise, keys too.

    A Feistel network permutes the smallest power of two that holds n; what falls outside walks on until it is inside,
    less than one more step on average (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)."""
    image = np.asarray(index, np.uint64)
    outside = np.ones(image.shape, bool)
    while outside.any():
        image = np.where(outside, _feistel(image, (n - 1).bit_length(), key), image)
        outside = image >= n
    return image.astype(np.int64)


def _feistel(x: np.ndarray, bits: int, key: ArrayLike) -> np.ndarray:
    """A permutation of range(2**bits).  Its halves may differ by a bit, so they take turns and never swap."""
    width = bits // 2
    low_mask, high_mask = (1 << width) - 1, (1 << (bits - width)) - 1
    high, low = x >> width, x & low_mask
    for turn in range(ROUNDS):
        high = high ^ (fold(key, 2 * turn, low) & high_mask)
        low = low ^ (fold(key, 2 * turn + 1, high) & low_mask)
    return high << width | low
