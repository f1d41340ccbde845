"""Self-attention of a model's rows, by one of several kernels, and of generated tokens through a cache.

Each device attends with its own heads.  Softmax is float32 or wider.  Shapes: ops/attention_spec.py."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from spmd_lm.active_rules import num_shards
from spmd_lm.ops import chunked_attention, fused_attention
from spmd_lm.ops.attention_spec import AttentionSpec, Pairs, Tokens
from spmd_lm.ops.collectives import global_indices
from spmd_lm.ops.dense_attention import dense_attention, softmax_attention
from spmd_lm.ops.dropout import DropoutKey

SITE = 0  # the dropout site of attention probabilities


class Kernel(NamedTuple):
    """A kernel that keeps no scores.
    forward(q, k, v, pairs, spec): attention, like q, and the logarithm of each query's sum of exponentials [B, H, T].
    backward(q, k, v, pairs, spec, out, logsumexp, d_out): gradients of q, k and v; out and logsumexp may be of
    attention to more keys than these."""

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


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
    embeddings.  segment_ids: int32 [B, T]; tokens attend within their segment.  key: None for no dropout."""
    words = None
    if key is not None and spec.dropout:
        words = key.words(SITE, global_indices("heads", spec.heads // num_shards("heads")))
    tokens = Tokens(jnp.arange(q.shape[1], dtype=jnp.int32), segment_ids)
    heads, pairs = spec.split_heads(q, k, v, positions), Pairs(tokens, tokens, words)
    if spec.kernel == "xla":
        return dense_attention(*heads, pairs, spec).reshape(q.shape)
    return run_kernel(*heads, pairs, spec, KERNELS[spec.kernel]).reshape(q.shape)


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
