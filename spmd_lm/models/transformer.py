"""The embedding, and a block: self-attention and an MLP, each on a residual branch with a norm of its own.

Where `heads` and `mlp` are sharded, each branch begins column-parallel and ends row-parallel."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from spmd_lm.axes import SEQUENCE
from spmd_lm.batch import Batch
from spmd_lm.config.schema import Model
from spmd_lm.models.context import BlockContext, LossDict
from spmd_lm.models.experts import MixtureOfExperts
from spmd_lm.models.layers import INIT_STD, HasMatrices, HeadNorm, Norm, ParamInit, add_bias
from spmd_lm.models.mlp import MLP
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.ops.collectives import LocalKVHeads, residual_stream, row_positions
from spmd_lm.ops.dropout import DropoutKey, dropout
from spmd_lm.ops.embedding import lookup
from spmd_lm.ops.rotary import Rotary

AFTER_ATTENTION, AFTER_MLP, AFTER_EMBEDDING, AFTER_POOLER = 1, 2, 3, 4  # dropout sites; 0: attention probabilities

RESIDUAL = "residual"
"""Checkpoint name of the arrays that remat policy `residual` saves: with sandwich norms both branches' outputs; with
post-norm both sums x + f(x); else the first sum, or with parallel branches none."""


def residual_dropout(x: jax.Array, rate: float, key: DropoutKey | None, site: int) -> jax.Array:
    """x: [batch, sequence, width].  The mask depends on an entry's sample, position and feature, not on its device."""
    if key is None or not rate:
        return x
    w0, w1 = (word[:, None, None] for word in key.words(site))
    row = row_positions(x.shape[1], SEQUENCE).astype(jnp.uint32)
    column = jnp.arange(x.shape[2], dtype=jnp.uint32)
    return dropout(x, rate, (w0, w1), row[:, None], column)


class Embedding(nnx.Module):
    """Tables of tokens, learned positions and token types; a norm if blocks are post-norm (arXiv:1810.04805)."""

    def __init__(self, init: ParamInit):
        c = init.c
        self.tokens = init.table(c.vocab, "vocab")
        self.positions = init.table(c.context, "position") if c.positions == "learned" else None
        self.types = init.table(c.token_types, "type") if c.token_types else None
        self.norm = Norm(init) if c.norm == "post" else None
        self.dropout, self.scale = c.dropout, math.sqrt(c.width) if c.scale_embeddings else None

    def __call__(self, batch: Batch, key: DropoutKey | None) -> jax.Array:
        """Tokens, positions and types, int32 [batch, time] -> [batch, sequence, width]."""
        x = lookup(self.tokens[...], batch.tokens, "vocab")
        x = x if self.scale is None else x * jnp.asarray(self.scale, x.dtype)
        if self.positions is not None:
            x = x + lookup(self.positions[...], batch.positions, "position")
        if self.types is not None:
            assert batch.token_type_ids is not None
            x = x + lookup(self.types[...], batch.token_type_ids, "type")
        x = x if self.norm is None else self.norm(x)
        return residual_dropout(x, self.dropout, key, AFTER_EMBEDDING)


def make_rotary(c: Model) -> Rotary | None:
    """The rotary embedding of a model's queries and keys; None where it has other positions."""
    return Rotary(c.rope_theta, c.rope_fraction, c.rope_scaling, c.context) if c.positions == "rotary" else None


