"""A frozen matrix and the low-rank one that is trained beside it: LoRA (arXiv:2106.09685)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spmd_lm.errors import ConfigError
from spmd_lm.ops.collectives import global_indices, row_positions
from spmd_lm.ops.dense import Columns, Matrix, dense
from spmd_lm.ops.dropout import DropoutKey, dropout
from spmd_lm.ops.few_bits import CodedMatrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputDropout:
    """Dropout of a LoRA input.
    key: the layer's.
    rate, site: the matrix's.
    name: the dimension other than `width`.
    checkpoint: jax.checkpoint, so that backward draws the mask again."""

    key: DropoutKey
    rate: float = dataclasses.field(metadata={"static": True})
    site: int = dataclasses.field(metadata={"static": True})
    name: str = dataclasses.field(metadata={"static": True})
    checkpoint: Callable = dataclasses.field(metadata={"static": True})

    def __call__(self, x: jax.Array, transpose: bool) -> jax.Array:
        """Drops entries of x [batch, time, width], or with `transpose` [batch, time, other], alike in any layout."""
        w0, w1 = (word[:, None, None] for word in self.key.words(self.site))
        row = row_positions(x.shape[1]).astype(jnp.uint32)
        column = global_indices(self.name, x.shape[2]) if transpose else jnp.arange(x.shape[2])
        return dropout(x, self.rate, (w0, w1), row[:, None], column.astype(jnp.uint32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankSum:
    """matrix [width, other] + scaling x a x b.  a: multiplies inputs, [width, rank].  b: multiplies the result, [rank,
    other].  transposed: whether the matrix is multiplied transposed; then b x a is added: [width, rank] [rank, other].

    The factor with the dimension `other` is sharded as the matrix is.  This adds no collective: the low-rank product is
    sharded, or a partial sum, as the matrix's own is, and is added to it."""

    matrix: Matrix | CodedMatrix
    a: jax.Array
    b: jax.Array
    scaling: float = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})
    dropout: InputDropout | None = None
    columns: Columns | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def entries(self) -> jax.Array:
        left, right = (self.b, self.a) if self.transposed else (self.a, self.b)
        right = right if self.columns is None else self.columns(right)
        return self.matrix.entries + self.scaling * dense(left, right)

    def select(self, columns: Columns) -> "LowRankSum":
        """The sum with some of its columns."""
        return dataclasses.replace(self, matrix=self.matrix.select(columns), columns=columns)

    def multiply(self, x: jax.Array, *, transpose: bool = False) -> jax.Array:
        """See Matrix.multiply.  Raises ConfigError if a user's module does not multiply as its row_parallel says."""
        if transpose != self.transposed:
            how = "transposed" if transpose else "as it is"
            raise ConfigError(
                f"a matrix with an adapter is multiplied {how}. List it in row_parallel if it is transposed."
            )
        of_a, of_b = (self.columns, None) if transpose else (None, self.columns)

        def low_rank(x: jax.Array, a: jax.Array, b: jax.Array, drop: InputDropout | None) -> jax.Array:
            x = x if drop is None else drop(x, transpose)
            return dense(self.scaling * dense(x, a, transpose, of_a), b, transpose, of_b)

        run = low_rank if self.dropout is None else self.dropout.checkpoint(low_rank)
        return self.matrix.multiply(x, transpose=transpose) + run(x, self.a, self.b, self.dropout)
