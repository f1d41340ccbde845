"""The parameters and layers that every block is built from."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from spmd_lm.axes import DimNames
from spmd_lm.config.schema import Model
from spmd_lm.ops.collectives import copy_to_region

INIT_STD = 0.02  # GPT-2's; divided by sqrt(2 x layers) for the matrices that end a residual branch
ColumnParallel = Callable[[jax.Array, Sequence[jax.Array], str], list[jax.Array]]  # as column_parallel

recompute = functools.partial(jax.checkpoint, prevent_cse=False)
"""For elementwise work: only its inputs are saved.  A layer norm would save five activations of the stream's width."""


class ParamInit(NamedTuple):
    """Creates the parameters of a model: matrices and tables N(0, std), drawn in the order of the calls."""

    c: Model
    rngs: nnx.Rngs
    dtype: str

    def table(self, rows: int, name: str) -> nnx.Param:
        return self._normal((rows, self.c.width), (name, "width"), INIT_STD)

    def matrix(self, size: int, name: str, std: float = INIT_STD) -> nnx.Param:
        """[width, size], whichever way it is used."""
        return self._normal((self.c.width, size), ("width", name), std)

    def _normal(self, shape: tuple[int, ...], names: DimNames, std: float) -> nnx.Param:
        return nnx.Param(jax.random.normal(self.rngs.params(), shape, self.dtype) * std, out_sharding=names)

    def vector(self, value: float, size: int, name: str) -> nnx.Param:
        return nnx.Param(jnp.full((size,), value, self.dtype), out_sharding=(name,))

    def bias(self, size: int, name: str) -> nnx.Param | None:
        """Zeros, if the model has biases."""
        return self.vector(0, size, name) if self.c.use_bias else None

    def linear(self, size: int, name: str) -> tuple[nnx.Param, nnx.Param | None]:
        """A matrix [width, size] and its bias."""
        return self.matrix(size, name), self.bias(size, name)


def widen(x: jax.Array) -> jax.Array:
    """x in float32, or in its own dtype where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: jax.Array, w: jax.Array, transpose: bool = False) -> jax.Array:
    """x [..., width] times w [width, other]; with `transpose`, x [..., other] times w transposed.

    All products with the matrices of blocks and heads go through here, except those with the token table: one place to
    change for a backend or a quantizer."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (int(transpose),)), ((), ())))


def _dense_forward(x, w, transpose):
    return dense(x, w, transpose), (x, w)  # w itself: with_gathered_weights drops it from the residuals by identity


def _dense_backward(transpose, saved, g):
    x, w = saved
    d_x = lax.dot_general(g, w, (((g.ndim - 1,), (int(not transpose),)), ((), ())))
    # One 2-D product: contracting batch and time as two dimensions takes 16% more of a whole step on a CPU.
    left, right = (g, x) if transpose else (x, g)
    left, right = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    return d_x, lax.dot_general(left, right, (((0,), (0,)), ((), ())))


dense.defvjp(_dense_forward, _dense_backward)


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
    """The residual stream x times each of `weights` [width, other], sharded along `name`; the sequence is whole."""
    x = copy_to_region(x, name)
    return [dense(x, w) for w in weights]


def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, eps: float = 1e-5, *, center: bool = True
) -> jax.Array:
    """Statistics in float32 or wider: in bfloat16 the mean of a wide row is wrong in its third digit.

    center: whether to subtract the mean; RMS norm does not (arXiv:1910.07467)."""

    @recompute
    def run(x, scale, bias):
        h = widen(x)
        h = h - h.mean(-1, keepdims=True) if center else h
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + eps) * scale
        return (h if bias is None else h + bias).astype(x.dtype)

    return run(x, scale, bias)


class Norm(nnx.Module):
    """The model's norm, over the last dimension, `width`."""

    def __init__(self, init: ParamInit):
        c = init.c
        self.scale = init.vector(1, c.width, "width")
        self.bias = init.bias(c.width, "width") if c.norm_type == "layer" else None
        self.norm_type, self.eps = c.norm_type, c.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, self.eps, center=self.norm_type == "layer")
