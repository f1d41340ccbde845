"""Attention kernels: XLA everywhere, cuDNN on GPU, splash on TPU.

Each device attends with its own heads.  Shapes: B batch, T time, S time of the keys, H local query heads, G local
key/value heads, each shared by H / G query heads (arXiv:2305.13245), K head width.  Softmax is float32 or wider."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive

from spmd_lm.active_rules import active_axes, num_shards
from spmd_lm.axes import TIME
from spmd_lm.ops.collectives import global_indices, local_slice
from spmd_lm.ops.context import heads_to_time, is_ring, repeat_heads, time_to_heads
from spmd_lm.ops.dropout import DropoutKey, dropout
from spmd_lm.ops.rotary import Rotary
from spmd_lm.ops.softcap import softcap

SITE = 0  # the dropout site of attention probabilities


Dropout = Callable[..., Array] | None
"""drop(probabilities [B, H, T, S], row=positions of queries, uint32 [T, 1], column=positions of keys, uint32 [S])."""


def _softmax_attention(q, k, v, mask, spec: "AttentionSpec", drop: Callable[[Array], Array] | None = None) -> Array:
    """q: [B, T, H, K]; k, v: [B, S, G, K]; mask: broadcastable to [B, H, T, S], or None; drop: for probabilities."""
    k, v = (x if x.shape[2] == q.shape[2] else jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    accum_dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", q * spec.scale_of(q), k, preferred_element_type=accum_dtype)
    scores = softcap(scores, spec.softcap)
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if drop:
        probabilities = drop(probabilities)
    return jnp.einsum("bhts,bshk->bthk", probabilities, v)


MOST_BLOCKS = 8  # each is compiled separately


def query_blocks(time: int, causal: bool, span: int | None) -> list[tuple[slice, slice]]:
    """Slices (queries, keys) of each block of the "xla" kernel, without keys that none of its queries attends to.

    Two blocks in long causal rows (-4% of a step on a CPU), or as many as windows fit into a row, up to MOST_BLOCKS."""
    blocks = 2 if causal and time % 2 == 0 and time >= 128 else 1
    blocks = max(blocks, min(time // span, MOST_BLOCKS)) if span else blocks
    before, after = span or time, 1 if causal else span or time
    ends = itertools.pairwise(i * time // blocks for i in range(blocks + 1))
    return [(slice(a, b), slice(max(0, a + 1 - before), min(time, b - 1 + after))) for a, b in ends]


def unmasked_scores(time: int, causal: bool, span: int | None) -> float:
    """Fraction of the score matrix that a fused kernel computes: what causal mask and window leave."""
    if not span:
        return 0.5 if causal else 1.0
    span = min(span, time)
    before = span * time - span * (span - 1) / 2  # pairs of a token with itself or one before it
    return (before if causal else 2 * before - time) / time**2


def _xla(q, k, v, segment_ids, spec: "AttentionSpec", drop: Dropout) -> Array:
    out, time, causal, span = [], q.shape[1], spec.causal, spec.span
    for queries, keys in query_blocks(time, causal, span):
        row, column = (jnp.arange(*part.indices(time)[:2], dtype=jnp.int32) for part in (queries, keys))
        row = row[:, None]
        masks = [(column <= row)[None, None]] if causal else []
        if span and span < time:
            masks.append((abs(row - column) < span)[None, None])
        if segment_ids is not None:
            masks.append(segment_ids[:, None, queries, None] == segment_ids[:, None, None, keys])
        mask = functools.reduce(operator.and_, masks) if masks else None
        at = row.astype(jnp.uint32), column.astype(jnp.uint32)
        of_block = functools.partial(drop, row=at[0], column=at[1]) if drop else None
        out.append(_softmax_attention(q[:, queries], k[:, keys], v[:, keys], mask, spec, of_block))
    return jnp.concatenate(out, axis=1)


def _cudnn(q, k, v, segment_ids, spec: "AttentionSpec", drop: None) -> Array:
    """segment_ids: for bidirectional rows, 1 for tokens and 0 for the padding after them."""
    assert not drop and not (spec.causal and segment_ids is not None) and (spec.causal or not spec.span)
    assert not spec.softcap
    n = None if segment_ids is None else segment_ids.sum(1, dtype=jnp.int32)
    options: dict = {"query_seq_lengths": n, "key_value_seq_lengths": n}
    options["local_window_size"] = (spec.span - 1, 0) if spec.span else None
    options["scale"] = spec.scale
    return jax.nn.dot_product_attention(q, k, v, is_causal=spec.causal, implementation="cudnn", **options)


def _splash(q, k, v, segment_ids, spec: "AttentionSpec", drop: None, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    assert not drop
    time, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
    grouped = heads != kv_heads
    square, around = (time, time), spec.span and spec.span - 1
    mask: Any = masks.CausalMask(square) if spec.causal else masks.FullMask(square)
    mask = masks.LocalMask(square, (around, 0 if spec.causal else around), 0) if spec.span else mask
    masks_of_heads = masks.MultiHeadMask([mask] * (heads // kv_heads if grouped else heads))
    make_kernel = splash.make_splash_mqa if grouped else splash.make_splash_mha
    options: dict = {"attn_logits_soft_cap": spec.softcap, "interpret": interpret}
    kernel = make_kernel(masks_of_heads, head_shards=1, q_seq_shards=1, **options)
    ids = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    q, k, v = (x.swapaxes(1, 2) for x in (q * spec.scale_of(q), k, v))
    if grouped:
        kernel = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        q = q.reshape(q.shape[0], kv_heads, heads // kv_heads, *q.shape[2:])
    out = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0))(q, k, v, ids)
    return out.reshape(out.shape[0], heads, *out.shape[-2:]).swapaxes(1, 2)


fused_attention_p = Primitive("fused_attention")
fused_attention_vjp_p = Primitive("fused_attention_vjp")
for _primitive in (fused_attention_p, fused_attention_vjp_p):
    _primitive.multiple_results = True
fused_attention_p.def_abstract_eval(lambda q, k, v: (q, q.update(shape=q.shape[:-1], dtype=jnp.dtype("float32"))))
fused_attention_vjp_p.def_abstract_eval(lambda q, k, v, out, logsumexp, d_out: (q, k, v))


@jax.custom_vjp
def _fused(q: Array, k: Array, v: Array) -> Array:
    return fused_attention_p.bind(q, k, v)[0]


def _fused_forward(q, k, v):
    out, logsumexp = fused_attention_p.bind(q, k, v)
    return out, (q, k, v, out, logsumexp)


_fused.defvjp(_fused_forward, lambda saved, d_out: tuple(fused_attention_vjp_p.bind(*saved, d_out)))


def _traced(q, k, v, segment_ids, spec: "AttentionSpec", drop: None) -> Array:
    """Stands for any fused kernel in a trace, with its reads and writes; cannot be compiled."""
    return _fused(q, k, v)


KERNELS: dict[str, Callable] = {"xla": _xla, "cudnn": _cudnn, "splash": _splash, "traced": _traced}


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """heads, kv_heads: number over all devices.  causal: whether a token attends only to itself and earlier ones.
    rotary: position embeddings of queries and keys, or None.  dropout: rate for the probabilities.  span: a token
    attends to itself, the span - 1 before it and, if not causal, the span - 1 after it; None for the whole row.
    kernel: a key of KERNELS.  scale: factor of scores; default K^-1/2.  softcap: cap of scores, or None."""

    heads: int
    kv_heads: int
    causal: bool = True
    rotary: Rotary | None = None
    dropout: float = 0.0
    span: int | None = None
    kernel: str = "xla"
    scale: float | None = None
    softcap: float | None = None

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

    Where `time` is sharded, q, k and v are of this device's tokens, and kernels get whole rows of some of its heads."""
    shape = q.shape
    q, k, v = spec.split_heads(q, k, v, positions)
    lanes = global_indices("heads", spec.heads // num_shards("heads"))
    if is_ring():
        words = key.words(SITE, lanes) if key is not None and spec.dropout else None
        return ring_attention(q, k, v, segment_ids, spec, words).reshape(shape)
    if active_axes(TIME):
        q, k, v = (time_to_heads(x, TIME) for x in (q, repeat_heads(k), repeat_heads(v)))
        lanes = local_slice(lanes, TIME, 0)
    drop: Dropout = None
    if key is not None and spec.dropout:
        w0, w1 = key.words(SITE, lanes)
        drop = functools.partial(dropout, rate=spec.dropout, key=(w0[:, :, None, None], w1[:, :, None, None]))
    out = KERNELS[spec.kernel](q, k, v, segment_ids, spec, drop)
    return (heads_to_time(out, TIME) if active_axes(TIME) else out).reshape(shape)


def ring_attention(q: Array, k: Array, v: Array, segment_ids: Array | None, spec: AttentionSpec, words) -> Array:
    """q: [B, T, H, K] and k, v: [B, T, G, K] of this device's tokens of a row -> as q.  segment_ids: int32 [B, whole
    row], in order.  words: keys of dropout, [B, H] each, or None."""
    raise NotImplementedError("parallel.context_attention=ring")


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
    return _softmax_attention(q, k, v, mask, spec).reshape(shape), (k, v)
