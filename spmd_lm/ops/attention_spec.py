"""What one attention computes, and the arrays that say which of its pairs of tokens are visible and dropped.

Shapes: B batch, T queries, S keys, H local query heads, G local key/value heads, each shared by H / G query heads
(arXiv:2305.13245), K head width."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from spmd_lm.active_rules import num_shards
from spmd_lm.ops.dropout import KeyWords, dropout
from spmd_lm.ops.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """heads, kv_heads: number over all devices.  causal: whether a token attends only to itself and earlier ones.
    rotary: position embeddings of queries and keys, or None.  dropout: rate for the probabilities.  span: a token
    attends to itself, the span - 1 before it and, if not causal, the span - 1 after it; None for the whole row.
    kernel: "xla", or a key of ops.attention.KERNELS.  scale: factor of scores; default K^-1/2.  softcap: cap of
    scores, or None.  block: queries, and keys, of a block of the chunked kernel at most."""

    heads: int
    kv_heads: int
    causal: bool = True
    rotary: Rotary | None = None
    dropout: float = 0.0
    span: int | None = None
    kernel: str = "xla"
    scale: float | None = None
    softcap: float | None = None
    block: int = 512

    def scale_of(self, q: Array) -> float:
        return self.scale or q.shape[-1] ** -0.5

    def split_heads(self, q: Array, k: Array, v: Array, positions: Array | None):
        """Splits q, k and v into this device's heads, [B, T, H or G, K], and applies rotary embeddings."""
        shards = num_shards("heads")
        q = q.reshape(*q.shape[:-1], self.heads // shards, -1)
        k, v = (x.reshape(*x.shape[:-1], max(self.kv_heads // shards, 1), -1) for x in (k, v))
        if self.rotary is not None:
            assert positions is not None
            q, k = (self.rotary.apply(x, positions) for x in (q, k))
        return q, k, v


def unmasked_scores(time: int, causal: bool, span: int | None) -> float:
    """Fraction of the score matrix that a fused kernel computes: what causal mask and window leave."""
    if not span:
        return 0.5 if causal else 1.0
    span = min(span, time)
    before = span * time - span * (span - 1) / 2  # pairs of a token with itself or one before it
    return (before if causal else 2 * before - time) / time**2


class Tokens(NamedTuple):
    """Queries or keys.
    positions: int32 [T], in their row; every row has the same.
    segments: int32 [B, T]: tokens attend within their segment; None if each row is one."""

    positions: Array
    segments: Array | None = None


class Pairs(NamedTuple):
    """Queries, keys, and the dropout of their probabilities.
    words: threefry keys, uint32 [B, H] each; None for no dropout."""

    queries: Tokens
    keys: Tokens
    words: KeyWords | None = None

    def drop(self, rate: float, probabilities: Array, row: Array, column: Array) -> Array:
        """`probabilities` [B, H, T, S] of queries at positions row [T] and keys at positions column [S], dropped."""
        if self.words is None:
            return probabilities
        w0, w1 = (word[:, :, None, None] for word in self.words)
        at = row.astype(jnp.uint32)[:, None], column.astype(jnp.uint32)
        return dropout(probabilities, rate, (w0, w1), *at)


class Kernel(NamedTuple):
    """A kernel that keeps no scores.
    forward(q, k, v, pairs, spec): attention, like q, and the logarithm of each query's sum of exponentials [B, H, T].
    backward(q, k, v, pairs, spec, out, logsumexp, d_out): gradients of q, k and v; out and logsumexp may be of
    attention to more keys than these."""

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
