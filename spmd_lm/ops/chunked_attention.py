"""Attention in blocks of scores, none of which is kept: FlashAttention (arXiv:2205.14135, arXiv:2307.08691) in XLA's
operations, for any backend, with dropout.

One loop runs over the blocks of pairs of which some are visible, forward with a running maximum and sum of each query's
scores, backward with the logarithm of that sum.  Memory grows with the row, not with its square."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from spmd_lm.ops.attention_spec import AttentionSpec, Pairs
from spmd_lm.ops.softcap import softcap

MASKED, LEAST_MAXIMUM = -1e30, -1e20
"""Of scores: exp(MASKED - LEAST_MAXIMUM) is 0, so that queries without any visible key need no case of their own."""


def block_size(time: int, most: int) -> int:
    """Tokens of a block: rows are cut evenly, into blocks of multiples of 8 where there are several."""
    blocks = -(-time // most)
    return time if blocks == 1 else -(-time // (8 * blocks)) * 8


def visible_blocks(time: int, size: int, causal: bool, span: int | None) -> np.ndarray:
    """Blocks [n, 2] of queries and keys, by index, with pairs that attend; those of the same queries together."""
    i, j = np.mgrid[: -(-time // size), : -(-time // size)]
    visible = (j <= i) if causal else np.full(i.shape, True)
    if span:
        visible &= (abs(i - j) - 1) * size + 1 < span
    return np.argwhere(visible).astype(np.int32)


class _Blocks(NamedTuple):
    """A row's arrays as [blocks, B, G, H / G, block, K], keys' and values' with 1 in place of H / G, for a loop.

    order: indices of the blocks with visible pairs, [n, 2].  time: tokens without padding."""

    q: Array
    k: Array
    v: Array
    pairs: Pairs
    spec: AttentionSpec
    order: Array
    time: int

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec, data: Array) -> "_Blocks":
        """data: what is differentiated.  Masks and their dropout depend on positions alone: where jax evaluates a
        program in part, a loop of their own would make them ahead, and keep them for all blocks.  Behind one barrier
        with data they stay in this one (tests/planning/test_full_scores.py)."""
        time, size = q.shape[1], block_size(q.shape[1], spec.block)
        assert k.shape[1] == time
        order = jnp.asarray(visible_blocks(time, size, spec.causal, spec.span))
        order, pairs, _ = lax.optimization_barrier((order, pairs, data))
        cut = functools.partial(_cut, kv_heads=k.shape[2], size=size)
        return cls(cut(q * spec.scale_of(q)), cut(k), cut(v), pairs, spec, order, time)

    def scores(self, i: Array, j: Array) -> Array:
        """Capped scores [B, G, H / G, block, block] of queries i and keys j, float32 or wider; MASKED where they do
        not attend."""
        accum_dtype = jnp.promote_types(self.q.dtype, jnp.float32)
        scores = jnp.einsum(
            "bgrtk,bgsk->bgrts", _part(self.q, i), _part(self.k, j)[:, :, 0], preferred_element_type=accum_dtype
        )
        mask, scores = self._mask(i, j), softcap(scores, self.spec.softcap)
        return scores if mask is None else jnp.where(mask, scores, MASKED)

    def _mask(self, i: Array, j: Array) -> Array | None:
        size, spec = self.q.shape[-2], self.spec
        row, column = (n * size + jnp.arange(size, dtype=jnp.int32) for n in (i, j))
        masks = [column <= row[:, None]] if spec.causal else []
        if spec.span and spec.span < self.time:
            masks.append(abs(row[:, None] - column) < spec.span)
        if self.time % size:
            masks.append(column < self.time)
        queries, keys = self.pairs.queries.segments, self.pairs.keys.segments
        if queries is not None and keys is not None:
            of_queries, of_keys = (self._tokens(x, n, axis=1) for x, n in ((queries, i), (keys, j)))
            masks.append((of_queries[:, :, None] == of_keys[:, None, :])[:, None, None])
        return functools.reduce(jnp.logical_and, masks) if masks else None

    def _tokens(self, x: Array, n: Array, axis: int = 0) -> Array:
        """Those of x that are in block n."""
        size = self.q.shape[-2]
        short = -x.shape[axis] % size
        x = jnp.pad(x, [(0, short if d == axis else 0) for d in range(x.ndim)]) if short else x
        return lax.dynamic_slice_in_dim(x, n * size, size, axis)

    def drop(self, x: Array, i: Array, j: Array) -> Array:
        """`x` [B, G, H / G, block, block] with the dropout of probabilities."""
        if self.pairs.words is None:
            return x
        row, column = (self._tokens(p.positions, n) for p, n in ((self.pairs.queries, i), (self.pairs.keys, j)))
        flat = x.reshape(x.shape[0], -1, *x.shape[3:])
        return self.pairs.drop(self.spec.dropout, flat, row, column).reshape(x.shape)

    def loop(self, body: Callable, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """body(carry, i, j) -> carry, for all visible blocks."""
        return lax.scan(lambda carry, at: (body(carry, *at), None), carry, self.order)[0]


def _cut(x: Array, kv_heads: int, size: int) -> Array:
    """[B, T, heads, ...] -> [blocks, B, kv_heads, heads / kv_heads, block, ...]; T is padded."""
    blocks = -(-x.shape[1] // size)
    if short := blocks * size - x.shape[1]:
        x = jnp.pad(x, [(0, short if d == 1 else 0) for d in range(x.ndim)])
    x = x.reshape(x.shape[0], blocks, size, kv_heads, -1, *x.shape[3:])
    return x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim))


def _join(x: Array, time: int) -> Array:
    """The inverse of `_cut`."""
    x = x.transpose(1, 0, 4, 2, 3, *range(5, x.ndim))
    x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3] * x.shape[4], *x.shape[5:])
    return x[:, :time]


def _part(x: Array, n: Array) -> Array:
    return lax.dynamic_index_in_dim(x, n, keepdims=False)


def _replace(x: Array, n: Array, part: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, part, n, 0)


def forward(q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec) -> tuple[Array, Array]:
    """Attention [B, T, H, K], and the logarithm of each query's sum of exponentials [B, H, T], float32 or wider."""
    blocks = _Blocks.of(q, k, v, pairs, spec, q)
    accum_dtype = jnp.promote_types(q.dtype, jnp.float32)

    def add(carry, i, j):
        out, maximum, total = (_part(x, i) for x in carry)
        scores = blocks.scores(i, j)
        new = jnp.maximum(maximum, scores.max(-1))
        weights, shrink = jnp.exp(scores - new[..., None]), jnp.exp(maximum - new)
        total = total * shrink + weights.sum(-1)
        weights = blocks.drop(weights, i, j).astype(v.dtype)
        out = out * shrink[..., None]
        out += jnp.einsum("bgrts,bgsk->bgrtk", weights, _part(blocks.v, j)[:, :, 0], preferred_element_type=accum_dtype)
        return tuple(_replace(x, i, part) for x, part in zip(carry, (out, new, total), strict=True))

    rows = blocks.q.shape[:-1]
    carry = (
        jnp.zeros((*rows, v.shape[-1]), accum_dtype),
        jnp.full(rows, LEAST_MAXIMUM, accum_dtype),
        jnp.zeros(rows, accum_dtype),
    )
    out, maximum, total = blocks.loop(add, carry)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    time = q.shape[1]
    return _join(out, time).astype(q.dtype), _join(maximum + jnp.log(total), time).swapaxes(1, 2)


