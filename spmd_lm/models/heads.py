"""Heads, one per objective: everything after the last block, with logits and losses.

h is [batch, sequence, width], the residual stream after the final norm.  A loss is a weighted sum over tokens or rows;
the caller divides the weights by the global batch's: the mean does not depend on how that is split."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmd_lm.active_rules import partition_spec
from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, ExtractiveQA, MaskedLM, MultipleChoice, Objective
from spmd_lm.errors import ConfigError
from spmd_lm.models.context import LossDict
from spmd_lm.models.layers import HasMatrices, Norm, ParamInit, add_bias
from spmd_lm.models.mlp import ACTIVATIONS
from spmd_lm.models.transformer import AFTER_POOLER, residual_dropout
from spmd_lm.ops.collectives import (
    all_gather,
    first_tokens,
    from_first_shard,
    gather_replicated_grad,
    gather_sequence,
    global_indices,
    group_rows,
    manual_region,
    psum_unreduced,
)
from spmd_lm.ops.cross_entropy import LogitsPolicy, cross_entropy, evaluate_cross_entropy, score_targets
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.norm import upcast
from spmd_lm.ops.shared_rows import from_first, gather_rows, on_first
from spmd_lm.ops.softcap import softcap


class Head(HasMatrices):
    """An objective's head.  pooled: with BERT's pooler, a dense layer on a row's first token (arXiv:1810.04805)."""

    def __init__(self, init: ParamInit, *, pooled: bool = False):
        self.norm = Norm(init) if init.c.norm != "post" else None
        if pooled:
            self.pooler, self.pooler_bias = init.linear(init.c.width, "feature", "head")
        self.dropout = init.c.dropout

    def losses(self, h: jax.Array, batch: Batch, weights: LossDict, key: DropoutKey | None) -> LossDict:
        """Sums of weight x negative log-likelihood.  weights: by loss.  key: for dropout; None for none."""
        raise self._lacks("losses")

    def eval_sums(self, h: jax.Array, batch: Batch, rows: int) -> dict:
        """Addends of sums over microbatches and devices, the source of metrics.  For tokens, by loss: (its sum, the
        weight of correct predictions, the total weight).  For labelled examples: logits of all `rows` of a step."""
        raise self._lacks("eval_sums")

    def target_scores(self, h: jax.Array, batch: Batch, rows: int) -> dict[str, jax.Array]:
        """Scores [rows, time] of all targets, whatever their weights, placed by `place_rows`: `log_likelihood`, in
        nats, and `greedy`, 1 for the argmax, else 0.  Only for heads that predict tokens."""
        raise self._lacks("target_scores")

    def logits(self, h: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Logits by what they predict, float32 or wider."""
        raise self._lacks("logits")

    def _lacks(self, method: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__} has no {method}, which this needs. Define it: docs/own-model.md.")

    def row_logits(self, h: jax.Array, name: str, bias: nnx.Param | None, key: DropoutKey | None = None) -> jax.Array:
        """Logits [batch, shards, outputs], float32 or wider, of the pooled first token of each shard of the sequence,
        with the matrix `name`.  Only the first shard's are the row's: see `from_first_shard`."""
        pooled = jnp.tanh(add_bias(self.matrix("pooler").multiply(first_tokens(h)), self.pooler_bias))
        pooled = residual_dropout(pooled, self.dropout, key, AFTER_POOLER)
        return upcast(add_bias(self.matrix(name).multiply(pooled), bias))


def place_rows(z: jax.Array, sample_ids: jax.Array, rows: int) -> jax.Array:
    """Places z [batch, ...], which devices that share rows have alike, among all `rows` of a step: an addend, zero
    except for the rows of this microbatch and device."""

    def place(z: jax.Array, sample_ids: jax.Array) -> jax.Array:
        return jnp.zeros((rows, *z.shape[1:]), z.dtype).at[sample_ids].set(on_first(z))

    return psum_unreduced(manual_region(place, partition_spec(unreduced=("batch",)))(z, sample_ids))


def nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log-likelihood [...] of labels, int32 [...], under logits [..., classes]."""
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    log_likelihood = jnp.where(is_label, jax.nn.log_softmax(logits), 0).sum(-1)
    return jnp.where(is_label.any(-1), -log_likelihood, jnp.nan)  # if no class is the label


def first_shard_sum(row_losses: jax.Array) -> jax.Array:
    """The sum over rows of the first shard's row_losses [batch, shards]."""
    return from_first_shard(row_losses.sum(0), 0)


class CausalLMHead(Head):
    """Predicts the next token."""

    loss_name = "causal_lm"

    def __init__(self, init: ParamInit, policy: LogitsPolicy, *, pooled: bool = False):
        super().__init__(init, pooled=pooled)
        if not init.c.tie_embeddings:  # where they are tied, LanguageModel adds the embedding's table
            self.tokens = init.table(init.c.vocab, "vocab")
        self.vocab, self.policy = init.c.vocab, policy._replace(softcap=init.c.logit_softcap)

    def unembedding(self, h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Factors of the token logits, [batch, sequence, width] and [local vocab, width], and their bias [local vocab]
        or None; the vocabulary is padded."""
        return h, self.tokens[...], None

    def losses(self, h, batch, weights, key):
        if self.loss_name not in weights:
            what = f"{type(self).__name__}.loss_name={self.loss_name}, but loss_weights names {', '.join(weights)}"
            raise ConfigError(f"{what}. Give both the same name.")
        weight = weights[self.loss_name]
        loss = cross_entropy(*self.unembedding(h), batch.targets, weight, self.vocab, self.policy)
        return {self.loss_name: loss}

    def eval_sums(self, h, batch, rows):
        weight = batch.loss_weights
        loss, correct = evaluate_cross_entropy(
            *self.unembedding(h), batch.targets, weight, self.vocab, self.policy.softcap
        )
        return {self.loss_name: (loss, correct, weight.sum(dtype=loss.dtype))}

    def target_scores(self, h, batch, rows):
        log_likelihood, is_likeliest = score_targets(
            *self.unembedding(h), batch.targets, self.vocab, self.policy.softcap
        )
        scores = {"log_likelihood": log_likelihood, "greedy": is_likeliest.astype(log_likelihood.dtype)}
        scores = jax.tree.map(gather_rows, scores)
        return {name: place_rows(z, batch.sample_ids, rows) for name, z in scores.items()}

    def logits(self, h, batch):
        """`tokens`: [batch, time, padded vocab]; padding is -inf, so that it is never sampled."""
        h, table, bias = self.unembedding(h)
        h = gather_sequence(h)
        z = jnp.einsum("btd,vd->btv", h, table, preferred_element_type=jnp.promote_types(h.dtype, jnp.float32))
        z = softcap(z if bias is None else z + bias.astype(z.dtype), self.policy.softcap)
        z = jnp.where(global_indices("vocab", z.shape[-1]) < self.vocab, z, -jnp.inf)
        return {"tokens": gather_rows(all_gather(z, "vocab", 2))}


class MaskedLMHead(CausalLMHead):
    """Predicts masked tokens, through one more layer and the token table (BERT, arXiv:1810.04805); with sentence_order
    also, from a row's first token, whether its two segments are in order (ALBERT, arXiv:1909.11942)."""

    loss_name = "masked_lm"

    def __init__(self, init: ParamInit, policy: LogitsPolicy, *, sentence_order: bool):
        super().__init__(init, policy, pooled=sentence_order)
        c = init.c
        self.transform, self.transform_bias = init.linear(c.width, "feature", "head")
        self.transform_norm = Norm(init)
        self.output_bias = init.bias(c.vocab, "vocab", "head")
        self.activation = "gelu" if c.gated else c.activation
        self.sentence_order = sentence_order
        if sentence_order:
            self.binary, self.binary_bias = init.linear(2, "label", "head")

    def unembedding(self, h):
        h = add_bias(self.matrix("transform").multiply(h), self.transform_bias)
        h = jax.checkpoint(ACTIVATIONS[self.activation])(h)
        h, table, _ = super().unembedding(self.transform_norm(h))
        return h, table, None if self.output_bias is None else self.output_bias[...]

    def order_logits(self, h: jax.Array) -> jax.Array:
        """Logits [batch, shards, 2]: the row is in order, or swapped.  See `row_logits`."""
        return self.row_logits(h, "binary", self.binary_bias)

    def losses(self, h, batch, weights, key):
        losses = super().losses(h, batch, weights, key)
        if self.sentence_order:
            row_losses = nll(self.order_logits(h), batch.labels[:, None]) * weights["sentence_order"][:, None]
            losses["sentence_order"] = first_shard_sum(row_losses)
        return losses

    def eval_sums(self, h, batch, rows):
        totals = super().eval_sums(h, batch, rows)
        if self.sentence_order:
            z, labels = self.order_logits(h), batch.labels[:, None]
            w = batch.label_weights.astype(z.dtype)[:, None]
            loss, correct = nll(z, labels) * w, jnp.where(z.argmax(-1) == labels, w, 0)
            totals["sentence_order"] = (first_shard_sum(loss), first_shard_sum(correct), w.sum())
        return totals

    def logits(self, h, batch):
        logits = super().logits(h, batch)
        if self.sentence_order:
            logits["sentence_order"] = from_first(from_first_shard(self.order_logits(h), 1))
        return logits


class LabelHead(Head):
    """An output matrix for labelled examples, after the pooler if there is one."""

    def __init__(self, init: ParamInit, size: int, *, pooled: bool = True):
        super().__init__(init, pooled=pooled)
        self.output, self.output_bias = init.linear(size, "label", "head")

    def label_logits(self, h: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        return self.row_logits(h, "output", self.output_bias, key)

    def eval_sums(self, h, batch, rows):
        """Logits [rows, ...], placed by `place_rows`."""
        return jax.tree.map(lambda z: place_rows(z, batch.sample_ids, rows), self.logits(h, batch))


class ClassificationHead(LabelHead):
    """Predicts the class of a row."""

    def losses(self, h, batch, weights, key):
        row_losses = nll(self.label_logits(h, key), batch.labels[:, None]) * weights["classification"][:, None]
        return {"classification": first_shard_sum(row_losses)}

    def logits(self, h, batch):
        """`classes`: [batch, classes]."""
        return {"classes": from_first(from_first_shard(self.label_logits(h), 1))}


class MultipleChoiceHead(LabelHead):
    """Predicts which of several rows is correct: one score per row, and a softmax over the rows of a question."""

    def __init__(self, init: ParamInit, choices: int):
        super().__init__(init, 1)
        self.choices = choices

    def losses(self, h, batch, weights, key):
        z = group_rows(self.label_logits(h, key)[..., 0], self.choices).swapaxes(1, 2)  # [questions, shards, choices]
        # The first row of each question has its label and weight.
        labels, w = (group_rows(x, self.choices)[:, :1] for x in (batch.labels, weights["multiple_choice"]))
        return {"multiple_choice": first_shard_sum(nll(z, labels) * w)}

    def logits(self, h, batch):
        """`choices`: [batch]."""
        return {"choices": from_first(from_first_shard(self.label_logits(h), 1)[:, 0])}


class ExtractiveQAHead(LabelHead):
    """Predicts where an answer starts and ends: two scores per token, and a softmax over a row for each."""

    def losses(self, h, batch, weights, key):
        z = self.logits(h, batch)["spans"]
        row_losses = (nll(z[..., 0], batch.labels) + nll(z[..., 1], batch.end_positions)) / 2
        return {"span": (row_losses * weights["span"]).sum()}

    def logits(self, h, batch):
        """`spans`: [batch, time, 2], -inf at padding."""
        z = add_bias(self.matrix("output").multiply(h), self.output_bias)
        z = gather_rows(upcast(gather_replicated_grad(z)))
        return {"spans": jnp.where(batch.segments_of_rows[..., None] > 0, z, -jnp.inf)}


def make_head(init: ParamInit, objective: Objective, policy: LogitsPolicy) -> Head:
    match objective:
        case MaskedLM(sentence_order=sentence_order):
            return MaskedLMHead(init, policy, sentence_order=sentence_order)
        case Classification(classes=classes):
            return ClassificationHead(init, classes)
        case MultipleChoice(choices=choices):
            return MultipleChoiceHead(init, choices)
        case ExtractiveQA():
            return ExtractiveQAHead(init, 2, pooled=False)
    return CausalLMHead(init, policy)


def nonzero_totals(weights: LossDict) -> LossDict:
    """Divisors that make means of weighted sums: total weights, or 1 where they are 0, so that the mean is 0."""
    return {name: jnp.where(total > 0, total, 1) for name, total in weights.items()}


def loss_weights(objective: Objective, batch: Batch) -> LossDict:
    """The weights of the tokens or rows that each loss is a mean over."""
    if not objective.predicts_tokens:
        return {objective.kind: batch.label_weights}
    order = {"sentence_order": batch.label_weights} if objective.has_sequence_label else {}
    return {objective.kind: batch.loss_weights} | order
