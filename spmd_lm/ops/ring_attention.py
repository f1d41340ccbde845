"""Attention of rows whose tokens several devices share: keys and values travel around the ring of these devices
(arXiv:2310.01889), and a device computes with those that it has while the next ones are on their way.

With a causal mask a device's tokens are two chunks of the row (zig-zag, ops/shared_rows.py), so that every pair of
chunks is causal, a chunk with itself, or whole, or without any visible pair: a kernel is called for chunks of one size,
three times with the device's own keys and twice with those of each other device, which is the same work for all.
Partial results are merged by the logarithms of their sums of exponentials, in float32 or wider.  In backward the
gradients of keys and values travel with them, to arrive at home after a full turn.  Shapes: ops/attention_spec.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.active_rules import active_axes, axis_rules, num_shards
from spmd_lm.axes import TIME
from spmd_lm.ops.attention_spec import AttentionSpec, Kernel, Pairs, Tokens
from spmd_lm.ops.collectives import shard_index, time_positions
from spmd_lm.ops.compiler_workarounds import run_again
from spmd_lm.ops.dropout import KeyWords

Tree = Any


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    words: KeyWords | None,
    spec: AttentionSpec,
    kernel: Kernel,
) -> Array:
    """Attention of this device's tokens to all tokens of their rows.  q: [B, T, H, K] -> the same; k, v: [B, T, G, K].
    segments: int32 [B, whole row], or None.  words: threefry keys of dropout, [B, H] each, or None."""
    return _ring_attention(q, k, v, segments, words, spec, kernel, num_shards(TIME))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _ring_attention(q, k, v, segments, words, spec, kernel, devices):
    return _forward(q, k, v, segments, words, spec, kernel, devices)[0]


class _Ring(NamedTuple):
    """chunks: into which a device's tokens are split.  size: tokens of a chunk.  device: this one's index."""

    devices: int
    chunks: int
    size: int
    device: Array
    segments: Array | None
    words: KeyWords | None
    spec: AttentionSpec

    @classmethod
    def of(cls, q: Array, segments: Array | None, words: KeyWords | None, spec: AttentionSpec, devices: int) -> "_Ring":
        rules = axis_rules()
        assert rules and num_shards(TIME) == devices, "differentiated under other rules than it was traced under"
        assert rules.zigzag == spec.causal, "causal rings are zig-zag, and no others"
        assert spec.span is None
        chunks = 2 if spec.causal else 1
        return cls(devices, chunks, q.shape[1] // chunks, shard_index(TIME), segments, words, spec)

    def cut(self, x: Array, axis: int) -> Array:
        """[chunks, ...] of x, which has this device's tokens along `axis`."""
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.chunks, -1, *x.shape[axis + 1 :]), axis, 0)

    def join(self, x: Array, axis: int) -> Array:
        """The inverse of `cut`."""
        return jnp.moveaxis(x, 0, axis).reshape(*x.shape[1 : axis + 1], -1, *x.shape[axis + 2 :])

    def send(self, x: Tree) -> Tree:
        """x of the device before this one."""
        turn = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, active_axes(TIME), turn), x)

    def pairs(self, i: Array | int, j: Array | int, source: Array) -> Pairs:
        """Those of this device's chunk i of queries with chunk j of device `source`'s keys."""
        return Pairs(self._tokens(i, self.device), self._tokens(j, source), self.words)

    def _tokens(self, i: Array | int, device: Array) -> Tokens:
        positions = _part(time_positions(self.chunks * self.size, device).reshape(self.chunks, -1), i)
        segments = None if self.segments is None else jnp.take(self.segments, positions, 1, mode="clip")
        return Tokens(positions, segments)

    def calls(self, source: Array | None) -> list[tuple[Array | int, Array | int, AttentionSpec]]:
        """(chunk of queries, chunk of keys, what is computed) of this device with the keys of `source`; None is its
        own."""
        whole = dataclasses.replace(self.spec, causal=False)
        if not self.spec.causal:
            return [(0, 0, whole)]
        if source is None:
            return [(0, 0, self.spec), (1, 0, whole), (1, 1, self.spec)]
        both = (source > self.device).astype(jnp.int32)  # its second chunk is before this device's second
        return [(1, 0, whole), (both, both, whole)]

    def around(self, turn: Callable[[Tree, Tree, Array | None], Tree], kv: Tree, carry: Tree) -> Tree:
        """turn(carry, keys and values, their device) -> carry, for this device's own (None), then for those of the
        others.  A loop: unrolled, the program would grow with the ring."""
        arriving, carry = self.send(kv), turn(carry, kv, None)

        def hop(state: tuple[Tree, Tree], n: Array) -> tuple[tuple[Tree, Tree], None]:
            kv, carry = state
            return (self.send(kv), turn(carry, kv, (self.device - n) % self.devices)), None

        hops = jnp.arange(1, self.devices - 1, dtype=jnp.int32)
        (kv, carry), _ = lax.scan(hop, (arriving, carry), hops)
        return turn(carry, kv, (self.device + 1) % self.devices)


