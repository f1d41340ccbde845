"""Heads: what follows the last block and computes an objective's logits and losses.

In all of this module x is [batch, sequence, width] of the residual stream, h the same after the final norm, and `table`
the token embedding where the head is tied to it.  A loss is a sum over tokens or rows, each with a weight; the caller
divides by the weight of the whole global batch, so that the mean does not depend on how the batch is split."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, Model, MultipleChoice, Objective
from spmd_lm.models.layers import INIT_STD, Norm, add_bias, bias, dense, normal, widen
from spmd_lm.models.transformer import ACTIVATIONS, AFTER_POOLER, LossDict, residual_dropout
from spmd_lm.ops.collectives import (
    all_gather,
    from_first_shard,
    gather_replicated_grad,
    gather_sequence,
    global_indices,
)
from spmd_lm.ops.cross_entropy import cross_entropy, evaluate_cross_entropy
from spmd_lm.ops.dropout import DropoutKey

Linear = tuple[nnx.Param, nnx.Param | None]
"""A matrix and its bias."""


class LossInputs(NamedTuple):
    """What losses need besides x and the table.  weights: by loss.  key: of dropout; None for none.  accum_dtype: dtype
    of long sums of gradients."""

    batch: Batch
    weights: LossDict
    key: DropoutKey | None
    accum_dtype: str


class Head(nnx.Module):
    """pooled: whether it has BERT's pooler, a dense layer over a row's first token (arXiv:1810.04805)."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str, *, pooled: bool = False):
        self.norm = Norm(c, dtype) if c.norm == "pre" else None
        if pooled:
            self.pooler, self.pooler_bias = linear(c, c.width, "feature", rngs, dtype)
        self.dropout = c.dropout

    def losses(self, x: jax.Array, table: jax.Array | None, inputs: LossInputs) -> LossDict:
        """Sums of weight x negative log-likelihood."""
        raise NotImplementedError

    def eval_sums(self, x: jax.Array, table: jax.Array | None, batch: Batch, rows: int) -> dict:
        """What evaluation metrics are computed from, to be summed over microbatches and devices.  rows: of a step, over
        all devices."""
        raise NotImplementedError

    def logits(self, x: jax.Array, table: jax.Array | None, batch: Batch) -> dict[str, jax.Array]:
        """By what they predict, float32 or wider."""
        raise NotImplementedError

    def final_norm(self, x: jax.Array) -> jax.Array:
        return x if self.norm is None else self.norm(x)

    def row_logits(self, h: jax.Array, output: Linear, key: DropoutKey | None = None) -> jax.Array:
        """Logits [batch, outputs] of the pooled first token, float32 or wider; valid on the device that holds it."""
        pooled = jnp.tanh(add_bias(dense(h[:, :1], self.pooler[...]), self.pooler_bias))
        return widen(apply_linear(residual_dropout(pooled, self.dropout, key, AFTER_POOLER), output))[:, 0]


def linear(c: Model, size: int, name: str, rngs: nnx.Rngs, dtype: str) -> Linear:
    """From the width to `size` outputs."""
    return normal(rngs, (c.width, size), ("width", name), INIT_STD, dtype), bias(c, size, name, dtype)


def apply_linear(h: jax.Array, output: Linear) -> jax.Array:
    """h [..., width] -> [..., outputs], in h's dtype."""
    matrix, output_bias = output
    return add_bias(dense(h, matrix[...]), output_bias)


def nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood [rows] of labels, int32 [rows], under logits [rows, classes]."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


# --- heads over the vocabulary ----------------------------------------------------------------------------------------


