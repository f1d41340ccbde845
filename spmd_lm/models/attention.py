"""Multi-head self-attention: column-parallel into the heads and row-parallel out of them, where `heads` is placed on a
mesh axis."""

from collections.abc import Callable

import jax
from flax import nnx

from spmd_lm.axes import enter, leave
from spmd_lm.config.schema import Model
from spmd_lm.models.layers import add_bias, constant, dense, normal

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""What attention does with q, k, v [batch, time, heads x head width]: train on the row, or read a cache."""


class Attention(nnx.Module):
    def __init__(self, c: Model, std: float, out_std: float, rngs: nnx.Rngs, dtype: str):
        matrix = lambda std: normal(rngs, (c.width, c.width), ("width", "heads"), std, dtype)  # noqa: E731
        vector = lambda name: constant(0, c.width, name, dtype) if c.biases else None  # noqa: E731
        self.query, self.key, self.value, self.out = matrix(std), matrix(std), matrix(std), matrix(out_std)
        self.query_bias, self.key_bias, self.value_bias = (vector("heads") for _ in range(3))
        self.out_bias = vector("width")

    def __call__(self, x: jax.Array, attend: Attend) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        x = enter(x, "heads")

        def project(w: nnx.Param, bias: nnx.Param | None) -> jax.Array:
            return add_bias(dense(x, w[...]), bias)

        q = project(self.query, self.query_bias)
        k = project(self.key, self.key_bias)
        v = project(self.value, self.value_bias)
        return add_bias(leave(dense(attend(q, k, v), self.out[...], transpose=True), "heads"), self.out_bias)
