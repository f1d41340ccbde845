"""Multi-head self-attention: column-parallel into the heads and row-parallel out of them, where `heads` is placed on a
mesh axis."""

from collections.abc import Callable

import jax
from flax import nnx

from spmd_lm.axes import leave
from spmd_lm.config.schema import Model
from spmd_lm.models.layers import Project, add_bias, constant, dense, normal

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""What attention does with q, k, v [batch, time, heads x head width]: train on the row, or read a cache."""


class Attention(nnx.Module):
    def __init__(self, c: Model, std: float, out_std: float, rngs: nnx.Rngs, dtype: str):
        matrix = lambda std: normal(rngs, (c.width, c.width), ("width", "heads"), std, dtype)  # noqa: E731
        vector = lambda name: constant(0, c.width, name, dtype) if c.biases else None  # noqa: E731
        self.query, self.key, self.value, self.out = matrix(std), matrix(std), matrix(std), matrix(out_std)
        self.query_bias, self.key_bias, self.value_bias = (vector("heads") for _ in range(3))
        self.out_bias = vector("width")

    def __call__(self, x: jax.Array, attend: Attend, project: Project) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        q, k, v = project(x, (self.query[...], self.key[...], self.value[...]), "heads")
        q, k, v = add_bias(q, self.query_bias), add_bias(k, self.key_bias), add_bias(v, self.value_bias)
        return add_bias(leave(dense(attend(q, k, v), self.out[...], transpose=True), "heads"), self.out_bias)
