"""Attention by three kernels: cuDNN on GPU, splash on TPU, XLA everywhere; `config.attention_kernels` chooses.

Each device attends with its own heads.  Shapes: B batch, T time, S keys' time, H heads here, G of keys and values, each
of which serves H / G queries (arXiv:2305.13245), K head width.  Softmax is float32 or wider.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spmd_lm import axes
from spmd_lm.ops.collectives import global_indices
from spmd_lm.ops.dropout import Draw, dropout
from spmd_lm.ops.rotary import rotate

SITE = 0
"""The dropout site of attention probabilities."""


def _softmax_attention(q, k, v, mask, rate, keys, row):
    """q: [B, T, H, K]; k, v: [B, S, G, K]; mask: broadcastable to [B, H, T, S], None for none; row: [T, 1], queries'
    places in the sequence."""
    k, v = (x if x.shape[2] == q.shape[2] else jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum(
        "bthk,bshk->bhts", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32)
    )
    p = jax.nn.softmax(s if mask is None else jnp.where(mask, s, -1e30), axis=-1).astype(q.dtype)
    if rate:
        p = dropout(p, rate, keys, row, jnp.arange(k.shape[1], dtype=jnp.uint32))
    return jnp.einsum("bhts,bshk->bthk", p, v)


def _xla(q, k, v, segments, causal, rate, keys):
    """Causal attention in two blocks of queries: the first never looks at the second half of the keys (-4% of a step on
    a CPU)."""
    time = q.shape[1]
    blocks = 2 if causal and time % 2 == 0 and time >= 128 else 1
    out = []
    for i in range(blocks):
        start, end = i * time // blocks, (i + 1) * time // blocks
        row, column = jnp.arange(start, end)[:, None], jnp.arange(end)
        mask = (column <= row)[None, None] if causal else None
        if segments is not None:
            same = segments[:, None, start:end, None] == segments[:, None, None, :end]
            mask = same if mask is None else mask & same
        out.append(
            _softmax_attention(q[:, start:end], k[:, :end], v[:, :end], mask, rate, keys, row.astype(jnp.uint32))
        )
    return jnp.concatenate(out, axis=1)


def _cudnn(q, k, v, segments, causal, rate, keys):
    """Segments of rows that see both ways are a row's tokens, 1, and the padding behind them, 0."""
    assert not rate and not (causal and segments is not None)
    tokens = None if segments is None else segments.sum(1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        query_seq_lengths=tokens,
        key_value_seq_lengths=tokens,
        implementation="cudnn",
    )


def _splash(q, k, v, segments, causal, rate, keys, interpret=False):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    assert not rate
    time, heads, groups = q.shape[1], q.shape[2], k.shape[2]
    mask = (masks.CausalMask if causal else masks.FullMask)((time, time))
    kind, together = (splash.make_splash_mha, heads) if heads == groups else (splash.make_splash_mqa, heads // groups)
    kernel = kind(masks.MultiHeadMask([mask] * together), head_shards=1, q_seq_shards=1, interpret=interpret)
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    if heads != groups:
        kernel, shape = jax.vmap(kernel, in_axes=(0, 0, 0, None)), q.shape
        q = q.reshape(shape[0], groups, together, *shape[2:])
    out = jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0))(q, k, v, ids)
    return out.reshape(out.shape[0], heads, *out.shape[-2:]).swapaxes(1, 2)


KERNELS: dict[str, Callable] = {"xla": _xla, "cudnn": _cudnn, "splash": _splash}


@dataclasses.dataclass(frozen=True)
class Heads:
    """heads, kv_heads: of all devices.  causal: whether a token sees none of those that follow.  theta: of rotary
    positions; None for none."""

    heads: int
    kv_heads: int
    causal: bool = True
    theta: float | None = None

    def split(self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array | None):
        """This device's heads of each, [B, T, H or G, K], turned to where they stand."""
        n = axes.num_shards("heads")
        q, k, v = (
            x.reshape(*x.shape[:-1], heads // n, -1)
            for x, heads in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads))
        )
        if self.theta is not None:
            assert positions is not None
            q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        return q, k, v


def attention(
    q, k, v, h: Heads, *, kernel: str, positions=None, rate: float = 0.0, draw: Draw | None = None, segments=None
) -> jax.Array:
    """Self-attention.  q: [B, T, H x K] -> the same; k, v: [B, T, G x K].  positions: int32 [B, T], for rotary ones.
    segments: int32 [B, T], parts of a row that do not see each other.

    kernel: a key of KERNELS.  rate: dropout of the probabilities, applied when there is a `draw`."""
    rate, mine = rate if draw is not None else 0.0, h.heads // axes.num_shards("heads")
    keys = None
    if rate:
        assert draw is not None
        keys = tuple(key[:, :, None, None] for key in draw.keys(SITE, global_indices("heads", mine)))
    heads = h.split(q, k, v, positions)
    return KERNELS[kernel](*heads, segments, h.causal, rate, keys).reshape(q.shape)


Cache = tuple[jax.Array, jax.Array]
"""Keys and values, [B, S, G, K] each, by position."""


def attention_with_cache(q, k, v, h: Heads, cache: Cache, *, positions: jax.Array) -> tuple[jax.Array, Cache]:
    """Causal attention of tokens at `positions` (int32 [B, T]) to every earlier one, through a cache that they join
    first.

    What a cache holds beyond a row's last position is never looked at."""
    shape, row = q.shape, jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    q, k, v = h.split(q, k, v, positions)
    k, v = (old.at[row, positions].set(new) for old, new in zip(cache, (k, v), strict=True))
    mask = jnp.arange(k.shape[1], dtype=jnp.int32) <= positions[:, None, :, None]
    return _softmax_attention(q, k, v, mask, 0.0, None, None).reshape(shape), (k, v)
