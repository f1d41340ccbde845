"""The layers that every block is built from.  Matrices are stored [width, other], whichever way they are used."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spmd_lm.axes import DimNames
from spmd_lm.config.schema import Model
from spmd_lm.ops.collectives import copy_to_region

INIT_STD = 0.02
"""GPT-2's; it is divided by sqrt(2 x layers) for the matrices that end a residual branch."""

recompute = functools.partial(jax.checkpoint, prevent_cse=False)
"""For elementwise work that is cheap to run again: only its inputs are saved.  A layer norm would save five
activations of the stream's width."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], names: DimNames, std: float, dtype: str) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * std, out_sharding=names)


def constant(value: float, size: int, name: str, dtype: str) -> nnx.Param:
    return nnx.Param(jnp.full((size,), value, dtype), out_sharding=(name,))


def bias(c: Model, size: int, name: str, dtype: str) -> nnx.Param | None:
    """A bias of zeros, if the model has biases."""
    return constant(0, size, name, dtype) if c.use_bias else None


def widen(x: jax.Array) -> jax.Array:
    """x in float32, or in its own dtype where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# --- matrix products and biases ---------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, w: jax.Array, transpose: bool) -> jax.Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (int(transpose),)), ((), ())))


def _matmul_forward(x, w, transpose):
    return _matmul(x, w, transpose), (x, w)  # w itself: with_gathered_weights drops it from the residuals by identity


def _matmul_backward(transpose, saved, g):
    x, w = saved
    d_x = lax.dot_general(g, w, (((g.ndim - 1,), (int(not transpose),)), ((), ())))
    # One 2-D product: contracting batch and time as two dimensions takes 16% more of a whole step on a CPU.
    left, right = (g, x) if transpose else (x, g)
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    return d_x, lax.dot_general(left, right, (((0,), (0,)), ((), ())))


_matmul.defvjp(_matmul_forward, _matmul_backward)


def dense(x: jax.Array, w: jax.Array, *, transpose: bool = False) -> jax.Array:
    """x [..., width] times w [width, other]; with `transpose`, x [..., other] times w transposed.

    Every product of a block with a parameter matrix goes through here, so that a backend or a quantizer has one place
    to change."""
    return _matmul(x, w, transpose)


@jax.custom_vjp
def _add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias


def _add_bias_forward(y, bias):
    return _add_bias(y, bias), bias


def _add_bias_backward(bias, g):
    wide = jnp.promote_types(g.dtype, jnp.float32)  # as many addends as there are tokens: too many for bfloat16
    return g, g.sum(tuple(range(g.ndim - 1)), dtype=wide).astype(bias.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def add_bias(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """y [..., width] plus bias [width], if there is one."""
    return y if bias is None else _add_bias(y, bias[...])


def column_parallel(x: jax.Array, weights: Sequence[jax.Array], name: str) -> list[jax.Array]:
    """The residual stream x [batch, sequence, width] times each of `weights` [width, other], which are sharded along
    `name`; the result has the whole sequence."""
    x = copy_to_region(x, name)
    return [dense(x, w) for w in weights]


ColumnParallel = Callable[[jax.Array, Sequence[jax.Array], str], list[jax.Array]]


# --- norms ------------------------------------------------------------------------------------------------------------


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, eps: float = 1e-5) -> jax.Array:
    """Statistics in float32 or wider: in bfloat16 the mean of a wide row is wrong in its third digit."""

    @recompute
    def run(x, scale, bias):
        h = widen(x)
        h = h - h.mean(-1, keepdims=True)
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + eps) * scale
        return (h if bias is None else h + bias).astype(x.dtype)

    return run(x, scale, bias)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Without a mean and a bias (arXiv:1910.07467); statistics in float32 or wider."""

    @recompute
    def run(x, scale):
        h = widen(x)
        return (h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + eps) * scale).astype(x.dtype)

    return run(x, scale)


class Norm(nnx.Module):
    """The model's norm, over the last dimension, `width`."""

    def __init__(self, c: Model, dtype: str):
        self.scale = constant(1, c.width, "width", dtype)
        self.bias = bias(c, c.width, "width", dtype) if c.norm_type == "layer" else None
        self.norm_type, self.eps = c.norm_type, c.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.norm_type == "rms":
            return rms_norm(x, self.scale[...], self.eps)
        return layer_norm(x, self.scale[...], None if self.bias is None else self.bias[...], self.eps)
