"""The private names of jax that operations use, and why no public one would do."""

import inspect
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as _cudnn

MaskType = _cudnn.MaskType
_backward: Any = _cudnn._dot_product_attention_bwd_rule
_HAS_SCORE_MOD = "score_mod" in inspect.signature(_backward).parameters  # from jax 0.12 on


def cudnn_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    lengths: tuple[Array | None, Array | None],
    results: tuple[Array, Array, Array],
    *,
    scale: float,
    mask: _cudnn.MaskType,
    window: int | None,
) -> tuple[Array, Array, Array]:
    """cuDNN's backward pass, from given results; the public function's is from those of its own keys alone.

    lengths: of queries and keys before their padding, int32 [B], or None.
    results: the logarithm of the sum of exponentials [B, H, T], attention, and its gradient.
    window: tokens up to itself that a token attends to."""
    unused, (logsumexp, out, d_out) = jnp.zeros(0, q.dtype), results
    arrays = q, k, v, unused, *(unused if n is None else n for n in lengths), *[unused] * 4
    static = scale, 42, 0.0, (False, False), mask, _cudnn.AttentionLayout.BTNH.value, window
    options = (None, None, False) if _HAS_SCORE_MOD else (True, False)
    saved = *arrays, *([()] if _HAS_SCORE_MOD else []), logsumexp, out
    return tuple(_backward(*static, *options, saved, d_out)[:3])
