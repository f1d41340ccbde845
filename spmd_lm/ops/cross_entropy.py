"""Cross-entropy of a linear head that never holds all logits: it runs over chunks of tokens, and computes gradients in
the forward pass.

The vocabulary may be sharded.  Then devices exchange a maximum, a normalizer and the target's logit per token, and the
input's gradient, but no other logits (arXiv:1909.08053, section 3).  Logits are float32 or wider whatever the matrices
are.  Rows of the table from `vocab` on are padding: they get no probability and no gradient.

Shapes: N tokens of one chunk, V local rows of the table, W width."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.axes import SEQUENCE, num_shards, partition_spec
from spmd_lm.ops.collectives import (
    as_gradient,
    gather_sequence,
    global_indices,
    manual_region,
    pmax,
    psum,
    psum_unreduced,
    reduce_scatter_or_psum,
    scale,
)
from spmd_lm.ops.embedding import local_rows

CHUNK_BYTES = 2**27
"""Most bytes of logits that one device holds at a time.  Below about 32 MiB a CPU loses time to short products."""


def chunks(tokens: int, row_bytes: int) -> tuple[int, int]:
    """(number, tokens in each) of the fewest equal chunks that hold `tokens` with logits within CHUNK_BYTES.

    Together they may hold a few tokens more: those have weight 0."""
    number = min(tokens, -(-tokens * row_bytes // CHUNK_BYTES))
    return number, -(-tokens // number)


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


class ForwardChunk(NamedTuple):
    nll: Array  # [N]: negative log-likelihood of the target, in nats
    logits: Array  # [N, V]; -inf for padding
    largest: Array  # [N]: the largest logit of the whole vocabulary
    exponentials: Array  # [N, V]: of the logits less the largest
    normalizer: Array  # [N]: their sum over the whole vocabulary


def _forward_chunk(x, targets, table: Array, bias: Array | None, vocab: int) -> ForwardChunk:
    """x: inputs [N, W]; targets: [N]."""
    rows, wide = table.shape[0], _wide(x)
    logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=wide)
    if bias is not None:
        logits = logits + bias.astype(wide)
    if vocab < rows * num_shards("vocab"):
        logits = jnp.where(global_indices("vocab", rows) < vocab, logits, -jnp.inf)
    largest = pmax(logits.max(-1), "vocab")
    target_row, in_shard = local_rows(targets, rows, "vocab")
    target_logit = jnp.where(in_shard, jnp.take_along_axis(logits, target_row[:, None], 1)[:, 0], 0)
    exponentials = jnp.exp(logits - largest[:, None])
    normalizer, target_logit = psum((exponentials.sum(-1), target_logit), "vocab")
    nll = jnp.log(normalizer) + largest - target_logit
    return ForwardChunk(nll, logits, largest, exponentials, normalizer)


def _is_likeliest(chunk: ForwardChunk, targets: Array) -> Array:
    """Whether each target [N] is the token that argmax takes: the first one of equals, whichever shards they are in."""
    is_largest = chunk.logits == chunk.largest[:, None]
    ids = global_indices("vocab", chunk.logits.shape[1])
    first = -pmax(jnp.where(is_largest, -ids, -jnp.iinfo(ids.dtype).max).max(-1), "vocab")
    return targets == first


def _in_chunks(h: Array, targets: Array, weights: Array, rows: int) -> tuple[Array, ...]:
    """h [batch, time, W], targets and weights [batch, time] as [chunks, N, ...], padded with weight 0."""
    tokens, wide = math.prod(h.shape[:2]), _wide(h)
    number, size = chunks(tokens, rows * wide.itemsize)

    def split(a: Array) -> Array:
        flat = a.reshape(tokens, *a.shape[2:])
        padding = [(0, number * size - tokens)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(number, size, *a.shape[2:])

    return split(h), split(targets), split(weights.astype(wide))


def evaluate_cross_entropy(h, table, bias, targets, weights, vocab: int) -> tuple[Array, Array]:
    """As `cross_entropy`, and the sum of the weights of tokens whose target is the likeliest; not differentiable."""
    total = partition_spec(unreduced=("batch",))
    evaluate = manual_region(functools.partial(_evaluate, vocab=vocab), (total, total))
    return psum_unreduced(evaluate(h, table, bias, targets, weights))


def _evaluate(h, table, bias, targets, weights, *, vocab: int) -> tuple[Array, Array]:
    def add_chunk(total, part):
        x, targets, weights = part
        chunk = _forward_chunk(x, targets, table, bias, vocab)
        correct = jnp.where(_is_likeliest(chunk, targets), weights, 0)
        return (total[0] + (chunk.nll * weights).sum(), total[1] + correct.sum()), None

    h = gather_sequence(h)
    parts = _in_chunks(h, targets, weights, table.shape[0])
    return lax.scan(add_chunk, (jnp.zeros((), _wide(h)),) * 2, parts)[0]


def score_targets(h, table, bias, targets, vocab: int) -> tuple[Array, Array]:
    """Of each target, [batch, time]: its log-likelihood in nats, float32 or wider, and whether argmax takes it.

    Arguments as of `cross_entropy`; not differentiable."""
    spec = partition_spec("batch", None)
    score = manual_region(functools.partial(_score_targets, vocab=vocab), (spec, spec))
    return score(h, table, bias, targets)


def _score_targets(h, table, bias, targets, *, vocab: int) -> tuple[Array, Array]:
    def score_chunk(_, part):
        x, targets, _ = part
        chunk = _forward_chunk(x, targets, table, bias, vocab)
        return None, (-chunk.nll, _is_likeliest(chunk, targets))

    h = gather_sequence(h)
    parts = _in_chunks(h, targets, jnp.ones(targets.shape), table.shape[0])
    _, scored = lax.scan(score_chunk, None, parts)
    log_likelihood, is_likeliest = (x.ravel()[: targets.size].reshape(targets.shape) for x in scored)
    return log_likelihood, is_likeliest


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    h: Array, table: Array, bias: Array | None, targets: Array, weights: Array, vocab: int, accum_dtype: str = "float32"
) -> Array:
    """Sum over tokens of weight x negative log-likelihood, in nats, float32 or wider.

    h: [batch, sequence, width]; table: [local rows of the padded vocabulary, width]; bias: [local rows]; targets: int32
    [batch, time]; weights: float [batch, time].  accum_dtype: dtype in which the chunks' gradients of table and bias
    are summed, or the table's if that is wider."""
    return evaluate_cross_entropy(h, table, bias, targets, weights, vocab)[0]