class Attention(HasMatrices):
    """The projections of multi-head attention."""

    row_parallel = ("out",)

    def __init__(self, init: ParamInit, out_std: float):
        c = init.c
        self.spec = AttentionSpec(
            c.heads,
            c.kv_heads or c.heads,
            c.causal,
            make_rotary(c),
            c.attention_dropout,
            c.span,
            scale=c.query_pre_attn_scalar and c.query_pre_attn_scalar**-0.5,
            softcap=c.attention_softcap,
        )
        self.query, self.query_bias = init.linear(c.query_width, "heads", "qkv")
        self.key, self.key_bias = init.linear(c.kv_width, "kv_heads", "qkv")
        self.value, self.value_bias = init.linear(c.kv_width, "kv_heads", "qkv")
        self.out, self.out_bias = init.matrix(c.query_width, "heads", out_std), init.bias(c.width, "width", "out")
        self.query_norm = HeadNorm(init) if c.qk_norm else None
        self.key_norm = HeadNorm(init) if c.qk_norm else None
        self.head_dim = c.head_dim

    def __call__(self, x: jax.Array, context: BlockContext) -> jax.Array:
        """x: [batch, sequence, width] of the residual stream."""
        linears, attend = context.linears.attention, context.make_attention(self.spec)
        local = LocalKVHeads(self.head_dim)
        query, key, value = (self.matrix(name, context) for name in ("query", "key", "value"))
        matrices = query, key.select(local), value.select(local)
        kv_biases = (None if bias is None else local(bias) for bias in (self.bias("key"), self.bias("value")))
        q, k, v = map(add_bias, linears.column(x, matrices, "heads", ordered=True), (self.bias("query"), *kv_biases))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        y = linears.row(attend(q, k, v), self.matrix("out", context), "heads", ordered=True)
        return add_bias(y, self.bias("out"))


class Block(nnx.Module):
    """x + f(norm(x)) for attention and MLP; norm(x + f(x)), where norms come after the sums; or x + norm(f(norm(x))),
    where each branch is between two norms.

    Parallel branches both read x.  Matrices that end branches start small, so that depth does not add up (GPT-2)."""

    prefetched = ("attention",)  # the part, by its key, whose weights parallel.prefetch gathers a layer ahead

    def __init__(self, init: ParamInit):
        c = init.c
        out_std = INIT_STD / math.sqrt(2 * c.layers)
        self.norm1, self.attention = Norm(init), Attention(init, out_std)
        self.norm2 = Norm(init)
        self.mlp = MixtureOfExperts(init, out_std) if c.moe else MLP(init, out_std)
        self.post_norm1 = Norm(init) if c.norm == "sandwich" else None
        self.post_norm2 = Norm(init) if c.norm == "sandwich" else None
        self.dropout, self.post_norm, self.parallel = c.dropout, c.norm == "post", c.parallel_branches

    def __call__(self, x: jax.Array, context: BlockContext) -> tuple[jax.Array, LossDict]:
        """x: [batch, sequence, width].  Returns x and auxiliary losses; without experts there are none."""
        x = residual_stream(x)
        drop = functools.partial(residual_dropout, rate=self.dropout, key=context.dropout_key)
        if self.post_norm:
            y = self.attention(x, context)
            x = self.norm1(checkpoint_name(x + drop(y, site=AFTER_ATTENTION), RESIDUAL))
            y, losses = self._run_mlp(x, context)
            return residual_stream(self.norm2(checkpoint_name(x + drop(y, site=AFTER_MLP), RESIDUAL))), losses
        y = self.attention(self.norm1(x), context)
        if self.parallel:
            z, losses = self._run_mlp(self.norm2(x), context)
            return residual_stream(x + drop(y, site=AFTER_ATTENTION) + drop(z, site=AFTER_MLP)), losses
        if self.post_norm1 is not None and self.post_norm2 is not None:
            x = x + drop(self.post_norm1(checkpoint_name(y, RESIDUAL)), site=AFTER_ATTENTION)
            y, losses = self._run_mlp(self.norm2(x), context)
            return residual_stream(x + drop(self.post_norm2(checkpoint_name(y, RESIDUAL)), site=AFTER_MLP)), losses
        x = checkpoint_name(x + drop(y, site=AFTER_ATTENTION), RESIDUAL)
        y, losses = self._run_mlp(self.norm2(x), context)
        return residual_stream(x + drop(y, site=AFTER_MLP)), losses

    def _run_mlp(self, x: jax.Array, context: BlockContext) -> tuple[jax.Array, LossDict]:
        return self.mlp(x, context) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(x, context), {})
