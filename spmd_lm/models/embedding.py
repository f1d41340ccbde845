"""The embedding of tokens, positions and token types: the residual stream that the first block reads."""

import jax
from flax import nnx

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Model
from spmd_lm.models.layers import INIT_STD, Norm, normal
from spmd_lm.models.transformer import AFTER_EMBEDDING, residual_dropout
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.embedding import lookup


class Embedding(nnx.Module):
    """One table each for tokens, learned positions and token types.  It has a norm where blocks have theirs last (BERT,
    arXiv:1810.04805)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        def table(rows: int, name: str) -> nnx.Param:
            return normal(rngs, (rows, c.width), (name, "width"), INIT_STD, dtype)

        self.tokens = table(c.vocab, "vocab")
        self.positions = table(c.context, "position") if c.positions == "learned" else None
        self.types = table(c.token_types, "type") if c.token_types else None
        self.norm = Norm(c, dtype) if c.norm == "post" else None
        self.dropout = c.dropout

    def __call__(self, batch: Batch, key: DropoutKey | None) -> jax.Array:
        """Tokens, positions and types, int32 [batch, time] -> [batch, sequence, width]."""
        x = lookup(self.tokens[...], batch.tokens, "vocab")
        if self.positions is not None:
            x = x + lookup(self.positions[...], batch.positions, "position")
        if self.types is not None:
            assert batch.types is not None
            x = x + lookup(self.types[...], batch.types, "type")
        x = x if self.norm is None else self.norm(x)
        return residual_dropout(x, self.dropout, key, AFTER_EMBEDDING)
