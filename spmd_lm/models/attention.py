"""Multi-head self-attention: column-parallel into the heads and row-parallel out of them, where `heads` is placed on a
mesh axis."""

from collections.abc import Callable

import jax
from flax import nnx

from spmd_lm.config.schema import Model
from spmd_lm.models.layers import Project, add_bias, constant, dense, normal
from spmd_lm.ops.collectives import reduce_from_region

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""What attention does with q [batch, time, heads x head width], k and v [batch, time, kv heads x head width]: train on
the row, or read a cache."""


class Attention(nnx.Module):
    def __init__(self, c: Model, std: float, out_std: float, rngs: nnx.Rngs, dtype: str):
        matrix = lambda other, std: normal(rngs, (c.width, other), ("width", "heads"), std, dtype)  # noqa: E731
        vector = lambda size, name: constant(0, size, name, dtype) if c.use_bias else None  # noqa: E731
        self.query, self.key, self.value = (matrix(size, std) for size in (c.width, c.kv_width, c.kv_width))
        self.out = matrix(c.width, out_std)
        self.query_bias, self.key_bias = vector(c.width, "heads"), vector(c.kv_width, "heads")
        self.value_bias, self.out_bias = vector(c.kv_width, "heads"), vector(c.width, "width")

    def __call__(self, x: jax.Array, attend: Attend, project: Project) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        q, k, v = project(x, (self.query[...], self.key[...], self.value[...]), "heads")
        q, k, v = add_bias(q, self.query_bias), add_bias(k, self.key_bias), add_bias(v, self.value_bias)
        return add_bias(
            reduce_from_region(dense(attend(q, k, v), self.out[...], transpose=True), "heads"), self.out_bias
        )
