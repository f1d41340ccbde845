"""Codes in which ZeRO++ (arXiv:2306.10209) sends matrices: small integers, with a scale for each block of them.

Blocks are BLOCK_SIZE entries along the last dimension, and the last block of a row may be shorter.  ZeRO shards another
dimension, so that no block spans two shards: one shard's codes do not depend on the number of shards."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK_SIZE = 256
SCALE = jnp.bfloat16
LARGEST_CODE = 127


class Coded(NamedTuple):
    """An array in int8.  codes: of x's shape.  absmax: each block's largest magnitude, SCALE [..., blocks]."""

    codes: Array
    absmax: Array


def blocks_in(size: int) -> int:
    """Number of blocks in a row of this size."""
    return -(-size // BLOCK_SIZE)


def encode(x: Array) -> Coded:
    """Rounds each entry to the nearest multiple of its block's absmax / 127.  An entry that is not finite makes its
    whole block NaN, so that a step's guard sees it.

    Encoding what `decode` returns yields the same codes: absmax, rounded to bfloat16, is one of the values."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    absmax = _absmax(x).astype(SCALE)
    scale = _spread(absmax, x)
    codes = jnp.round(x * LARGEST_CODE / jnp.where(scale == 0, 1, scale))
    return Coded(jnp.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8), absmax)


def decode(coded: Coded, dtype: jnp.dtype) -> Array:
    """The array that `encode` rounded."""
    codes = coded.codes.astype(jnp.promote_types(dtype, jnp.float32))
    return (codes * (_spread(coded.absmax, codes) / LARGEST_CODE)).astype(dtype)


def _absmax(x: Array) -> Array:
    """The largest magnitude of each block of x [..., n]: [..., blocks]."""
    n = x.shape[-1]
    blocks, size = blocks_in(n), min(n, BLOCK_SIZE)
    x = jnp.pad(jnp.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, blocks * size - n)])
    return x.reshape(*x.shape[:-1], blocks, size).max(-1)


def _spread(absmax: Array, like: Array) -> Array:
    """absmax [..., blocks], in the shape and dtype of `like` [..., n]: each for the entries of its block.

    On a TPU by a matmul, into which the compiler fuses what reads it: it would write a broadcast in float32, twice, to
    lay it out (tests/planning/test_audit.py sees the memory)."""

    def repeat(absmax: Array) -> Array:
        return jnp.repeat(absmax, BLOCK_SIZE, -1)[..., :n].astype(like.dtype)

    def select(absmax: Array) -> Array:
        block_of = lax.broadcasted_iota(jnp.int32, (blocks, n), 1) // BLOCK_SIZE
        is_in = block_of == lax.broadcasted_iota(jnp.int32, (blocks, n), 0)
        return jnp.einsum("...b,bn->...n", absmax, is_in.astype(SCALE), preferred_element_type=like.dtype)

    n, blocks = like.shape[-1], absmax.shape[-1]
    return lax.platform_dependent(absmax, tpu=select, default=repeat)
