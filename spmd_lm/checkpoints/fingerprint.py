"""A fingerprint of an array's bits: equal on every mesh, and different if the array is damaged.

Each 32-bit word is mixed with its position by invertible steps, those of MurmurHash3's finalizer, so a change of one
word always changes the first sum.  One in 2^64 changes of several words goes unnoticed."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
