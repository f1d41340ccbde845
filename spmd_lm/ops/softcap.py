"""Soft caps of attention's scores and of logits (arXiv:2408.00118, section 2)."""

import jax.numpy as jnp
from jax import Array


def softcap(x: Array, cap: float | None) -> Array:
    """cap x tanh(x / cap), between -cap and cap; x where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
