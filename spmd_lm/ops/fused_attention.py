"""Kernels of libraries, cuDNN on GPUs and splash on TPUs, as forward and backward.

Their backward passes take the logarithm of a sum over more keys than they are given, as attention around a ring needs;
the public functions do not: they are called by private names, which tests/ops/test_fused_attention.py watches.  Neither
kernel has dropout.  Shapes: ops/attention_spec.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive

from spmd_lm.ops.attention_spec import AttentionSpec, Pairs, unmasked_scores
from spmd_lm.ops.jax_internals import MaskType, cudnn_attention_backward

# ---- cuDNN


def _cudnn_options(pairs: Pairs, spec: AttentionSpec) -> dict[str, Any]:
    """Segments are those of bidirectional rows: 1 for tokens and 0 for the padding after them."""
    segments = pairs.queries.segments, pairs.keys.segments
    assert pairs.words is None and not (spec.causal and segments[0] is not None)
    assert (spec.causal or not spec.span) and not spec.softcap
    queries, keys = (None if ids is None else ids.sum(1, dtype=jnp.int32) for ids in segments)
    return {"query_seq_lengths": queries, "key_value_seq_lengths": keys}


def cudnn_forward(q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec) -> tuple[Array, Array]:
    options = _cudnn_options(pairs, spec)
    options["local_window_size"] = (spec.span - 1, 0) if spec.span else None
    run = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", return_residual=True)
    out, logsumexp = run(q, k, v, is_causal=spec.causal, scale=spec.scale, **options)
    return out, logsumexp.swapaxes(1, 2)


def cudnn_backward(
    q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec, out: Array, logsumexp: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    queries, keys = _cudnn_options(pairs, spec).values()
    mask = MaskType.CAUSAL if spec.causal else MaskType.NO_MASK if queries is None else MaskType.PADDING
    results = logsumexp.astype(jnp.float32), out, d_out.astype(q.dtype)
    how: dict[str, Any] = {"scale": spec.scale_of(q), "mask": mask, "window": spec.span}
    return cudnn_attention_backward(q, k, v, (queries, keys), results, **how)


# ---- splash


def _splash_kernel(time: int, shared: int, grouped: bool, spec: AttentionSpec, interpret: bool, **options: Any) -> Any:
    """shared: query heads of a call."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    square, around = (time, time), spec.span and spec.span - 1
    mask: Any = masks.CausalMask(square) if spec.causal else masks.FullMask(square)
    mask = masks.LocalMask(square, (around, 0 if spec.causal else around), 0) if spec.span else mask
    make_kernel = splash.make_splash_mqa if grouped else splash.make_splash_mha
    options |= {"attn_logits_soft_cap": spec.softcap, "interpret": interpret}
    return make_kernel(masks.MultiHeadMask([mask] * shared), head_shards=1, q_seq_shards=1, **options)


class _Splash:
    """Calls of splash: arrays as it takes them, for each row and, where heads share keys, for each of these."""

    def __init__(self, q: Array, k: Array, pairs: Pairs):
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

        assert pairs.words is None
        self.kv_heads, self.grouped = k.shape[2], q.shape[2] != k.shape[2]
        self.shared = q.shape[2] // self.kv_heads if self.grouped else q.shape[2]
        queries, keys = pairs.queries.segments, pairs.keys.segments
        self.segments = None if queries is None or keys is None else splash.SegmentIds(queries, keys)

    def of_queries(self, x: Array) -> Array:
        """[B, H, T, ...] -> [B, G, H / G, T, ...], where heads share keys."""
        return x.reshape(x.shape[0], self.kv_heads, self.shared, *x.shape[2:]) if self.grouped else x

    def whole(self, x: Array) -> Array:
        return x.reshape(x.shape[0], -1, *x.shape[3:]) if self.grouped else x

    def run(self, call: Any, *arrays: Array) -> Any:
        """call(*arrays, segments of a row)."""
        axes = *[0] * len(arrays), None
        call = jax.vmap(call, in_axes=axes) if self.grouped else call
        return jax.vmap(call, in_axes=(*axes[:-1], None if self.segments is None else 0))(*arrays, self.segments)


def splash_forward(
    q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec, interpret: bool = False
) -> tuple[Array, Array]:
    calls = _Splash(q, k, pairs)
    kernel = _splash_kernel(q.shape[1], calls.shared, calls.grouped, spec, interpret, save_residuals=True)
    q, k, v = (x.swapaxes(1, 2) for x in (q * spec.scale_of(q), k, v))
    out, (logsumexp,) = calls.run(kernel, calls.of_queries(q), k, v)
    return calls.whole(out).swapaxes(1, 2), calls.whole(logsumexp)


def splash_backward(
    q: Array,
    k: Array,
    v: Array,
    pairs: Pairs,
    spec: AttentionSpec,
    out: Array,
    logsumexp: Array,
    d_out: Array,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    calls = _Splash(q, k, pairs)
    kernel = _splash_kernel(q.shape[1], calls.shared, calls.grouped, spec, interpret)
    names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function")
    static: Any = *(kernel.kwargs[name] for name in names), spec.softcap, interpret

    backward: Any = splash._splash_attention_bwd

    def call(q, k, v, out, logsumexp, d_out, segments):
        saved = q, k, v, segments, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info
        return backward(False, *static, saved, d_out)[3:6]

    scale, of_queries = spec.scale_of(q), calls.of_queries
    queries, keys, values, result, d_result = (x.swapaxes(1, 2) for x in (q * scale, k, v, out, d_out.astype(q.dtype)))
    saved = of_queries(result), of_queries(logsumexp.astype(jnp.float32)), of_queries(d_result)
    d_q, d_k, d_v = calls.run(call, of_queries(queries), keys, values, *saved)
    d_q, d_k, d_v = (x.swapaxes(1, 2) for x in (calls.whole(d_q), d_k, d_v))
    return d_q * scale, d_k, d_v


# ---- a stand-in

fused_attention_p = Primitive("fused_attention")
fused_attention_vjp_p = Primitive("fused_attention_vjp")
for _primitive in (fused_attention_p, fused_attention_vjp_p):
    _primitive.multiple_results = True
fused_attention_p.def_abstract_eval(
    lambda q, k, v, unmasked: (q, q.update(shape=(q.shape[0], q.shape[2], q.shape[1]), dtype=jnp.dtype("float32")))
)
fused_attention_vjp_p.def_abstract_eval(lambda q, k, v, out, logsumexp, d_out, unmasked: (q, k, v))


def traced_forward(q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec) -> tuple[Array, Array]:
    """Stands for any such kernel in a trace, with its reads and writes; cannot be compiled."""
    unmasked = unmasked_scores(q.shape[1], spec.causal, spec.span)
    return tuple(fused_attention_p.bind(q, k, v, unmasked=unmasked))


def traced_backward(
    q: Array, k: Array, v: Array, pairs: Pairs, spec: AttentionSpec, out: Array, logsumexp: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    unmasked = unmasked_scores(q.shape[1], spec.causal, spec.span)
    return tuple(fused_attention_vjp_p.bind(q, k, v, out, logsumexp, d_out, unmasked=unmasked))