def _part(tree: Tree, i: Array | int) -> Tree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _replace(tree: Tree, i: Array | int, part: Tree) -> Tree:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0), tree, part)


def _merged(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention [B, T, H, K] and logarithms of sums [B, H, T] to the keys of both."""
    total = jnp.logaddexp(one[1], other[1])
    shift = jnp.where(jnp.isfinite(total), total, 0)  # nothing is visible yet
    first, second = (jnp.exp(logsumexp - shift).swapaxes(1, 2)[..., None] * out for out, logsumexp in (one, other))
    return first + second, total


def _forward(q, k, v, segments, words, spec, kernel, devices):
    ring = _Ring.of(q, segments, words, spec, devices)
    accum_dtype = jnp.promote_types(q.dtype, jnp.float32)
    queries, kv = ring.cut(q, 1), (ring.cut(k, 1), ring.cut(v, 1))
    nothing = jnp.full((ring.chunks, q.shape[0], q.shape[2], ring.size), -jnp.inf, accum_dtype)

    def turn(results, kv, source):
        for i, j, of_chunks in ring.calls(source):
            pairs = ring.pairs(i, j, ring.device if source is None else source)
            out, logsumexp = kernel.forward(_part(queries, i), *_part(kv, j), pairs, of_chunks)
            merged = _merged(_part(results, i), (out.astype(accum_dtype), logsumexp.astype(accum_dtype)))
            results = _replace(results, i, merged)
        return results

    out, logsumexp = ring.around(turn, kv, (jnp.zeros(queries.shape, accum_dtype), nothing))
    out, logsumexp = ring.join(out, 1).astype(q.dtype), ring.join(logsumexp, 2)
    return out, (q, k, v, segments, words, out, logsumexp)


def _backward(spec, kernel, devices, saved, d_out):
    q, k, v, segments, words, out, logsumexp = saved
    k, v = run_again(k, v)  # recomputation's first hop, whose result would be kept
    ring = _Ring.of(q, segments, words, spec, devices)
    accum_dtype = jnp.promote_types(q.dtype, jnp.float32)
    queries, kv = ring.cut(q, 1), (ring.cut(k, 1), ring.cut(v, 1))
    results = ring.cut(out, 1), ring.cut(logsumexp, 2), ring.cut(d_out, 1)
    d_q = jnp.zeros(queries.shape, accum_dtype)

    def turn(carry, kv, source):
        d_q, d_kv = carry
        if source is not None:
            d_kv = ring.send(d_kv)  # before the kernel's calls, which do not wait for it
        for i, j, of_chunks in ring.calls(source):
            pairs = ring.pairs(i, j, ring.device if source is None else source)
            found = kernel.backward(_part(queries, i), *_part(kv, j), pairs, of_chunks, *_part(results, i))
            of_queries, *of_keys = (x.astype(accum_dtype) for x in found)
            d_q = _replace(d_q, i, _part(d_q, i) + of_queries)
            d_kv = _replace(d_kv, j, jax.tree.map(jnp.add, _part(d_kv, j), tuple(of_keys)))
        return d_q, d_kv

    d_q, d_kv = ring.around(turn, kv, (d_q, jax.tree.map(lambda x: jnp.zeros(x.shape, accum_dtype), kv)))
    d_k, d_v = ring.send([ring.join(x, 1).astype(k.dtype) for x in d_kv])  # nothing is added to them at home
    return ring.join(d_q, 1).astype(q.dtype), d_k, d_v, None, None


_ring_attention.defvjp(_forward, _backward)
