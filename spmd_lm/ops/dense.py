"""A matrix of weights, and the matmul with it."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from spmd_lm.ops.collectives import contract, weight_gradient
from spmd_lm.ops.eight_bits import EightBits, dot_of
from spmd_lm.ops.sharding_types import TypeOf

Columns = Callable[[jax.Array], jax.Array]
"""A linear function that selects columns of a matrix."""

View = Callable[[jax.Array], jax.Array]
"""What is multiplied in place of a stored matrix, as a function of it: some of its columns, or the matrix rounded
(FakeQuantMatrix).  Backward computes it again, and differentiates it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Matrix:
    """The matrix [width, other] of a linear: a pytree of its stored arrays, and a method that multiplies.

    Each array is a parameter of its own, which the plan shards, pads, gathers and saves by its dimension names.  This
    type stores one, and `columns` selects some of its columns.  Quantized matrices and those with a low-rank term are
    other types with the same methods; a collective matmul takes `entries` alone.  Backward may save the input and the
    stored arrays, but nothing computed from them: with_gathered_weights drops the arrays by identity, to gather
    again."""

    stored: jax.Array
    columns: Columns | None = dataclasses.field(default=None, metadata={"static": True})
    eight_bits: EightBits | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def entries(self) -> jax.Array:
        return self.stored if self.columns is None else self.columns(self.stored)

    def select(self, columns: Columns) -> "Matrix":
        """The matrix of some of the stored columns."""
        return dataclasses.replace(self, columns=columns)

    def multiply(self, x: jax.Array, *, transpose: bool = False) -> jax.Array:
        """x [..., width] times the matrix: [..., other]; with `transpose`, x [..., other] times it transposed."""
        return dense(x, self.stored, transpose, self.columns, self.eight_bits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dense(
    x: jax.Array,
    w: jax.Array,
    transpose: bool = False,
    view: View | None = None,
    eight_bits: EightBits | None = None,
) -> jax.Array:
    """x [..., width] times w [width, other]; with `transpose`, x [..., other] times w transposed.  view: what is
    multiplied in place of w; None for w.  eight_bits: how this matmul and both of backward run in eight bits.

    All matmuls with weights go through here, except those with the token table and with quantized matrices."""
    w = w if view is None else view(w)
    return contract(x, w, (x.ndim - 1,), (int(transpose),), dot=dot_of(eight_bits))


def _dense_forward(x, w, transpose, view, eight_bits):
    """x, w: CustomVJPPrimals.  If the matrix is not differentiated, x is not saved."""
    saved = x.value if w.perturbed else TypeOf(jax.typeof(x.value))
    y = dense(x.value, w.value, transpose, view, eight_bits)
    return y, (saved, w.value)  # w itself: with_gathered_weights drops it by identity


def _dense_backward(transpose, view, eight_bits, saved, g):
    x, w = saved
    w, gradient_of_stored = (w, None) if view is None else jax.vjp(view, w)
    d_x = contract(g, w, (g.ndim - 1,), (int(not transpose),), gradient_of=x, dot=dot_of(eight_bits, left=True))
    if isinstance(x, TypeOf):
        return d_x, None
    dot = dot_of(eight_bits, left=transpose, right=not transpose)
    d_w = weight_gradient(*((g, x) if transpose else (x, g)), w, dot)
    return d_x, d_w if gradient_of_stored is None else gradient_of_stored(d_w)[0]


dense.defvjp(_dense_forward, _dense_backward, symbolic_zeros=True)