def _forward(h, table, bias, targets, weights, vocab, accum_dtype):
    over_batch = {"unreduced": ("batch",)}  # where the addends of what follows lie
    d_bias_spec = None if bias is None else partition_spec("vocab", **over_batch)
    gradient_specs = partition_spec("batch", SEQUENCE, None), partition_spec("vocab", None, **over_batch), d_bias_spec
    region = functools.partial(_loss_and_gradients, vocab=vocab, accum_dtype=accum_dtype)
    loss, gradients = manual_region(region, (partition_spec(**over_batch), gradient_specs))(
        h, table, bias, targets, weights
    )
    gradients = [None if x is None else as_gradient(g, x) for g, x in zip(gradients, (h, table, bias), strict=True)]
    return psum_unreduced(loss), (*gradients, weights)


def _loss_and_gradients(h, table, bias, targets, weights, *, vocab: int, accum_dtype: str):
    """Loss, and the gradients of h, table and bias for a loss gradient of 1."""

    def accumulator(x: Array) -> Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, accum_dtype))

    def add_chunk(total, part):
        (loss, d_table, d_bias), (x, targets, weights) = total, part
        nll, _, _, exponentials, normalizer = _forward_chunk(x, targets, table, bias, vocab)
        is_target = global_indices("vocab", table.shape[0]) == targets[:, None]
        d_logits = exponentials * (weights / normalizer)[:, None] - jnp.where(is_target, weights[:, None], 0)
        g = d_logits.astype(x.dtype)
        d_table = d_table + jnp.einsum("nv,nd->vd", g, x, preferred_element_type=d_table.dtype)
        d_bias = None if d_bias is None else d_bias + d_logits.sum(0, dtype=d_bias.dtype)
        return (loss + (nll * weights).sum(), d_table, d_bias), jnp.einsum("nv,vd->nd", g, table)

    h = gather_sequence(h)
    batch, time, width = h.shape
    parts = _in_chunks(h, targets, weights, table.shape[0])
    start = jnp.zeros((), _wide(h)), accumulator(table), None if bias is None else accumulator(bias)
    # XLA unrolls a loop over one chunk, and would compute the loss and d_table after backward, keeping the logits.
    (loss, d_table, d_bias), d_h = lax.optimization_barrier(lax.scan(add_chunk, start, parts))
    d_h = reduce_scatter_or_psum(d_h.reshape(-1, width)[: batch * time].reshape(batch, time, width), "vocab")
    d_bias = None if bias is None or d_bias is None else d_bias.astype(bias.dtype)
    return loss, (d_h, d_table.astype(table.dtype), d_bias)


def _backward(vocab, accum_dtype, saved, g):
    *gradients, weights = saved
    d_h, d_table, d_bias = (None if d is None else scale(g.astype(d.dtype), d) for d in gradients)
    return d_h, d_table, d_bias, None, jnp.zeros_like(weights)


cross_entropy.defvjp(_forward, _backward)
