"""Self-attention of a model's rows, by one of several kernels, and of generated tokens through a cache.

Each device attends with its own heads.  Softmax is float32 or wider.  Shapes: ops/attention_spec.py."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from spmd_lm.active_rules import active_axes, num_shards
from spmd_lm.axes import TIME
from spmd_lm.ops import chunked_attention, fused_attention
from spmd_lm.ops.attention_spec import AttentionSpec, Kernel, Pairs, Tokens
from spmd_lm.ops.collectives import global_indices, local_slice
from spmd_lm.ops.dense_attention import dense_attention, softmax_attention
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.ring_attention import ring_attention
from spmd_lm.ops.shared_rows import attends_in_a_ring, heads_to_time, repeat_heads, time_to_heads

SITE = 0  # the dropout site of attention probabilities


KERNELS = {
    "chunked": Kernel(chunked_attention.forward, chunked_attention.backward),
    "cudnn": Kernel(fused_attention.cudnn_forward, fused_attention.cudnn_backward),
    "splash": Kernel(fused_attention.splash_forward, fused_attention.splash_backward),
    "traced": Kernel(fused_attention.traced_forward, fused_attention.traced_backward),
}
"""Kernels by name; "xla" is `dense_attention`, which JAX differentiates."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def run_kernel(q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec, kernel: Kernel) -> Array:
    """Attention over whole rows by `kernel`."""
    return kernel.forward(q, k, v, pairs, spec)[0]


def _forward(q, k, v, pairs, spec, kernel):
    out, logsumexp = kernel.forward(q, k, v, pairs, spec)
    return out, (q, k, v, pairs, out, logsumexp)


def _backward(spec, kernel, saved, d_out):
    q, k, v, pairs, out, logsumexp = saved
    return *kernel.backward(q, k, v, pairs, spec, out, logsumexp, d_out), None


run_kernel.defvjp(_forward, _backward)


def attention(
    q: Array,
    k: Array,
    v: Array,
    spec: AttentionSpec,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    key: DropoutKey | None = None,
) -> Array:
    """Self-attention.  q: [B, T, H x K] -> the same; k, v: [B, T, G x K].  positions: int32 [B, T], for rotary
    embeddings.  segment_ids: int32 [B, whole row]; tokens attend within their segment.  key: None for no dropout.

    Where `time` is sharded, q, k and v are of this device's tokens: keys and values travel around a ring, or kernels
    get whole rows of some of its heads."""
    shape, lanes = q.shape, global_indices("heads", spec.heads // num_shards("heads"))
    q, k, v = spec.split_heads(q, k, v, positions)
    if attends_in_a_ring():
        words = key.words(SITE, lanes) if key is not None and spec.dropout else None
        return ring_attention(q, k, v, segment_ids, words, spec, KERNELS[spec.kernel]).reshape(shape)
    if active_axes(TIME):
        q, k, v = (time_to_heads(x, TIME) for x in (q, repeat_heads(k), repeat_heads(v)))
        lanes = local_slice(lanes, TIME, 0)
    words = key.words(SITE, lanes) if key is not None and spec.dropout else None
    tokens = Tokens(jnp.arange(q.shape[1], dtype=jnp.int32), segment_ids)
    pairs = Pairs(tokens, tokens, words)
    if spec.kernel == "xla":
        out = dense_attention(q, k, v, pairs, spec)
    else:
        out = run_kernel(q, k, v, pairs, spec, KERNELS[spec.kernel])
    return (heads_to_time(out, TIME) if active_axes(TIME) else out).reshape(shape)


KVCache = tuple[Array, Array]  # keys and values, [B, S, G, K] each, by position


def attention_with_cache(
    q: Array, k: Array, v: Array, spec: AttentionSpec, cache: KVCache, positions: Array
) -> tuple[Array, KVCache]:
    """Causal attention of tokens at `positions` (int32 [B, T]) through a cache, to which their keys and values are
    added first.  Entries of the cache after a token's own position are masked."""
    shape, rows = q.shape, jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    q, k, v = spec.split_heads(q, k, v, positions)
    k, v = (old.at[rows, positions].set(new) for old, new in zip(cache, (k, v), strict=True))
    column, row = jnp.arange(k.shape[1], dtype=jnp.int32), positions[:, None, :, None]
    mask = (column <= row) if spec.span is None else (column <= row) & (row - column < spec.span)
    return softmax_attention(q, k, v, mask, spec).reshape(shape), (k, v)
