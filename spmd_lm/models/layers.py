"""The parameters and layers that every block is built from."""

from collections.abc import Callable
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.axes import DimNames
from spmd_lm.config.schema import Model
from spmd_lm.config.types import Bias
from spmd_lm.ops.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from spmd_lm.ops.collectives import (
    broadcast_like,
    copy_to_region,
    join_heads,
    partial_sum,
    reduce_from_region,
    split_heads,
)
from spmd_lm.ops.dense import Matrix
from spmd_lm.ops.norm import layer_norm, widen

INIT_STD = 0.02  # GPT-2's; divided by sqrt(2 x layers) for the matrices that end a residual branch


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

    def bias(self, size: int, name: str, where: Bias | None = None) -> nnx.Param | None:
        """Zeros, if the model has biases there."""
        return self.vector(0, size, name) if self.c.has_bias(where) else None

    def linear(self, size: int, name: str, where: Bias | None = None) -> tuple[nnx.Param, nnx.Param | None]:
        """A matrix [width, size] and its bias."""
        return self.matrix(size, name), self.bias(size, name, where)


@jax.custom_vjp
def broadcast_over_tokens(vector: jax.Array, x: jax.Array) -> jax.Array:
    """vector [width] in the shape of x [..., width].  Its gradient is a sum over as many tokens as there are: too many
    addends for bfloat16."""
    return broadcast_like(vector, x)


def _broadcast_forward(vector, x):
    return broadcast_like(vector, x), vector


def _broadcast_backward(vector, g):
    total = partial_sum(widen(g), range(g.ndim - 1), gradient_of=vector)
    return total.astype(vector.dtype), None


broadcast_over_tokens.defvjp(_broadcast_forward, _broadcast_backward)


def add_bias(y: jax.Array, bias: nnx.Param | jax.Array | None) -> jax.Array:
    """y [..., width] plus bias [width], if there is one."""
    return y if bias is None else y + broadcast_over_tokens(bias[...], y)


def column_parallel(x: jax.Array, weights: tuple[Matrix, ...], name: str, *, ordered: bool = True) -> list[jax.Array]:
    """The residual stream x times each of `weights` [width, other], sharded along `name`, for the whole sequence."""
    del ordered  # it always is
    x = copy_to_region(x, name)
    return [w.multiply(x) for w in weights]


def row_parallel(h: jax.Array, w: Matrix, name: str, *, ordered: bool = True) -> jax.Array:
    """h [batch, time, other] times w [width, other] transposed, both sharded along `name`: as the residual stream."""
    del ordered
    return reduce_from_region(w.multiply(h, transpose=True), name)


class BranchProducts(NamedTuple):
    """How a branch leaves the residual stream and comes back to it: products, each with a collective.  Both take
    `ordered`: whether tokens must be in order in between."""

    column: Callable[..., list[jax.Array]] = column_parallel
    row: Callable[..., jax.Array] = row_parallel

    def checkpointed(self, checkpoint: Callable) -> Self:
        """These products under remat: each device saves its shard of the input's sequence, and backward gathers it
        again (arXiv:2205.05198, section 4.2.2)."""

        def column(x: jax.Array, weights: tuple[Matrix, ...], name: str, *, ordered: bool) -> list[jax.Array]:
            return checkpoint(lambda x, weights: self.column(x, weights, name, ordered=ordered))(x, weights)

        return self._replace(column=column)


PRODUCTS_IN_PARTS = BranchProducts(
    lambda x, weights, name, *, ordered: all_gather_matmul(x, tuple(w.entries for w in weights), name, ordered),
    lambda h, w, name, *, ordered: matmul_reduce_scatter(h, w.entries, name, ordered),
)
"""The same, in parts whose communication runs beside other parts."""


class BlockProducts(NamedTuple):
    """Those of the branches of a block, by their keys."""

    attention: BranchProducts = BranchProducts()
    mlp: BranchProducts = BranchProducts()


class HasMatrices(nnx.Module):
    def matrix(self, name: str) -> Matrix:
        """The matrix `name` as products use it, made of the arrays that are stored for it."""
        return Matrix(getattr(self, name)[...])


class Norm(nnx.Module):
    """The model's norm, over the last dimension, `width`."""

    def __init__(self, init: ParamInit):
        c = init.c
        self.zero_centered, self.center, self.eps = (
            c.norm_type == "zero_centered_rms",
            c.norm_type == "layer",
            c.norm_eps,
        )
        self.scale = init.vector(1 - self.zero_centered, c.width, "width")
        self.bias = init.bias(c.width, "width", "norm") if self.center else None

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, _scale_of(self), bias, self.eps, self.center)


class HeadNorm(nnx.Module):
    """An RMS norm over the features of each head; all heads share its scale."""

    def __init__(self, init: ParamInit):
        c = init.c
        self.zero_centered, self.eps = c.norm_type == "zero_centered_rms", c.norm_eps
        self.scale = init.vector(1 - self.zero_centered, c.head_dim, "head_width")

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [batch, time, heads x head width], of any number of heads."""
        scale = _scale_of(self)
        return join_heads(layer_norm(split_heads(x, scale.size), scale, None, self.eps, False))


def _scale_of(norm: Norm | HeadNorm) -> jax.Array:
    """What a norm's result is multiplied by."""
    scale = norm.scale[...]
    return 1 + widen(scale) if norm.zero_centered else scale
