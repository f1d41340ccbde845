"""Tokens, with where they stand and what part of a row they are of: the residual stream that the first block reads."""

import jax
from flax import nnx

from spmd_lm.config.schema import Model
from spmd_lm.models.layers import INIT_STD, Norm, normal
from spmd_lm.models.transformer import AFTER_EMBEDDING, residual_dropout
from spmd_lm.ops.dropout import Draw
from spmd_lm.ops.embedding import lookup


class Embedding(nnx.Module):
    """A table each of tokens, of learned positions and of token types.  Where blocks have their norms last, so has this
    (BERT, arXiv:1810.04805)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        table = lambda rows, name: normal(rngs, (rows, c.width), (name, "width"), INIT_STD, dtype)  # noqa: E731
        self.tokens = table(c.vocab, "vocab")
        self.positions = table(c.context, "position") if c.positions == "learned" else None
        self.types = table(c.token_types, "type") if c.token_types else None
        self.norm = Norm(c, dtype) if c.norm == "post" else None
        self.dropout = c.dropout

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, types: jax.Array | None, draw: Draw | None
    ) -> jax.Array:
        """tokens, positions, types: int32 [batch, time] -> [batch, sequence, width]."""
        x = lookup(self.tokens[...], tokens, "vocab")
        if self.positions is not None:
            x = x + lookup(self.positions[...], positions, "position")
        if self.types is not None:
            assert types is not None
            x = x + lookup(self.types[...], types, "type")
        x = x if self.norm is None else self.norm(x)
        return residual_dropout(x, self.dropout, draw, AFTER_EMBEDDING)
