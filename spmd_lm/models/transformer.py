"""One block of a transformer: attention, then an MLP, each on a residual branch behind a layer norm (pre-LN)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd_lm.axes import SEQUENCE, leave, places
from spmd_lm.config.schema import Model
from spmd_lm.models.attention import Attend, Attention
from spmd_lm.models.layers import INIT_STD, LayerNorm, Project, add_bias, constant, dense, lean, normal, project
from spmd_lm.ops.dropout import Draw, dropout

AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING = 1, 2, 3
"""Dropout sites; 0 is attention's own."""

RESIDUAL = "residual"
"""What remat calls the stream between a block's two branches."""

ACTIVATIONS = {
    "gelu": lean(lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": lean(lambda x: jax.nn.gelu(x, approximate=True)),
}

Losses = dict[str, jax.Array]
"""Auxiliary losses of a block, by name.  A dense block has none."""


def residual_dropout(x: jax.Array, rate: float, draw: Draw | None, site: int) -> jax.Array:
    """x: [batch, sequence, width].  A mask depends on an entry's sample, position and feature, never on its device."""
    if draw is None or not rate:
        return x
    k0, k1 = (key[:, None, None] for key in draw.keys(site))
    row, column = places(SEQUENCE, x.shape[1]).astype(jnp.uint32), jnp.arange(x.shape[2], dtype=jnp.uint32)
    return dropout(x, rate, (k0, k1), row[:, None], column)


class MLP(nnx.Module):
    def __init__(self, c: Model, std: float, out_std: float, rngs: nnx.Rngs, dtype: str):
        matrix = lambda std: normal(rngs, (c.width, c.mlp_width), ("width", "mlp"), std, dtype)  # noqa: E731
        self.up, self.down = matrix(std), matrix(out_std)
        self.up_bias = constant(0, c.mlp_width, "mlp", dtype) if c.biases else None
        self.down_bias = constant(0, c.width, "width", dtype) if c.biases else None
        self.activation = c.activation

    def __call__(self, x: jax.Array, project: Project) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        (h,) = project(x, (self.up[...],), "mlp")
        y = dense(ACTIVATIONS[self.activation](add_bias(h, self.up_bias)), self.down[...], transpose=True)
        return add_bias(leave(y, "mlp"), self.down_bias)


class Block(nnx.Module):
    """x + Attention(LN(x)), then x + MLP(LN(x)).  Both branches start small, so that depth does not add up (GPT-2)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        std, out_std = INIT_STD, INIT_STD / math.sqrt(2 * c.layers)
        self.norm1, self.attention = LayerNorm(c.width, c.biases, dtype), Attention(c, std, out_std, rngs, dtype)
        self.norm2, self.mlp = LayerNorm(c.width, c.biases, dtype), MLP(c, std, out_std, rngs, dtype)
        self.dropout = c.dropout

    def __call__(
        self, x: jax.Array, draw: Draw | None, attend: Attend, project: Project = project
    ) -> tuple[jax.Array, Losses]:
        """x: [batch, sequence, width].  draw: where dropout falls; None for none."""
        y = self.attention(self.norm1(x), attend, project)
        x = checkpoint_name(x + residual_dropout(y, self.dropout, draw, AFTER_ATTENTION), RESIDUAL)
        y = self.mlp(self.norm2(x), project)
        return x + residual_dropout(y, self.dropout, draw, AFTER_MLP), {}
