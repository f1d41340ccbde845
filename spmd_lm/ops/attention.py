"""Attention, and the one place where its kernel is chosen: cuDNN on GPU, splash on TPU, XLA elsewhere.

Each device attends with its own heads.  Shapes: B batch, T time, S keys' time, H heads here, K head width.  Softmax is
float32 or wider.
"""

import jax
import jax.numpy as jnp

from spmd_lm import axes
from spmd_lm.errors import ConfigError
from spmd_lm.ops.dropout import Draw, dropout

SITE = 0
"""The dropout site of attention probabilities."""


def choose(
    kernel: str, platform: str, *, rate: float, dtype: str, time: int, head_width: int, packed: bool
) -> tuple[str, str]:
    """The kernel that `kernel` ('auto' or a name) means here, and why.  ConfigError for one that cannot run.

    rate: dropout of the probabilities; time: sequence length; packed: rows hold several documents."""
    fused = {"gpu": "cudnn", "tpu": "splash"}.get(platform)
    wanted = fused if kernel == "auto" else kernel
    if wanted is None or wanted == "xla":
        return "xla", f"no fused kernel for {platform}" if kernel == "auto" else "as configured"
    cudnn = wanted == "cudnn"
    obstacles = {
        f"{wanted} does not run on {platform}": wanted != fused,
        f"attention_dropout={rate}: fused kernels have no dropout that every layout repeats": rate > 0,
        f"cuDNN takes 16-bit types, not {dtype}": cudnn and dtype not in ("bfloat16", "float16"),
        f"cuDNN takes heads of a multiple of 8, up to 128 wide, not {head_width}": (
            cudnn and (head_width % 8 > 0 or head_width > 128)
        ),
        "cuDNN takes no segment ids": cudnn and packed,
        f"splash takes multiples of 128 positions, not {time}": not cudnn and time % 128 > 0,
    }
    found = [what for what, is_so in obstacles.items() if is_so]
    if not found:
        return wanted, f"fused, on {platform}" if kernel == "auto" else "as configured"
    if kernel == "auto":
        return "xla", found[0]
    raise ConfigError(f"model.attention={kernel}: {'; '.join(found)}. Use model.attention=auto or xla.")


def _softmax_attention(q, k, v, mask, rate, keys, row):
    """q: [B, T, H, K]; k, v: [B, S, H, K]; mask: broadcastable to [B, H, T, S]; row: [T, 1], queries' places in the
    sequence."""
    s = jnp.einsum(
        "bthk,bshk->bhts", q * q.shape[-1] ** -0.5, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32)
    )
    p = jax.nn.softmax(jnp.where(mask, s, -1e30), axis=-1).astype(q.dtype)
    if rate:
        p = dropout(p, rate, keys, row, jnp.arange(k.shape[1], dtype=jnp.uint32))
    return jnp.einsum("bhts,bshk->bthk", p, v)


def _xla(q, k, v, segments, rate, keys):
    """Causal attention in two blocks of queries: the first never looks at the second half of the keys (-4% of a step on
    a CPU)."""
    time = q.shape[1]
    blocks = 2 if time % 2 == 0 and time >= 128 else 1
    out = []
    for i in range(blocks):
        start, end = i * time // blocks, (i + 1) * time // blocks
        row, column = jnp.arange(start, end)[:, None], jnp.arange(end)
        mask = (column <= row)[None, None]
        if segments is not None:
            mask = mask & (segments[:, None, start:end, None] == segments[:, None, None, :end])
        out.append(
            _softmax_attention(q[:, start:end], k[:, :end], v[:, :end], mask, rate, keys, row.astype(jnp.uint32))
        )
    return jnp.concatenate(out, axis=1)


def _cudnn(q, k, v, segments, rate, keys):
    assert segments is None and not rate
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _splash(q, k, v, segments, rate, keys, interpret=False):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    assert not rate
    time, heads = q.shape[1:3]
    causal = masks.MultiHeadMask([masks.CausalMask((time, time))] * heads)
    kernel = splash.make_splash_mha(causal, head_shards=1, q_seq_shards=1, interpret=interpret)
    ids = None if segments is None else splash.SegmentIds(segments, segments)
    heads_first = [x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v)]
    return jax.vmap(kernel, in_axes=(0, 0, 0, None if ids is None else 0))(*heads_first, ids).swapaxes(1, 2)


KERNELS = {"xla": _xla, "cudnn": _cudnn, "splash": _splash}


def _split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def attention(
    q, k, v, *, heads: int, kernel: str, rate: float = 0.0, draw: Draw | None = None, segments=None
) -> jax.Array:
    """Causal self-attention.  q, k, v: [B, T, H x K] -> the same.  segments: int32 [B, T], documents that do not see
    each other.

    heads: of all devices.  kernel: a key of KERNELS.  rate: dropout of the probabilities, applied when there is a
    `draw`."""
    rate, mine = rate if draw is not None else 0.0, heads // axes.shards("heads")
    keys = None
    if rate:
        assert draw is not None
        keys = tuple(key[:, :, None, None] for key in draw.keys(SITE, axes.places("heads", mine)))
    out = KERNELS[kernel](_split(q, mine), _split(k, mine), _split(v, mine), segments, rate, keys)
    return out.reshape(q.shape)


Cache = tuple[jax.Array, jax.Array]
"""Keys and values, [B, S, H x K] each, by position."""


def attention_with_cache(q, k, v, cache: Cache, *, heads: int, positions: jax.Array) -> tuple[jax.Array, Cache]:
    """Causal attention of tokens at `positions` (int32 [B, T]) to every earlier one, through a cache that they join
    first.

    What a cache holds beyond a row's last position is never looked at."""
    mine = heads // axes.shards("heads")
    row = jnp.arange(q.shape[0], dtype=jnp.int32)[:, None]
    k, v = (old.at[row, positions].set(new) for old, new in zip(cache, (k, v), strict=True))
    mask = jnp.arange(k.shape[1], dtype=jnp.int32) <= positions[:, None, :, None]
    out = _softmax_attention(_split(q, mine), _split(k, mine), _split(v, mine), mask, 0.0, None, None)
    return out.reshape(q.shape), (k, v)