def backward(
    q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec, out: Array, logsumexp: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v.  out, logsumexp: of attention to these keys, and perhaps to others."""
    blocks = _Blocks.of(q, k, v, pairs, spec, d_out)
    accum_dtype = jnp.promote_types(q.dtype, jnp.float32)
    cut = functools.partial(_cut, kv_heads=k.shape[2], size=blocks.q.shape[-2])
    d_out_blocks = cut(d_out)
    sums = cut((out.astype(accum_dtype) * d_out.astype(accum_dtype)).sum(-1))
    of_queries = cut(jnp.where(jnp.isfinite(logsumexp), logsumexp, 0).swapaxes(1, 2))

    def add(carry, i, j):
        d_q, d_k, d_v = carry
        scores, g = blocks.scores(i, j), _part(d_out_blocks, i)
        queries, (keys, values) = _part(blocks.q, i), (_part(x, j)[:, :, 0] for x in (blocks.k, blocks.v))
        weights = jnp.exp(scores - _part(of_queries, i)[..., None])
        dropped = blocks.drop(weights, i, j).astype(g.dtype)
        d_v_j = jnp.einsum("bgrts,bgrtk->bgsk", dropped, g, preferred_element_type=accum_dtype)
        d_weights = jnp.einsum("bgrtk,bgsk->bgrts", g, values, preferred_element_type=accum_dtype)
        d_scores = weights * (blocks.drop(d_weights, i, j) - _part(sums, i)[..., None])
        if spec.softcap:
            d_scores *= 1 - jnp.square(jnp.where(weights > 0, scores, 0) / spec.softcap)
        d_scores = d_scores.astype(q.dtype)
        d_q_i = jnp.einsum("bgrts,bgsk->bgrtk", d_scores, keys, preferred_element_type=accum_dtype)
        d_k_j = jnp.einsum("bgrts,bgrtk->bgsk", d_scores, queries, preferred_element_type=accum_dtype)
        parts = (d_q, i, d_q_i), (d_k, j, d_k_j[:, :, None]), (d_v, j, d_v_j[:, :, None])
        return tuple(_replace(x, n, _part(x, n) + part) for x, n, part in parts)

    d_q, d_k, d_v = blocks.loop(add, tuple(jnp.zeros(x.shape, accum_dtype) for x in (blocks.q, blocks.k, blocks.v)))
    d_q, d_k, d_v = (_join(x, q.shape[1]) for x in (d_q * spec.scale_of(q), d_k, d_v))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)
