"""The product with a matrix of weights."""

import functools

import jax

from spmd_lm.ops.collectives import contract, weight_gradient
from spmd_lm.ops.sharding_types import TypeOf


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: jax.Array, w: jax.Array, transpose: bool = False) -> jax.Array:
    """x [..., width] times w [width, other]; with `transpose`, x [..., other] times w transposed.

    All products with the matrices of blocks and heads go through here, except those with the token table: one place to
    change for a backend or a quantizer."""
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
