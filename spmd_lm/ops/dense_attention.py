"""Attention that holds all scores of a block of queries, differentiated by JAX.  Shapes: ops/attention_spec.py."""

import functools
import itertools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from spmd_lm.ops.attention_spec import AttentionSpec, Pairs
from spmd_lm.ops.softcap import softcap

MOST_BLOCKS = 8  # each is compiled separately


def softmax_attention(
    q: Array, k: Array, v: Array, mask: Array | None, spec: AttentionSpec, drop: Callable[[Array], Array] | None = None
) -> Array:
    """mask: broadcastable to [B, H, T, S], or None.  drop: for probabilities [B, H, T, S]."""
    k, v = (x if x.shape[2] == q.shape[2] else jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    accum_dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", q * spec.scale_of(q), k, preferred_element_type=accum_dtype)
    scores = softcap(scores, spec.softcap)
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if drop:
        probabilities = drop(probabilities)
    return jnp.einsum("bhts,bshk->bthk", probabilities, v)


def query_blocks(time: int, causal: bool, span: int | None) -> list[tuple[slice, slice]]:
    """Slices (queries, keys) of each block, without keys that none of its queries attends to.

    Two blocks in long causal rows (-4% of a step on a CPU), or as many as windows fit into a row, up to MOST_BLOCKS."""
    blocks = 2 if causal and time % 2 == 0 and time >= 128 else 1
    blocks = max(blocks, min(time // span, MOST_BLOCKS)) if span else blocks
    before, after = span or time, 1 if causal else span or time
    ends = itertools.pairwise(i * time // blocks for i in range(blocks + 1))
    return [(slice(a, b), slice(max(0, a + 1 - before), min(time, b - 1 + after))) for a, b in ends]


def dense_attention(q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec) -> Array:
    """Attention over whole rows."""
    out, time, causal, span = [], q.shape[1], spec.causal, spec.span
    segments = pairs.queries.segments
    for queries, keys in query_blocks(time, causal, span):
        row, column = (jnp.arange(part.start, part.stop, dtype=jnp.int32) for part in (queries, keys))
        masks = [(column <= row[:, None])[None, None]] if causal else []
        if span and span < time:
            masks.append((abs(row[:, None] - column) < span)[None, None])
        if segments is not None:
            masks.append(segments[:, None, queries, None] == segments[:, None, None, keys])
        mask = functools.reduce(operator.and_, masks) if masks else None
        drop = pairs.words and functools.partial(pairs.drop, spec.dropout, row=row, column=column)
        out.append(softmax_attention(q[:, queries], k[:, keys], v[:, keys], mask, spec, drop))
    return jnp.concatenate(out, axis=1)
