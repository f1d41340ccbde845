"""Codes in which ZeRO++ (arXiv:2306.10209) sends matrices: small integers, with a scale for each block of them.

Blocks are BLOCK_SIZE entries along the last dimension, and the last block of a row may be shorter.  ZeRO shards another
dimension, so that no block spans two shards: one shard's codes do not depend on the number of shards."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.ops.dropout import KeyWords, threefry

BLOCK_SIZE = 256
SCALE = jnp.bfloat16


class Coded(NamedTuple):
    """A quantized array.  codes: a Codec's.  absmax: each block's largest magnitude, SCALE [..., blocks]."""

    codes: Array
    absmax: Array


@dataclasses.dataclass(frozen=True)
class Codec:
    """bits: 8 or 4.
    packed: whether two 4-bit codes share a uint8: XLA sends an int4 array in 8 bits on CPUs and GPUs."""

    bits: int = 8
    packed: bool = False

    @property
    def largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def sizes(self, row: int) -> dict[str, int]:
        """Elements, by dtype, of a row of this size."""
        dtype = "uint8" if self.packed else f"int{self.bits}"
        return {dtype: -(-row // 2) if self.packed else row, str(jnp.dtype(SCALE)): _blocks_in(row)}

    def encode(self, x: Array, key: KeyWords | None = None) -> Coded:
        """Rounds each entry to a multiple of its block's absmax / largest: the nearest one or, with a `key`, one of the
        two nearest at random, so that its mean is the entry.  An entry that is not finite makes its block NaN, on a TPU
        its row, so that a step's guard sees it.

        Encoding what `decode` returns yields the same codes: absmax, rounded to bfloat16, is one of the values."""
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        absmax = _absmax(x).astype(SCALE)
        scale = _spread(absmax, x)
        steps = x * self.largest / jnp.where(scale == 0, 1, scale)
        steps = jnp.round(steps) if key is None else jnp.floor(steps + _uniform(key, scale))
        codes = jnp.clip(steps, -self.largest, self.largest)
        if self.packed:
            return Coded(_pack(codes.astype(jnp.int8)), absmax)
        return Coded(codes.astype(jnp.int8 if self.bits == 8 else jnp.int4), absmax)

    def decode(self, coded: Coded, row: int, dtype: jnp.dtype) -> Array:
        """The array that `encode` rounded, whose rows have this size."""
        codes = _unpack(coded.codes, row) if self.packed else coded.codes
        codes = codes.astype(jnp.promote_types(dtype, jnp.float32))
        return (codes * (_spread(coded.absmax, codes) / self.largest)).astype(dtype)


def _blocks_in(row: int) -> int:
    return -(-row // BLOCK_SIZE)


def _absmax(x: Array) -> Array:
    """The largest magnitude of each block of x [..., n]: [..., blocks]."""
    n = x.shape[-1]
    blocks, size = _blocks_in(n), min(n, BLOCK_SIZE)
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


def _uniform(key: KeyWords, scale: Array) -> Array:
    """Numbers in [0, 1), one for each entry: threefry of its index and its block's scale.

    The scale stands for the layer and the microbatch, of which a scatter knows nothing: no two arrays of a step have
    the same ones, or else the same entries too."""
    index = lax.iota(jnp.uint32, scale.size).reshape(scale.shape)
    bits, _ = threefry(key, index, lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32))
    return (bits >> 8).astype(scale.dtype) * 2.0**-24


def _pack(codes: Array) -> Array:
    """Two 4-bit codes of a row [..., n] in a uint8, one of each half."""
    n = codes.shape[-1]
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, n % 2)])
    low, high = (half.astype(jnp.uint8) & 15 for half in jnp.split(codes, 2, -1))
    return high << 4 | low


def _unpack(packed: Array, n: int) -> Array:
    """The inverse of `_pack`, int8."""
    halves = packed << 4, packed
    codes = jnp.concatenate([lax.bitcast_convert_type(half, jnp.int8) >> 4 for half in halves], -1)
    return codes[..., :n]
