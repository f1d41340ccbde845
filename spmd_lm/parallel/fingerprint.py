"""A fingerprint of an array's bits: equal on every mesh, and different if the array is damaged.

Each 32-bit word is mixed with its position by invertible steps, those of MurmurHash3's finalizer, so a change of one
word always changes the first sum.  One in 2^64 changes of several words goes unnoticed."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_lm.parallel.array_parts import Bounds
from spmd_lm.parallel.host_memory import DEVICE, PINNED, moved
from spmd_lm.parallel.trees import Tree, leaves_by_path

GOLDEN, MURMUR_1, MURMUR_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def words(x: jax.Array) -> jax.Array:
    """The bits of `x` as uint32; a 64-bit number is two words, along a last dimension."""
    match x.dtype.itemsize:
        case 1:
            return x.astype(jnp.uint8).astype(jnp.uint32) if x.dtype == bool else _bits(x, jnp.uint8)
        case 2:
            return _bits(x, jnp.uint16)
        case _:
            return lax.bitcast_convert_type(x, jnp.uint32)


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype).astype(jnp.uint32)


def positions(shape: tuple[int, ...]) -> jax.Array:
    """Row-major index of each element, modulo 2^32; one iota per dimension, so that sharding divides it."""
    index = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        below = math.prod(shape[dim + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(below)
    return index


def fingerprint(x: jax.Array) -> jax.Array:
    """uint32 [2]."""
    return measure(x)[0]


@jax.jit
def measure(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The fingerprint of `x`, and True if all its numbers are finite.  One reduction for all three: for each alone,
    XLA's CPU compiler takes as long, or longer."""
    word = words(x)
    position = positions(word.shape)
    mixed = (word ^ (position * jnp.uint32(GOLDEN))) * jnp.uint32(MURMUR_1)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(MURMUR_2)
    mixed ^= mixed >> 16
    finite = jnp.isfinite(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.ones(x.shape, bool)
    finite = jnp.broadcast_to(finite.reshape(x.shape + (1,) * (word.ndim - x.ndim)), word.shape)

    def add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return a[0] + b[0], a[1] + b[1], a[2] & b[2]

    zero, operands = jnp.uint32(0), (mixed, mixed * (position | 1), finite)
    total, weighted, all_finite = lax.reduce(operands, (zero, zero, jnp.bool_(True)), add, tuple(range(word.ndim)))
    return jnp.stack([total, weighted]), all_finite


def fingerprints(tree: Tree) -> tuple[dict[str, str], bool]:
    """Fingerprints of all leaves, 16 hexadecimal digits by path; and True if all numbers are finite.  One pass over the
    arrays, on their devices; arrays in host memory come to the devices one at a time.  Every process gets the same
    result."""
    measured = jax.device_get({path: _measure_anywhere(leaf) for path, leaf in leaves_by_path(tree).items()})
    prints = {path: "".join(f"{int(number):08x}" for number in mixed) for path, (mixed, _) in measured.items()}
    return prints, all(finite for _, finite in measured.values())


def _measure_anywhere(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return measure(x) if x.sharding.memory_kind != PINNED else jax.block_until_ready(measure(moved(x, DEVICE)))


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """An array of a state that rests in files, which are not changed.
    parts: those of this process, in the files.
    sharding: of the array, once it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    parts: dict[Bounds, "Sums"]
    files: tuple[Path, ...]


CHUNK = 2**16  # words, so that a pass over them stays in a core's cache


class Sums(NamedTuple):
    """The fingerprint of a part of an array: those of all parts add up to the array's.  finite: True if all numbers of
    the part are."""

    plain: int
    weighted: int
    finite: bool

    def __add__(self, other: "Sums") -> "Sums":  # type: ignore[override]
        return Sums(
            (self.plain + other.plain) % 2**32, (self.weighted + other.weighted) % 2**32, self.finite & other.finite
        )

    def __str__(self) -> str:
        return f"{self.plain:08x}{self.weighted:08x}"


def sums_of_part(part: np.ndarray, bounds: Bounds, shape: tuple[int, ...]) -> Sums:
    """Sums of a part, on the host.  bounds: the part's, in an array of this shape."""
    width = max(1, part.dtype.itemsize // 4)  # words of a number
    unsigned = np.dtype(f"uint{8 * min(4, part.dtype.itemsize)}")
    rows = np.ascontiguousarray(part).view(unsigned).reshape(-1, part.shape[-1] * width)
    first = np.zeros((1,) * (part.ndim - 1), np.uint32)  # position of each row's first word
    for dim, (start, stop) in enumerate(bounds[:-1]):
        below = np.uint32(math.prod(shape[dim + 1 :]) * width % 2**32)
        of_dim = np.arange(start, stop, dtype=np.uint32) * below
        first = first + of_dim.reshape(-1, *(1,) * (part.ndim - 2 - dim))
    first, column = first.reshape(-1, 1), np.arange(rows.shape[1], dtype=np.uint32) + np.uint32(bounds[-1][0] * width)
    plain = weighted = 0
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for row in range(0, len(rows), step):
        position = first[row : row + step] + column
        mixed = position * np.uint32(GOLDEN)
        mixed ^= rows[row : row + step]
        mixed *= np.uint32(MURMUR_1)
        mixed ^= mixed >> np.uint32(13)
        mixed *= np.uint32(MURMUR_2)
        mixed ^= mixed >> np.uint32(16)
        plain += int(mixed.sum(dtype=np.uint32))
        position |= np.uint32(1)
        weighted += int(np.einsum("ij,ij->", mixed, position))  # faster than np.dot, which does not vectorize integers
    return Sums(plain % 2**32, weighted % 2**32, bool(np.isfinite(part).all()))
