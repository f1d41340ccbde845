"""What follows the last block: a head, which makes the losses of a model's results.

In all that a head does x is [batch, sequence, width] of the residual stream, h the same behind the last norm, and
`table` the embedding's tokens where they serve the head too.  A loss is a sum over tokens or rows, each with a weight;
the caller divides by the weight of the whole global batch, so that a mean is the same however the batch is split."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, MaskedLM, Model, MultipleChoice
from spmd_lm.models.layers import INIT_STD, Norm, add_bias, constant, dense, normal, widened
from spmd_lm.models.transformer import ACTIVATIONS, AFTER_POOLER, residual_dropout
from spmd_lm.ops.collectives import (
    all_gather,
    from_first_shard,
    gather_replicated_grad,
    gather_sequence,
    global_indices,
)
from spmd_lm.ops.cross_entropy import cross_entropy, scores
from spmd_lm.ops.dropout import Draw

Sums = dict[str, jax.Array]
"""By the name of a loss."""

Linear = tuple[nnx.Param, nnx.Param | None]
"""A matrix and its bias."""


class Head(nnx.Module):
    """pooled: whether it says one thing of a row, by one more layer over its first token (arXiv:1810.04805)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str, *, pooled: bool = False):
        self.norm = Norm(c, dtype) if c.norm == "pre" else None
        if pooled:
            self.pooler, self.pooler_bias = linear(c, c.width, "feature", rngs, dtype)
        self.dropout = c.dropout

    def losses(
        self, x: jax.Array, table: jax.Array | None, batch: Batch, weights: Sums, draw: Draw | None, sums: str
    ) -> Sums:
        """Sums of weight x negative log-likelihood.  sums: dtype of long sums of gradients."""
        raise NotImplementedError

    def scores(self, x: jax.Array, table: jax.Array | None, batch: Batch, rows: int) -> dict:
        """What a validation is made of, to be summed over microbatches and devices.  rows: of a step, over all."""
        raise NotImplementedError

    def logits(self, x: jax.Array, table: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        """Of each thing that is predicted, float32 or wider."""
        raise NotImplementedError

    def hidden(self, x: jax.Array) -> jax.Array:
        return x if self.norm is None else self.norm(x)

    def of_row(self, h: jax.Array, output: Linear, draw: Draw | None = None) -> jax.Array:
        """Logits [batch, outputs], float32 or wider; on the device that holds the first token."""
        pooled = jnp.tanh(add_bias(dense(h[:, :1], self.pooler[...]), self.pooler_bias))
        return widened(outputs(residual_dropout(pooled, self.dropout, draw, AFTER_POOLER), output))[:, 0]


def linear(c: Model, size: int, name: str, rngs: nnx.Rngs, dtype: str) -> Linear:
    """From the width to `size` outputs."""
    matrix = normal(rngs, (c.width, size), ("width", name), INIT_STD, dtype)
    return matrix, constant(0, size, name, dtype) if c.use_bias else None


def outputs(h: jax.Array, output: Linear) -> jax.Array:
    """h [..., width] -> [..., outputs], of the dtype in which it was multiplied."""
    matrix, bias = output
    return add_bias(dense(h, matrix[...]), bias)


def nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """logits: [rows, classes]; labels: int32 [rows] -> [rows]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


# --- of the vocabulary ------------------------------------------------------------------------------------------------


class TokenHead(Head):
    """The next token."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str, *, pooled: bool = False):
        super().__init__(c, rngs, dtype, pooled=pooled)
        self.tokens = (
            None if c.tie_embeddings else normal(rngs, (c.vocab, c.width), ("vocab", "width"), INIT_STD, dtype)
        )
        self.vocab = c.vocab

    def unembedding(self, h: jax.Array, table: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What a logit of each token is the product of, [batch, sequence, width] and [padded vocab here, width]; and a
        bias [padded vocab here] of it."""
        table = self.tokens[...] if self.tokens is not None else table
        assert table is not None
        return h, table, None

    def losses(self, x, table, batch, weights, draw, sums):
        of_tokens = self.unembedding(self.hidden(x), table)
        return {"causal_lm": cross_entropy(*of_tokens, batch.targets, weights["causal_lm"], self.vocab, sums)}

    def scores(self, x, table, batch, rows):
        """Of each loss its sum, the weight of what was right, and the weight of all."""
        return {"causal_lm": self.of_tokens(self.hidden(x), table, batch)}

    def of_tokens(self, h: jax.Array, table: jax.Array | None, batch: Batch) -> tuple[jax.Array, ...]:
        loss, right = scores(*self.unembedding(h, table), batch.targets, batch.weights, self.vocab)
        return loss, right, batch.weights.sum(dtype=loss.dtype)

    def logits(self, x, table, batch):
        """`tokens`: [batch, time, padded vocab]; padding is -inf, so that it can never be drawn."""
        h, table, bias = self.unembedding(self.hidden(x), table)
        h = gather_sequence(h)
        z = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
        z = z if bias is None else z + bias.astype(z.dtype)
        z = jnp.where(global_indices("vocab", z.shape[-1]) < self.vocab, z, -jnp.inf)
        return {"tokens": all_gather(z, "vocab", 2)}


class MaskedHead(TokenHead):
    """BERT's two (arXiv:1810.04805): hidden words, through one more layer and the token table; and, from a row's first
    token, which of its two parts came first in the text (arXiv:1909.11942)."""

    def __init__(self, c: Model, objective: MaskedLM, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, rngs, dtype, pooled=objective.sentence_order)
        self.transform, self.transform_bias = linear(c, c.width, "feature", rngs, dtype)
        self.transform_norm = Norm(c, dtype)
        self.output_bias = constant(0, c.vocab, "vocab", dtype) if c.use_bias else None
        self.activation = c.activation if c.activation in ACTIVATIONS else "gelu"
        self.ordered = objective.sentence_order
        if self.ordered:
            self.binary, self.binary_bias = linear(c, 2, "label", rngs, dtype)

    def unembedding(self, h, table):
        h = ACTIVATIONS[self.activation](add_bias(dense(h, self.transform[...]), self.transform_bias))
        h, table, _ = super().unembedding(self.transform_norm(h), table)
        return h, table, None if self.output_bias is None else self.output_bias[...]

    def order(self, h: jax.Array) -> jax.Array:
        """Logits of a row being in order and swapped, [batch, 2]; on the device that holds the first token."""
        return self.of_row(h, (self.binary, self.binary_bias))

    def losses(self, x, table, batch, weights, draw, sums):
        h = self.hidden(x)
        of_tokens = self.unembedding(h, table)
        made = {"masked_lm": cross_entropy(*of_tokens, batch.targets, weights["masked_lm"], self.vocab, sums)}
        if self.ordered:
            of_rows = nll(self.order(h), batch.labels) * weights["sentence_order"]
            made["sentence_order"] = from_first_shard(of_rows.sum())
        return made

    def scores(self, x, table, batch, rows):
        h = self.hidden(x)
        made = {"masked_lm": self.of_tokens(h, table, batch)}
        if self.ordered:
            z = self.order(h)
            w = batch.label_weights.astype(z.dtype)
            sums = (nll(z, batch.labels) * w).sum(), jnp.where(z.argmax(-1) == batch.labels, w, 0).sum()
            made["sentence_order"] = (*map(from_first_shard, sums), w.sum())
        return made

    def logits(self, x, table, batch):
        made = super().logits(x, table, batch)
        return made | ({"sentence_order": from_first_shard(self.order(self.hidden(x)))} if self.ordered else {})


# --- of labelled examples ---------------------------------------------------------------------------------------------


class LabelHead(Head):
    """What all of these share: one matrix behind the blocks, which no model that was trained before has."""

    def __init__(self, c: Model, size: int, rngs: nnx.Rngs, dtype: str, *, pooled: bool):
        super().__init__(c, rngs, dtype, pooled=pooled)
        self.output, self.output_bias = linear(c, size, "label", rngs, dtype)

    def scores(self, x, table, batch, rows):
        """Logits at their rows' places among all `rows` of a step, zeros at the others': their sum over all devices and
        microbatches is everybody's."""
        at = lambda z: jnp.zeros((rows, *z.shape[1:]), z.dtype).at[batch.samples].set(z)  # noqa: E731
        return jax.tree.map(at, self.logits(x, table, batch))


class ClassHead(LabelHead):
    """Of which class a row is."""

    def __init__(self, c: Model, objective: Classification, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, objective.classes, rngs, dtype, pooled=True)

    def losses(self, x, table, batch, weights, draw, sums):
        z = self.of_row(self.hidden(x), (self.output, self.output_bias), draw)
        return {"classification": from_first_shard((nll(z, batch.labels) * weights["classification"]).sum())}

    def logits(self, x, table, batch):
        """`classes`: [batch, classes]."""
        return {"classes": from_first_shard(self.of_row(self.hidden(x), (self.output, self.output_bias)))}


class ChoiceHead(LabelHead):
    """Which of so many rows in a row is right: a number of each, and a softmax over them."""

    def __init__(self, c: Model, objective: MultipleChoice, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, 1, rngs, dtype, pooled=True)
        self.choices = objective.choices

    def losses(self, x, table, batch, weights, draw, sums):
        z = self.of_row(self.hidden(x), (self.output, self.output_bias), draw)
        first = slice(None, None, self.choices)
        of_questions = nll(z.reshape(-1, self.choices), batch.labels[first])
        return {"multiple_choice": from_first_shard((of_questions * weights["multiple_choice"][first]).sum())}

    def logits(self, x, table, batch):
        """`choices`: [batch]."""
        return {"choices": from_first_shard(self.of_row(self.hidden(x), (self.output, self.output_bias)))[:, 0]}


class SpanHead(LabelHead):
    """Where the answer begins and where it ends: two numbers of each token, and a softmax over a row of each."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, 2, rngs, dtype, pooled=False)

    def losses(self, x, table, batch, weights, draw, sums):
        z = self.logits(x, table, batch)["spans"]
        both = (nll(z[..., 0], batch.labels) + nll(z[..., 1], batch.ends)) / 2
        return {"span": (both * weights["span"]).sum()}

    def logits(self, x, table, batch):
        """`spans`: [batch, time, 2], -inf where a row is padding."""
        z = widened(gather_replicated_grad(outputs(self.hidden(x), (self.output, self.output_bias))))
        return {"spans": jnp.where(batch.segments[..., None] > 0, z, -jnp.inf)}