class CausalLMHead(Head):
    """Predicts the next token."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str, *, pooled: bool = False):
        super().__init__(c, rngs, dtype, pooled=pooled)
        names = ("vocab", "width")
        self.tokens = None if c.tie_embeddings else normal(rngs, (c.vocab, c.width), names, INIT_STD, dtype)
        self.vocab = c.vocab

    def unembedding(self, h: jax.Array, table: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The factors of the token logits, [batch, sequence, width] and [local rows of the padded vocabulary, width],
        and their bias [local rows]."""
        table = self.tokens[...] if self.tokens is not None else table
        assert table is not None
        return h, table, None

    def losses(self, x, table, inputs):
        return {"causal_lm": self.token_loss("causal_lm", self.final_norm(x), table, inputs)}

    def token_loss(self, name: str, h: jax.Array, table: jax.Array | None, inputs: LossInputs) -> jax.Array:
        factors, weights = self.unembedding(h, table), inputs.weights[name]
        return cross_entropy(*factors, inputs.batch.targets, weights, self.vocab, inputs.accum_dtype)

    def eval_sums(self, x, table, batch, rows):
        """Of each loss (its sum, the weight of correct predictions, the weight of all)."""
        return {"causal_lm": self.token_sums(self.final_norm(x), table, batch)}

    def token_sums(self, h: jax.Array, table: jax.Array | None, batch: Batch) -> tuple[jax.Array, ...]:
        factors = self.unembedding(h, table)
        loss, correct = evaluate_cross_entropy(*factors, batch.targets, batch.loss_weights, self.vocab)
        return loss, correct, batch.loss_weights.sum(dtype=loss.dtype)

    def logits(self, x, table, batch):
        """`tokens`: [batch, time, padded vocab]; padding is -inf, so that it is never sampled."""
        h, table, logit_bias = self.unembedding(self.final_norm(x), table)
        h = gather_sequence(h)
        z = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
        z = z if logit_bias is None else z + logit_bias.astype(z.dtype)
        z = jnp.where(global_indices("vocab", z.shape[-1]) < self.vocab, z, -jnp.inf)
        return {"tokens": all_gather(z, "vocab", 2)}


class MaskedLMHead(CausalLMHead):
    """BERT's two predictions (arXiv:1810.04805): masked tokens, through one more layer and the token table; and, from a
    row's first token, whether its two segments are in order (arXiv:1909.11942)."""

    def __init__(self, c: Model, objective: MaskedLM, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, rngs, dtype, pooled=objective.sentence_order)
        self.transform, self.transform_bias = linear(c, c.width, "feature", rngs, dtype)
        self.transform_norm = Norm(c, dtype)
        self.output_bias = bias(c, c.vocab, "vocab", dtype)
        self.activation = c.activation if c.activation in ACTIVATIONS else "gelu"
        self.sentence_order = objective.sentence_order
        if self.sentence_order:
            self.binary, self.binary_bias = linear(c, 2, "label", rngs, dtype)

    def unembedding(self, h, table):
        h = ACTIVATIONS[self.activation](add_bias(dense(h, self.transform[...]), self.transform_bias))
        h, table, _ = super().unembedding(self.transform_norm(h), table)
        return h, table, None if self.output_bias is None else self.output_bias[...]

    def order_logits(self, h: jax.Array) -> jax.Array:
        """Logits [batch, 2] of a row being in order and swapped; valid on the device that holds the first token."""
        return self.row_logits(h, (self.binary, self.binary_bias))

    def losses(self, x, table, inputs):
        h = self.final_norm(x)
        losses = {"masked_lm": self.token_loss("masked_lm", h, table, inputs)}
        if self.sentence_order:
            row_losses = nll(self.order_logits(h), inputs.batch.labels) * inputs.weights["sentence_order"]
            losses["sentence_order"] = from_first_shard(row_losses.sum())
        return losses

    def eval_sums(self, x, table, batch, rows):
        h = self.final_norm(x)
        totals = {"masked_lm": self.token_sums(h, table, batch)}
        if self.sentence_order:
            z = self.order_logits(h)
            w = batch.label_weights.astype(z.dtype)
            loss, correct = (nll(z, batch.labels) * w).sum(), jnp.where(z.argmax(-1) == batch.labels, w, 0).sum()
            totals["sentence_order"] = (from_first_shard(loss), from_first_shard(correct), w.sum())
        return totals

    def logits(self, x, table, batch):
        logits = super().logits(x, table, batch)
        if self.sentence_order:
            logits["sentence_order"] = from_first_shard(self.order_logits(self.final_norm(x)))
        return logits


# --- heads over labels ------------------------------------------------------------------------------------------------


