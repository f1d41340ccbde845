"""The parameters and layers that every block is built from."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.axes import EXPERTS, DimNames
from spmd_lm.config.adapters import SUFFIX
from spmd_lm.config.schema import Model
from spmd_lm.config.types import Bias, FakeQuantKind
from spmd_lm.errors import ConfigError
from spmd_lm.ops.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from spmd_lm.ops.collectives import (
    broadcast_like,
    copy_to_region,
    join_heads,
    partial_sum,
    reduce_from_region,
    split_heads,
)
from spmd_lm.ops.dense import Columns, Matrix
from spmd_lm.ops.eight_bits import EightBits
from spmd_lm.ops.few_bits import CodedMatrix, FakeQuant, FakeQuantMatrix
from spmd_lm.ops.low_rank import LowRankSum
from spmd_lm.ops.norm import layer_norm, upcast

INIT_STD = 0.02  # GPT-2's; divided by sqrt(2 x layers) for the matrices that end a residual branch


class ParamInit(NamedTuple):
    """Creates the parameters of a model: matrices and tables N(0, std), drawn in the order of the calls."""

    c: Model
    rngs: nnx.Rngs
    dtype: str

    def table(self, rows: int, name: str) -> nnx.Param:
        return self._normal((rows, self.c.width), (name, "width"), INIT_STD)

    def matrix(self, size: int, name: str, std: float = INIT_STD) -> nnx.Param:
        """[width, size], even if it is multiplied transposed."""
        return self._normal((self.c.width, size), ("width", name), std)

    def router(self, experts: int) -> nnx.Param:
        """[width, experts], which is not sharded along experts."""
        return self._normal((self.c.width, experts), ("width", None), INIT_STD)

    def matrices(self, experts: int, size: int, name: str, std: float = INIT_STD) -> nnx.Param:
        """A matrix [width, size] for each expert."""
        return self._normal((experts, self.c.width, size), (EXPERTS, "width", name), std)

    def biases(self, experts: int, size: int, name: str, where: Bias | None = None) -> nnx.Param | None:
        """Zeros for each expert, if the model has biases there."""
        zeros = jnp.zeros((experts, size), self.dtype)
        return nnx.Param(zeros, out_sharding=(EXPERTS, name)) if self.c.has_bias(where) else None

    def _normal(self, shape: tuple[int, ...], names: DimNames, std: float) -> nnx.Param:
        return nnx.Param(jax.random.normal(self.rngs.params(), shape, self.dtype) * std, out_sharding=names)

    def vector(self, value: float, size: int, name: str) -> nnx.Param:
        return nnx.Param(jnp.full((size,), value, self.dtype), out_sharding=(name,))

    def bias(self, size: int, name: str, where: Bias | None = None) -> nnx.Param | None:
        """Zeros, if the model has biases there."""
        return self.vector(0, size, name) if self.c.has_bias(where) else None

    def linear(self, size: int, name: str, where: Bias | None = None) -> tuple[nnx.Param, nnx.Param | None]:
        """A matrix [width, size] and its bias or None."""
        return self.matrix(size, name), self.bias(size, name, where)


@jax.custom_vjp
def broadcast_over_tokens(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcasts vector [width] to the shape of x [..., width].  Its gradient, a sum over all tokens, has too many
    terms for bfloat16: it is summed in float32."""
    return broadcast_like(vector, x)


def _broadcast_forward(vector, x):
    return broadcast_like(vector, x), vector


def _broadcast_backward(vector, g):
    total = partial_sum(upcast(g), range(g.ndim - 1), gradient_of=vector)
    return total.astype(vector.dtype), None


