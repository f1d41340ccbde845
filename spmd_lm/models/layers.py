"""The parts that every block is made of.  Matrices are stored [width, other], whichever way they are used."""

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
"""GPT-2's; the matrices that end a residual branch have it divided by sqrt(2 x layers)."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], names: DimNames, std: float, dtype: str) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * std, out_sharding=names)


def constant(value: float, size: int, name: str, dtype: str) -> nnx.Param:
    return nnx.Param(jnp.full((size,), value, dtype), out_sharding=(name,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x: jax.Array, w: jax.Array, transpose: bool) -> jax.Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (int(transpose),)), ((), ())))


def _matmul_backward(transpose, saved, g):
    x, w = saved  # w itself: whoever gathers it again tells by identity what need not be kept
    d_x = lax.dot_general(g, w, (((g.ndim - 1,), (int(not transpose),)), ((), ())))
    # One 2-D product: contracting batch and time as two dimensions takes 16% more of a whole step on a CPU.
    rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    left, right = (g, x) if transpose else (x, g)
    return d_x, lax.dot_general(rows(left), rows(right), (((0,), (0,)), ((), ())))


_matmul.defvjp(lambda x, w, transpose: (_matmul(x, w, transpose), (x, w)), _matmul_backward)


@jax.custom_vjp
def _plus(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias


def _plus_backward(saved, g):
    (bias,) = saved
    wide = jnp.promote_types(g.dtype, jnp.float32)  # as many addends as there are tokens: too many for bfloat16
    return g, g.sum(tuple(range(g.ndim - 1)), dtype=wide).astype(bias.dtype)


_plus.defvjp(lambda y, bias: (_plus(y, bias), (bias,)), _plus_backward)


def add_bias(y: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """y [..., width] plus bias [width], if there is one."""
    return y if bias is None else _plus(y, bias[...])


def widened(x: jax.Array) -> jax.Array:
    """x in float32, or in its own dtype where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def dense(x: jax.Array, w: jax.Array, *, transpose: bool = False) -> jax.Array:
    """x [..., width] times w [width, other]; with `transpose`, x [..., other] times w transposed.

    Every product of a block with a matrix of parameters goes through here: what a backend or a quantizer wants of it
    has one home."""
    return _matmul(x, w, transpose)


def project(x: jax.Array, weights: Sequence[jax.Array], name: str) -> list[jax.Array]:
    """The residual stream x [batch, sequence, width], whole, times each of `weights` [width, other], split along
    `name`: column-parallel."""
    x = copy_to_region(x, name)
    return [dense(x, w) for w in weights]


Project = Callable[[jax.Array, Sequence[jax.Array], str], list[jax.Array]]

lean = functools.partial(jax.checkpoint, prevent_cse=False)
"""For what is cheap to compute again: backward finds its inputs alone saved.  A layer norm saves five widths else."""


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, eps: float = 1e-5) -> jax.Array:
    """Statistics in float32 or wider: in bfloat16 the mean of a wide row is wrong in its third digit."""

    @lean
    def run(x, scale, bias):
        h = widened(x)
        h = h - h.mean(-1, keepdims=True)
        h = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + eps) * scale
        return (h if bias is None else h + bias).astype(x.dtype)

    return run(x, scale, bias)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Without a mean and a bias (arXiv:1910.07467); statistics in float32 or wider."""

    @lean
    def run(x, scale):
        h = widened(x)
        return (h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + eps) * scale).astype(x.dtype)

    return run(x, scale)


class Norm(nnx.Module):
    """Over the last dimension, `width`, of the kind that the model has."""

    def __init__(self, c: Model, dtype: str):
        self.scale = constant(1, c.width, "width", dtype)
        self.bias = constant(0, c.width, "width", dtype) if c.use_bias and c.norm_type == "layer" else None
        self.kind, self.eps = c.norm_type, c.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.kind == "rms":
            return rms_norm(x, self.scale[...], self.eps)
        return layer_norm(x, self.scale[...], None if self.bias is None else self.bias[...], self.eps)