class LabelHead(Head):
    """One new matrix after the blocks, for labelled examples."""

    def __init__(self, c: Model, size: int, rngs: nnx.Rngs, dtype: str, *, pooled: bool):
        super().__init__(c, rngs, dtype, pooled=pooled)
        self.output, self.output_bias = linear(c, size, "label", rngs, dtype)

    def label_logits(self, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        return self.row_logits(self.final_norm(x), (self.output, self.output_bias), key)

    def eval_sums(self, x, table, batch, rows):
        """Logits [rows, ...] of all rows of a step, zero but for those of this microbatch and device: the sum over all
        of them is complete."""

        def at_rows(z: jax.Array) -> jax.Array:
            return jnp.zeros((rows, *z.shape[1:]), z.dtype).at[batch.sample_ids].set(z)

        return jax.tree.map(at_rows, self.logits(x, table, batch))


class ClassificationHead(LabelHead):
    """Predicts the class of a row."""

    def __init__(self, c: Model, objective: Classification, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, objective.classes, rngs, dtype, pooled=True)

    def losses(self, x, table, inputs):
        row_losses = nll(self.label_logits(x, inputs.key), inputs.batch.labels) * inputs.weights["classification"]
        return {"classification": from_first_shard(row_losses.sum())}

    def logits(self, x, table, batch):
        """`classes`: [batch, classes]."""
        return {"classes": from_first_shard(self.label_logits(x))}


class MultipleChoiceHead(LabelHead):
    """Predicts which of several rows is correct: one score per row, and a softmax over the rows of a question."""

    def __init__(self, c: Model, objective: MultipleChoice, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, 1, rngs, dtype, pooled=True)
        self.choices = objective.choices

    def losses(self, x, table, inputs):
        z = self.label_logits(x, inputs.key)
        first = slice(None, None, self.choices)  # the first row of each question has its label and weight
        question_losses = nll(z.reshape(-1, self.choices), inputs.batch.labels[first])
        return {"multiple_choice": from_first_shard((question_losses * inputs.weights["multiple_choice"][first]).sum())}

    def logits(self, x, table, batch):
        """`choices`: [batch]."""
        return {"choices": from_first_shard(self.label_logits(x))[:, 0]}


class ExtractiveQAHead(LabelHead):
    """Predicts where an answer starts and ends: two scores per token, and a softmax over a row for each."""

    def __init__(self, c: Model, rngs: nnx.Rngs, dtype: str):
        super().__init__(c, 2, rngs, dtype, pooled=False)

    def losses(self, x, table, inputs):
        z, batch = self.logits(x, table, inputs.batch)["spans"], inputs.batch
        row_losses = (nll(z[..., 0], batch.labels) + nll(z[..., 1], batch.end_positions)) / 2
        return {"span": (row_losses * inputs.weights["span"]).sum()}

    def logits(self, x, table, batch):
        """`spans`: [batch, time, 2], -inf at padding."""
        z = apply_linear(self.final_norm(x), (self.output, self.output_bias))
        z = widen(gather_replicated_grad(z))
        return {"spans": jnp.where(batch.segments[..., None] > 0, z, -jnp.inf)}


# --- objectives -------------------------------------------------------------------------------------------------------


def make_head(c: Model, objective: Objective, rngs: nnx.Rngs, dtype: str) -> Head:
    match objective:
        case MaskedLM():
            return MaskedLMHead(c, objective, rngs, dtype)
        case Classification():
            return ClassificationHead(c, objective, rngs, dtype)
        case MultipleChoice():
            return MultipleChoiceHead(c, objective, rngs, dtype)
        case ExtractiveQA():
            return ExtractiveQAHead(c, rngs, dtype)
    return CausalLMHead(c, rngs, dtype)


def loss_weights(objective: Objective, batch: Batch) -> LossDict:
    """The weights of the tokens or rows that each loss is a mean over."""
    if not objective.predicts_tokens:
        return {objective.kind: batch.label_weights}
    weights = {objective.kind: batch.loss_weights}
    return weights | {"sentence_order": batch.label_weights} if objective.has_sequence_label else weights
