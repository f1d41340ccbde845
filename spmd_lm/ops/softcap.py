"""Soft caps for attention scores and logits (arXiv:2408.00118, section 2)."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def softcap(x: Array, cap: float | None) -> Array:
    """cap x tanh(x / cap), between -cap and cap; x where there is no cap.  Backward needs one array of x's size."""
    return x if cap is None else _capped(x, cap)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _capped(x: Array, cap: float) -> Array:
    return cap * jnp.tanh(x / cap)


@_capped.defjvp
def _capped_jvp(cap: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Saves y alone; jnp.tanh's rule saves two arrays, its result and 1 minus it."""
    y = _capped(*primals, cap)
    return y, tangents[0] * (1 - jnp.square(y / cap))