broadcast_over_tokens.defvjp(_broadcast_forward, _broadcast_backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
    """matrix [width, other], each column times its scale [other]."""

    matrix: Matrix | CodedMatrix
    scale: jax.Array

    @property
    def entries(self) -> jax.Array:
        return self.matrix.entries * self.scale

    def select(self, columns: Columns) -> "ScaledMatrix":
        """The matrix of some of its columns, with their scales."""
        return ScaledMatrix(self.matrix.select(columns), columns(self.scale))

    def multiply(self, x: jax.Array, *, transpose: bool = False) -> jax.Array:
        """See Matrix.multiply."""
        x = x * broadcast_over_tokens(self.scale, x) if transpose else x
        y = self.matrix.multiply(x, transpose=transpose)
        return y if transpose else y * broadcast_over_tokens(self.scale, y)


@dataclasses.dataclass(frozen=True)
class ObservedMatrix:
    """A matrix that shows the inputs that it multiplies."""

    matrix: "Weights"
    show: Callable[[jax.Array], None]

    @property
    def entries(self) -> jax.Array:
        return self.matrix.entries

    def select(self, columns: Columns) -> "ObservedMatrix":
        """The matrix of some of its columns."""
        return ObservedMatrix(self.matrix.select(columns), self.show)

    def multiply(self, x: jax.Array, *, transpose: bool = False) -> jax.Array:
        """See Matrix.multiply."""
        self.show(x)
        return self.matrix.multiply(x, transpose=transpose)


Weights = Matrix | CodedMatrix | FakeQuantMatrix | LowRankSum | ScaledMatrix | ObservedMatrix
"""Matrices that multiply."""


def add_bias(y: jax.Array, bias: nnx.Param | jax.Array | None) -> jax.Array:
    """y [..., width] plus bias [width], if there is one."""
    return y if bias is None else y + broadcast_over_tokens(bias[...], y)


def column_parallel(x: jax.Array, weights: tuple[Weights, ...], name: str, *, ordered: bool = True) -> list[jax.Array]:
    """The residual stream x times each of `weights` [width, other], sharded along `name`, for the whole sequence."""
    del ordered  # it always is
    x = copy_to_region(x, name)
    return [w.multiply(x) for w in weights]


def row_parallel(h: jax.Array, w: Weights, name: str, *, ordered: bool = True) -> jax.Array:
    """h [batch, time, other] times w [width, other] transposed, both sharded along `name`, as the residual stream."""
    del ordered
    return reduce_from_region(w.multiply(h, transpose=True), name)


class Linears(NamedTuple):
    """The two linears of a residual branch with their collectives: column-parallel in, row-parallel out.  Both take
    `ordered`: whether tokens must be in order in between."""

    column: Callable[..., list[jax.Array]] = column_parallel
    row: Callable[..., jax.Array] = row_parallel

    def checkpointed(self, checkpoint: Callable) -> Self:
        """Puts `column` under remat: each device saves its shard of the input's sequence, and backward gathers it again
        (arXiv:2205.05198, section 4.2.2)."""

        def column(x: jax.Array, weights: tuple[Weights, ...], name: str, *, ordered: bool) -> list[jax.Array]:
            return checkpoint(lambda x, weights: self.column(x, weights, name, ordered=ordered))(x, weights)

        return self._replace(column=column)


def _gathering_columns(x: jax.Array, weights: tuple[Matrix, ...], name: str, *, ordered: bool) -> list[jax.Array]:
    return all_gather_matmul(x, tuple(w.entries for w in weights), name, ordered, weights[0].eight_bits)


def _scattering_rows(h: jax.Array, w: Matrix, name: str, *, ordered: bool) -> jax.Array:
    return matmul_reduce_scatter(h, w.entries, name, ordered, w.eight_bits)


COLLECTIVE_MATMUL = Linears(_gathering_columns, _scattering_rows)
"""Linears as collective matmuls, which hide their own communication."""


class BlockLinears(NamedTuple):
    """Linears of the branches of a block, by their keys."""

    attention: Linears = Linears()
    mlp: Linears = Linears()


class HasMatrices(nnx.Module):
    row_parallel: ClassVar[tuple[str, ...]] = ()
    """Names of the matrices that are multiplied transposed, such as those that end a branch."""
    fake_quant: FakeQuantKind = "none"
    """How the matrices are rounded when they multiply."""
    eight_bits: EightBits | None = None
    """How the matrices multiply in eight bits."""
    used: tuple[str, ...] = ()
    """Names of the matrices that `matrix` has returned."""
    show: Callable[[str, jax.Array], None] | None = None
    """Called with a matrix's name and each of its inputs."""

    def matrix(self, name: str, context: Any = None) -> Weights:
        """The matrix `name`, made of its stored arrays, with its adapter.  context: the block's BlockContext; a
        head has none."""
        stored, adapter = getattr(self, name), getattr(self, name + SUFFIX, None)
        object.__setattr__(self, "used", (*self.used, name))  # which nnx would refuse in a checkpoint
        if self.fake_quant != "none":
            return FakeQuantMatrix(stored[...], FakeQuant(self.fake_quant, name in self.row_parallel))
        matrix = Matrix(stored[...], eight_bits=self.eight_bits) if isinstance(stored, nnx.Param) else stored()
        if self.show:
            return ObservedMatrix(matrix, functools.partial(self.show, name))
        if adapter is None:
            return matrix
        if context is None:
            raise ConfigError(f"the matrix '{name}' has an adapter: write self.matrix('{name}', context) in its block.")
        return adapter(matrix, context)

    def bias(self, name: str) -> jax.Array | None:
        """The bias of the matrix `name`; None for none."""
        bias, adapter = getattr(self, f"{name}_bias"), getattr(self, name + SUFFIX, None)
        return None if bias is None else bias[...] if adapter is None else adapter.of_bias(bias[...])


class Norm(nnx.Module):
    """The model's norm, over the last dimension, `width`."""

    def __init__(self, init: ParamInit):
        c = init.c
        self.zero_centered, self.center = c.norm_type == "zero_centered_rms", c.norm_type == "layer"
        self.eps = c.norm_eps
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
        """x: [batch, time, heads x head width], with any number of heads."""
        scale = _scale_of(self)
        return join_heads(layer_norm(split_heads(x, scale.size), scale, None, self.eps, False))


def _scale_of(norm: Norm | HeadNorm) -> jax.Array:
    """The factor that a norm multiplies its normalized input by."""
    scale = norm.scale[...]
    return 1 + upcast(scale) if norm.zero_centered else scale
