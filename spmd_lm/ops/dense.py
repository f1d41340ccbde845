"""A matrix of weights, and the product with it."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from spmd_lm.ops.collectives import contract, weight_gradient
from spmd_lm.ops.sharding_types import TypeOf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix [width, other] as products use it: a pytree of the arrays that are stored for it, and one method that
    multiplies.

    Each of the arrays is a parameter by itself, which the plan shards, pads, gathers and saves by the names of its
    dimensions.  Here there is one.  A quantized matrix, or one with low-rank terms, is another such type; products in
    parts take `entries` alone.  Backward may save the input and these arrays themselves, the same objects, which
    with_gathered_weights drops by identity and gathers again; what is computed from them it would save."""

    entries: jax.Array

    def map(self, columns: Callable[[jax.Array], jax.Array]) -> "Matrix":
        """The matrix of some of these columns."""
        return Matrix(columns(self.entries))

    def multiply(self, x: jax.Array, *, transpose: bool = False) -> jax.Array:
        """x [..., width] times the matrix: [..., other]; with `transpose`, x [..., other] times it transposed."""
        return dense(x, self.entries, transpose)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: jax.Array, w: jax.Array, transpose: bool = False) -> jax.Array:
    """x [..., width] times w [width, other]; with `transpose`, x [..., other] times w transposed.

    All products with the matrices of blocks and heads go through here, except those with the token table."""
    return contract(x, w, (x.ndim - 1,), (int(transpose),))


def _dense_forward(x, w, transpose):
    """x and w: with whether each has a gradient.  Where the matrix has none, x is not saved."""
    saved = x.value if w.perturbed else TypeOf(jax.typeof(x.value))
    return dense(x.value, w.value, transpose), (saved, w.value)  # w itself: with_gathered_weights drops it by identity


def _dense_backward(transpose, saved, g):
    x, w = saved
    d_x = contract(g, w, (g.ndim - 1,), (int(not transpose),), gradient_of=x)
    return d_x, None if isinstance(x, TypeOf) else weight_gradient(*((g, x) if transpose else (x, g)), w)


dense.defvjp(_dense_forward, _dense_backward, symbolic_zeros=True)
