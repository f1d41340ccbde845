"""One block of a transformer: attention, then an MLP, each on a residual branch with a norm of its own."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd_lm.axes import SEQUENCE
from spmd_lm.config.schema import Model
from spmd_lm.models.attention import Attend, Attention
from spmd_lm.models.layers import INIT_STD, Norm, Project, add_bias, constant, dense, lean, normal, project
from spmd_lm.ops.collectives import global_indices, reduce_from_region
from spmd_lm.ops.dropout import Draw, dropout

AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING, AFTER_POOLER = 1, 2, 3, 4
"""Dropout sites; 0 is attention's own."""

RESIDUAL = "residual"
"""What remat calls the sum that ends a branch and that backward needs: of both, where a norm follows it."""

ACTIVATIONS = {
    "gelu": lean(lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": lean(lambda x: jax.nn.gelu(x, approximate=True)),
}

GATED = {"swiglu": lean(lambda x, gate: jax.nn.silu(gate) * x)}
"""Of the hidden layer and a second one that gates it (arXiv:2002.05202)."""

Losses = dict[str, jax.Array]
"""Auxiliary losses of a block, by name.  A dense block has none."""


def residual_dropout(x: jax.Array, rate: float, draw: Draw | None, site: int) -> jax.Array:
    """x: [batch, sequence, width].  A mask depends on an entry's sample, position and feature, never on its device."""
    if draw is None or not rate:
        return x
    k0, k1 = (key[:, None, None] for key in draw.keys(site))
    row, column = global_indices(SEQUENCE, x.shape[1]).astype(jnp.uint32), jnp.arange(x.shape[2], dtype=jnp.uint32)
    return dropout(x, rate, (k0, k1), row[:, None], column)


class MLP(nnx.Module):
    def __init__(self, c: Model, std: float, out_std: float, rngs: nnx.Rngs, dtype: str):
        matrix = lambda std: normal(rngs, (c.width, c.mlp_dim), ("width", "mlp"), std, dtype)  # noqa: E731
        vector = lambda size, name: constant(0, size, name, dtype) if c.use_bias else None  # noqa: E731
        self.up, self.down = matrix(std), matrix(out_std)
        self.gate = matrix(std) if c.activation in GATED else None
        self.up_bias, self.down_bias = vector(c.mlp_dim, "mlp"), vector(c.width, "width")
        self.gate_bias = vector(c.mlp_dim, "mlp") if self.gate is not None else None
        self.activation = c.activation

    def __call__(self, x: jax.Array, project: Project) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        if self.gate is None:
            (h,) = project(x, (self.up[...],), "mlp")
            h = ACTIVATIONS[self.activation](add_bias(h, self.up_bias))
        else:
            h, gate = project(x, (self.up[...], self.gate[...]), "mlp")
            h = GATED[self.activation](add_bias(h, self.up_bias), add_bias(gate, self.gate_bias))
        return add_bias(reduce_from_region(dense(h, self.down[...], transpose=True), "mlp"), self.down_bias)


class Block(nnx.Module):
    """Attention and an MLP, each on a residual branch: x + f(norm(x)), or norm(x + f(x)) where the norm comes after.

    Both branches start small, so that depth does not add up (GPT-2)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        std, out_std = INIT_STD, INIT_STD / math.sqrt(2 * c.layers)
        self.norm1, self.attention = Norm(c, dtype), Attention(c, std, out_std, rngs, dtype)
        self.norm2, self.mlp = Norm(c, dtype), MLP(c, std, out_std, rngs, dtype)
        self.dropout, self.after = c.dropout, c.norm == "post"

    def __call__(
        self, x: jax.Array, draw: Draw | None, attend: Attend, project: Project = project
    ) -> tuple[jax.Array, Losses]:
        """x: [batch, sequence, width].  draw: where dropout falls; None for none."""
        x = self.branch(x, lambda x: self.attention(x, attend, project), self.norm1, draw, AFTER_ATTENTION)
        x = x if self.after else checkpoint_name(x, RESIDUAL)
        return self.branch(x, lambda x: self.mlp(x, project), self.norm2, draw, AFTER_MLP), {}

    def branch(
        self, x: jax.Array, f: Callable[[jax.Array], jax.Array], norm: Norm, draw: Draw | None, site: int
    ) -> jax.Array:
        y = residual_dropout(f(x if self.after else norm(x)), self.dropout, draw, site)
        return norm(checkpoint_name(x + y, RESIDUAL)) if self.after else x + y
