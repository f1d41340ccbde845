"""One transformer block: multi-head self-attention, then an MLP, each on a residual branch with a norm of its own.

Where `heads` and `mlp` are sharded, each branch begins column-parallel and ends row-parallel."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd_lm.axes import SEQUENCE
from spmd_lm.config.schema import Model
from spmd_lm.models.layers import (
    INIT_STD,
    ColumnParallel,
    Norm,
    add_bias,
    bias,
    column_parallel,
    dense,
    normal,
    recompute,
)
from spmd_lm.ops.collectives import global_indices, reduce_from_region
from spmd_lm.ops.dropout import DropoutKey, dropout

AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING, AFTER_POOLER = 1, 2, 3, 4
"""Dropout sites; 0 is that of attention probabilities."""

RESIDUAL = "residual"
"""The checkpoint name of the sums x + branch(x) that backward needs: of both branches where a norm follows them."""

LossDict = dict[str, jax.Array]
"""Losses by name."""

AttentionCore = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of q [batch, time, heads x head width], k and v [batch, time, kv heads x head width]: over the row in
training, through a cache in generation."""


@recompute
def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


@recompute
def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@recompute
def _swiglu(x: jax.Array, gate: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * x


ACTIVATIONS = {"gelu": _gelu, "gelu_tanh": _gelu_tanh}

GATED_ACTIVATIONS = {"swiglu": _swiglu}
"""Of a hidden layer and a second one that gates it (arXiv:2002.05202)."""


def residual_dropout(x: jax.Array, rate: float, key: DropoutKey | None, site: int) -> jax.Array:
    """x: [batch, sequence, width].  The mask depends on an entry's sample, position and feature, not on its device."""
    if key is None or not rate:
        return x
    w0, w1 = (word[:, None, None] for word in key.words(site))
    row = global_indices(SEQUENCE, x.shape[1]).astype(jnp.uint32)
    column = jnp.arange(x.shape[2], dtype=jnp.uint32)
    return dropout(x, rate, (w0, w1), row[:, None], column)


class Attention(nnx.Module):
    """The projections of multi-head attention; `core` does the rest."""

    def __init__(self, c: Model, out_std: float, rngs: nnx.Rngs, dtype: str):
        def matrix(size: int, std: float) -> nnx.Param:
            return normal(rngs, (c.width, size), ("width", "heads"), std, dtype)

        self.query, self.key, self.value = (matrix(size, INIT_STD) for size in (c.width, c.kv_width, c.kv_width))
        self.out = matrix(c.width, out_std)
        self.query_bias, self.key_bias = bias(c, c.width, "heads", dtype), bias(c, c.kv_width, "heads", dtype)
        self.value_bias, self.out_bias = bias(c, c.kv_width, "heads", dtype), bias(c, c.width, "width", dtype)

    def __call__(self, x: jax.Array, core: AttentionCore, project: ColumnParallel) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        q, k, v = project(x, (self.query[...], self.key[...], self.value[...]), "heads")
        q, k, v = add_bias(q, self.query_bias), add_bias(k, self.key_bias), add_bias(v, self.value_bias)
        y = dense(core(q, k, v), self.out[...], transpose=True)
        return add_bias(reduce_from_region(y, "heads"), self.out_bias)


class MLP(nnx.Module):
    def __init__(self, c: Model, out_std: float, rngs: nnx.Rngs, dtype: str):
        def matrix(std: float) -> nnx.Param:
            return normal(rngs, (c.width, c.mlp_dim), ("width", "mlp"), std, dtype)

        gated = c.activation in GATED_ACTIVATIONS
        self.up, self.down = matrix(INIT_STD), matrix(out_std)
        self.gate = matrix(INIT_STD) if gated else None
        self.up_bias, self.down_bias = bias(c, c.mlp_dim, "mlp", dtype), bias(c, c.width, "width", dtype)
        self.gate_bias = bias(c, c.mlp_dim, "mlp", dtype) if gated else None
        self.activation = c.activation

    def __call__(self, x: jax.Array, project: ColumnParallel) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        if self.gate is None:
            (h,) = project(x, (self.up[...],), "mlp")
            h = ACTIVATIONS[self.activation](add_bias(h, self.up_bias))
        else:
            h, gate = project(x, (self.up[...], self.gate[...]), "mlp")
            h = GATED_ACTIVATIONS[self.activation](add_bias(h, self.up_bias), add_bias(gate, self.gate_bias))
        return add_bias(reduce_from_region(dense(h, self.down[...], transpose=True), "mlp"), self.down_bias)


class Block(nnx.Module):
    """x + f(norm(x)) for attention and MLP; or norm(x + f(x)), where norms come after the branches.

    Both branches start small, so that depth does not add up (GPT-2)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        out_std = INIT_STD / math.sqrt(2 * c.layers)
        self.norm1, self.attention = Norm(c, dtype), Attention(c, out_std, rngs, dtype)
        self.norm2, self.mlp = Norm(c, dtype), MLP(c, out_std, rngs, dtype)
        self.dropout, self.post_norm = c.dropout, c.norm == "post"

    def __call__(
        self, x: jax.Array, key: DropoutKey | None, core: AttentionCore, project: ColumnParallel = column_parallel
    ) -> tuple[jax.Array, LossDict]:
        """x: [batch, sequence, width].  key: of dropout; None for none.  Returns x and auxiliary losses; a dense block
        has none."""
        if self.post_norm:
            y = self.attention(x, core, project)
            x = self.norm1(checkpoint_name(x + self.drop(y, key, AFTER_ATTENTION), RESIDUAL))
            y = self.mlp(x, project)
            return self.norm2(checkpoint_name(x + self.drop(y, key, AFTER_MLP), RESIDUAL)), {}
        y = self.attention(self.norm1(x), core, project)
        x = checkpoint_name(x + self.drop(y, key, AFTER_ATTENTION), RESIDUAL)
        y = self.mlp(self.norm2(x), project)
        return x + self.drop(y, key, AFTER_MLP), {}

    def drop(self, y: jax.Array, key: DropoutKey | None, site: int) -> jax.Array:
        return residual_dropout(y, self.dropout, key, site)
