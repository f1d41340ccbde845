"""Layer norm and RMS norm with their own backward: in jax's, a GPU would write float32 arrays of the stream's size to
memory and read them again (docs/performance.md).

x is [..., width], the statistics of its rows [..., 1], float32 or wider."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.ops.collectives import broadcast_like, partial_sum
from spmd_lm.ops.compiler_workarounds import saved_statistics


def upcast(x: Array) -> Array:
    """x in float32, or in its own dtype where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x: Array, scale: Array, bias: Array | None, eps: float = 1e-5, center: bool = True) -> Array:
    """Layer or RMS norm, its statistics float32 or wider: in bfloat16 a wide row's mean is wrong in its third digit.

    scale, bias: [width].  center: whether to subtract the mean; RMS norm does not (arXiv:1910.07467)."""
    return _forward(x, scale, bias, eps, center)[0]


def _forward(x, scale, bias, eps, center):
    mean, mean_square = _moments(upcast(x)) if center else (None, jnp.square(upcast(x)).mean(-1, keepdims=True))
    factor = lax.rsqrt(mean_square + eps)
    h = _normalized(x, mean, factor)
    y = h * broadcast_like(upcast(scale), h)
    y = y if bias is None else y + broadcast_like(upcast(bias), y)
    return y.astype(x.dtype), (x, scale, bias, mean, factor)


def _backward(eps, center, saved, g):
    x, scale, bias, *statistics = saved
    mean, factor = saved_statistics(statistics)
    h, g = _normalized(x, mean, factor), upcast(g)
    d_scale = partial_sum(g * h, range(g.ndim - 1), gradient_of=scale).astype(scale.dtype)
    d_bias = None if bias is None else partial_sum(g, range(g.ndim - 1), gradient_of=bias).astype(bias.dtype)
    d_h = g * broadcast_like(upcast(scale), g)
    d_x = d_h - h * (d_h * h).mean(-1, keepdims=True)
    d_x = d_x - d_h.mean(-1, keepdims=True) if center else d_x
    return (d_x * factor).astype(x.dtype), d_scale, d_bias


layer_norm.defvjp(_forward, _backward)


def _normalized(x: Array, mean: Array | None, factor: Array) -> Array:
    return (upcast(x) if mean is None else upcast(x) - mean) * factor


def _moments(h: Array) -> tuple[Array, Array]:
    """Mean and variance of rows."""
    return lax.platform_dependent(h, cuda=_moments_in_one_pass, default=_moments_in_two_passes)


def _moments_in_two_passes(h: Array) -> tuple[Array, Array]:
    mean = h.mean(-1, keepdims=True)
    return mean, jnp.square(h - mean).mean(-1, keepdims=True)


def _moments_in_one_pass(h: Array) -> tuple[Array, Array]:
    """One reduction for both, which merges the moments of two sets (Chan, Golub and LeVeque 1983).  A GPU then reads h
    only once; a CPU takes six times as long as for two passes."""
    zero = jnp.zeros((), h.dtype)
    sets = jnp.ones_like(h), h, jnp.zeros_like(h)
    count, mean, squares = lax.reduce(sets, (zero, zero, zero), _merge, (h.ndim - 1,))
    return mean[..., None], (squares / count)[..., None]


def _merge(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """(count, mean, sum of squared differences from it) of the union of two sets."""
    (count, mean, squares), (other_count, other_mean, other_squares) = a, b
    total = count + other_count
    share = other_count / jnp.maximum(total, 1)
    difference = other_mean - mean
    squares = squares + other_squares + difference * difference * (count * share)
    return total, mean + difference * share, squares
