"""What a model is trained for: the head that ends it, and the losses of its results.

A loss is a sum over tokens or rows, each with a weight; the caller divides by the weight of the whole global batch, so
that a mean is the same however the batch is split."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm import axes
from spmd_lm.batch import Batch
from spmd_lm.config.schema import CausalLM, MaskedLM, Model
from spmd_lm.models.layers import INIT_STD, Norm, add_bias, constant, dense, normal
from spmd_lm.models.transformer import ACTIVATIONS
from spmd_lm.ops.cross_entropy import cross_entropy, scores

Objective = CausalLM | MaskedLM

Sums = dict[str, jax.Array]
"""By the name of a loss."""


class Head(nnx.Module):
    """What follows the last block.  In all that it does x is [batch, sequence, width] of the residual stream, and
    `table` the embedding's tokens where they serve the head too."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        self.norm = Norm(c, dtype) if c.norm == "pre" else None
        self.tokens = (
            None if c.tie_embeddings else normal(rngs, (c.vocab, c.width), ("vocab", "width"), INIT_STD, dtype)
        )
        self.vocab = c.vocab

    def hidden(self, x: jax.Array) -> jax.Array:
        return x if self.norm is None else self.norm(x)

    def unembedding(self, h: jax.Array, table: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What a logit of each token is the product of, [batch, sequence, width] and [padded vocab here, width]; and a
        bias [padded vocab here] of it."""
        table = self.tokens[...] if self.tokens is not None else table
        assert table is not None
        return h, table, None

    def losses(self, x: jax.Array, table: jax.Array | None, batch: Batch, weights: Sums, sums: str) -> Sums:
        """Sums of weight x negative log-likelihood.  sums: dtype of long sums of gradients."""
        of_tokens = self.unembedding(self.hidden(x), table)
        return {"causal_lm": cross_entropy(*of_tokens, batch.targets, weights["causal_lm"], self.vocab, sums)}

    def scores(self, x: jax.Array, table: jax.Array | None, batch: Batch) -> dict[str, tuple[jax.Array, ...]]:
        """Of each loss its sum, the weight of what was right, and the weight of all."""
        h, table, bias = self.unembedding(self.hidden(x), table)
        right = scores(h, table, bias, batch.targets, batch.weights, self.vocab)
        return {"causal_lm": (*right, batch.weights.sum(dtype=right[0].dtype))}

    def logits(self, x: jax.Array, table: jax.Array | None) -> dict[str, jax.Array]:
        """`tokens`: [batch, time, padded vocab], float32 or wider; padding is -inf, so that it can never be drawn."""
        h, table, bias = self.unembedding(self.hidden(x), table)
        h = axes.gathered(h)
        z = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
        z = z if bias is None else z + bias.astype(z.dtype)
        z = jnp.where(axes.places("vocab", z.shape[-1]) < self.vocab, z, -jnp.inf)
        return {"tokens": axes.whole(z, "vocab", 2)}


class MaskedHead(Head):
    """BERT's two (arXiv:1810.04805): hidden words, through one more layer and the token table; and, from a row's first
    token, which of its two parts came first in the text (arXiv:1909.11942)."""

    def __init__(self, c: Model, objective: MaskedLM, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, rngs, dtype)
        vector = lambda size, name: constant(0, size, name, dtype) if c.biases else None  # noqa: E731
        matrix = lambda size, name: normal(rngs, (c.width, size), ("width", name), INIT_STD, dtype)  # noqa: E731
        self.transform, self.transform_bias = matrix(c.width, "feature"), vector(c.width, "feature")
        self.transform_norm = Norm(c, dtype)
        self.output_bias = vector(c.vocab, "vocab")
        self.activation = c.activation if c.activation in ACTIVATIONS else "gelu"
        self.ordered = objective.sentence_order
        if self.ordered:
            self.pooler, self.pooler_bias = matrix(c.width, "feature"), vector(c.width, "feature")
            self.binary, self.binary_bias = matrix(2, "label"), vector(2, "label")

    def unembedding(self, h, table):
        h = ACTIVATIONS[self.activation](add_bias(dense(h, self.transform[...]), self.transform_bias))
        h, table, _ = super().unembedding(self.transform_norm(h), table)
        return h, table, None if self.output_bias is None else self.output_bias[...]

    def order(self, h: jax.Array) -> jax.Array:
        """Logits of a row being in order and swapped, [batch, 2]; on the device that holds the first token."""
        pooled = jnp.tanh(add_bias(dense(h[:, 0], self.pooler[...]), self.pooler_bias))
        z = add_bias(dense(pooled, self.binary[...]), self.binary_bias)
        return z.astype(jnp.promote_types(z.dtype, jnp.float32))

    def losses(self, x, table, batch, weights, sums):
        h = self.hidden(x)
        of_tokens = self.unembedding(h, table)
        made = {"masked_lm": cross_entropy(*of_tokens, batch.targets, weights["masked_lm"], self.vocab, sums)}
        if self.ordered:
            made["sentence_order"] = (_nll(self.order(h), batch.labels) * weights["sentence_order"]).sum()
            made["sentence_order"] = axes.at_first(made["sentence_order"])
        return made

    def scores(self, x, table, batch):
        h = self.hidden(x)
        of_tokens, table, bias = self.unembedding(h, table)
        right = scores(of_tokens, table, bias, batch.targets, batch.weights, self.vocab)
        made = {"masked_lm": (*right, batch.weights.sum(dtype=right[0].dtype))}
        if self.ordered:
            z, w = self.order(h), batch.label_weights.astype(right[0].dtype)
            sums = (_nll(z, batch.labels) * w).sum(), jnp.where(z.argmax(-1) == batch.labels, w, 0).sum()
            made["sentence_order"] = (*map(axes.at_first, sums), w.sum())
        return made

    def logits(self, x, table):
        made = super().logits(x, table)
        return made | ({"sentence_order": axes.at_first(self.order(self.hidden(x)))} if self.ordered else {})


def _nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """logits: [batch, classes]; labels: int32 [batch] -> [batch]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def make_head(c: Model, objective: Objective, rngs: nnx.Rngs, dtype: str) -> Head:
    return MaskedHead(c, objective, rngs, dtype) if isinstance(objective, MaskedLM) else Head(c, rngs, dtype)


def weights(objective: Objective, batch: Batch) -> Sums:
    """Of everything that each loss is over, as the batch has it."""
    ordered = isinstance(objective, MaskedLM) and objective.sentence_order
    return {objective.kind: batch.weights} | ({"sentence_order": batch.label_weights} if ordered else {})
