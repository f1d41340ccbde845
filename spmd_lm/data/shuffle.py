"""Stateless random numbers and permutations: pure functions of a key, with no generator state and no table.

Finding element i of an epoch takes O(1): a run seeks to any step at once, and each process computes its own rows.  The
arithmetic is our own, because numpy may change its generators' streams between versions, and a resumed run must see the
same numbers."""

import functools

import numpy as np
from numpy.typing import ArrayLike

# Two pairs of rounds suffice for wide halves (Luby and Rackoff, 1988); ours are a few bits wide.
ROUND_PAIRS = 4


@np.errstate(over="ignore")  # arithmetic is modulo 2**64
def fold_in(*values: ArrayLike) -> np.ndarray:
    """A 64-bit key from non-negative integers, or elementwise from arrays of them: chained splitmix64."""
    return functools.reduce(_fold, values, np.asarray(0, np.uint64))


def _fold(key: np.ndarray, value: ArrayLike) -> np.ndarray:
    key = (key ^ np.asarray(value, np.uint64)) + 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    return key ^ (key >> 31)


def uniform(*values: ArrayLike) -> np.ndarray:
    """A float64 in [0, 1), keyed like `fold_in`."""
    return (fold_in(*values) >> 11) * 2.0**-53


def permute(index: ArrayLike, n: int, key: ArrayLike) -> np.ndarray:
    """The image of `index` < n under the permutation of range(n) that `key` selects; elementwise, also over keys.  A
    Feistel network permutes the smallest power of two that holds n.  Values outside range(n) are permuted again until
    inside, less than one more step on average (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002)."""
    index, key = np.broadcast_arrays(np.asarray(index, np.uint64), np.asarray(key, np.uint64))
    bits = (n - 1).bit_length()
    image = np.array(_feistel(index, bits, key))
    while (outside := image >= n).any():
        image[outside] = _feistel(image[outside], bits, key[outside])
    return image.astype(np.int64)


@np.errstate(over="ignore")
def _feistel(x: np.ndarray, bits: int, key: ArrayLike) -> np.ndarray:
    """A permutation of range(2**bits).  The halves may differ by a bit in width, so they alternate and never swap."""
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    high, low = x >> low_bits, x & low_mask
    rounds = np.arange(2 * ROUND_PAIRS).reshape(-1, *(1,) * np.ndim(key))
    keys = iter(fold_in(key, rounds))
    for _ in range(ROUND_PAIRS):
        high = high ^ (_fold(next(keys), low) & high_mask)
        low = low ^ (_fold(next(keys), high) & low_mask)
    return high << low_bits | low
