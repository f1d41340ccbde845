"""Cross-entropy of a linear head without ever holding all logits: it runs over chunks of tokens, and computes gradients
in the forward pass.

The vocabulary may be sharded.  Then devices exchange a maximum, a normalizer and the target's logit per token, and the
input's gradient, but no other logits (arXiv:1909.08053, section 3).  Logits are float32 or wider, though
LogitsPolicy may round them.  Rows of the table from `vocab` on are padding: they get no probability and no gradient.

Shapes: N tokens of one chunk, V local rows of the table, W width."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.active_rules import num_shards, partition_spec
from spmd_lm.axes import SEQUENCE
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
from spmd_lm.ops.compiler_workarounds import finish_in_forward
from spmd_lm.ops.embedding import local_rows
from spmd_lm.ops.softcap import softcap

CHUNK_BYTES = 2**27
"""Most bytes of logits that a device holds at a time, unless LogitsPolicy.tokens is set.  Below about 32 MiB a CPU
loses time to short matmuls."""


class LogitsPolicy(NamedTuple):
    """Dtypes and chunks of logits in a step.  accum_dtype: sums the chunks' gradients of table and bias, unless theirs
    is wider.  compute: whether matmuls write logits in the compute dtype; softmax is float32 or wider all the same.
    tokens: per chunk; None for what fits into CHUNK_BYTES.  softcap: cap of the logits, or None."""

    accum_dtype: str = "float32"
    compute: bool = False
    tokens: int | None = None
    softcap: float | None = None


DEFAULT = LogitsPolicy()


def chunks(tokens: int, row_bytes: int, each: int | None = None) -> tuple[int, int]:
    """(number, size) of the fewest equal chunks that hold `tokens`: of `each` tokens, or with logits within
    CHUNK_BYTES.  The last one's padding has weight 0."""
    if each:
        return -(-tokens // each), each
    number = min(tokens, -(-tokens * row_bytes // CHUNK_BYTES))
    return number, -(-tokens // number)


def _logits_dtype(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


class ForwardChunk(NamedTuple):
    nll: Array  # [N]: negative log-likelihood of the target, in nats
    logits: Array  # [N, V]; -inf for padding
    largest: Array  # [N]: the largest logit of the whole vocabulary
    normalizer: Array  # [N]: the sum over the whole vocabulary of exp(logits - largest)


def _forward_chunk(
    x: Array, targets: Array, table: Array, bias: Array | None, vocab: int, policy: LogitsPolicy = DEFAULT
) -> ForwardChunk:
    """x: inputs [N, W]; targets: [N]."""
    rows, dtype = table.shape[0], _logits_dtype(x)
    matmul_dtype = x.dtype if policy.compute else dtype
    logits = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=matmul_dtype).astype(dtype)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    logits = softcap(logits, policy.softcap)
    if vocab < rows * num_shards("vocab"):
        logits = jnp.where(global_indices("vocab", rows) < vocab, logits, -jnp.inf)
    local_largest, local_normalizer = _largest_and_normalizer(logits)
    largest = pmax(local_largest, "vocab")
    target_row, in_shard = local_rows(targets, rows, "vocab")
    target_logit = jnp.where(in_shard, jnp.take_along_axis(logits, target_row[:, None], 1)[:, 0], 0)
    normalizer, target_logit = psum((local_normalizer * jnp.exp(local_largest - largest), target_logit), "vocab")
    nll = jnp.log(normalizer) + largest - target_logit
    return ForwardChunk(nll, logits, largest, normalizer)


def _largest_and_normalizer(logits: Array) -> tuple[Array, Array]:
    """The largest logit of each row in this shard, and the sum of exp(logits - largest)."""
    return lax.platform_dependent(logits, cuda=_in_one_pass, default=_in_two_passes)


def _in_two_passes(logits: Array) -> tuple[Array, Array]:
    largest = _bounded(logits).max(-1)
    return largest, jnp.exp(logits - largest[:, None]).sum(-1)


def _in_one_pass(logits: Array) -> tuple[Array, Array]:
    """One reduction for both, which merges those of two sets (arXiv:1805.02867): a GPU reads the logits only once."""
    h = _bounded(logits)
    start = jnp.finfo(h.dtype).min, jnp.zeros((), h.dtype)
    return tuple(lax.reduce((h, jnp.ones_like(h)), start, _merge, (1,)))


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    (largest, total), (other, others) = a, b
    shrink = jnp.exp(-jnp.abs(largest - other))
    return jnp.maximum(largest, other), jnp.where(largest >= other, total + others * shrink, total * shrink + others)


def _bounded(logits: Array) -> Array:
    """Logits with padding's -inf made finite: in a shard of padding alone, -inf minus the largest would be NaN."""
    return jnp.maximum(logits, jnp.finfo(logits.dtype).min)


def _is_likeliest(chunk: ForwardChunk, targets: Array) -> Array:
    """True for each target [N] that is the argmax; of equal logits the first counts, in whichever shard."""
    is_largest = chunk.logits == chunk.largest[:, None]
    ids = global_indices("vocab", chunk.logits.shape[1])
    first = -pmax(jnp.where(is_largest, -ids, -jnp.iinfo(ids.dtype).max).max(-1), "vocab")
    return targets == first


def _in_chunks(h: Array, targets: Array, weights: Array, vocab: int, each: int | None = None) -> tuple[Array, ...]:
    """h [batch, time, W], targets and weights [batch, time] as [chunks, N, ...], padded with weight 0.

    vocab: local rows of the table.  each: tokens per chunk."""
    tokens, dtype = math.prod(h.shape[:2]), _logits_dtype(h)
    number, size = chunks(tokens, vocab * dtype.itemsize, each)

    def split(a: Array) -> Array:
        flat = a.reshape(tokens, *a.shape[2:])
        padding = [(0, number * size - tokens)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(number, size, *a.shape[2:])

    return split(h), split(targets), split(weights.astype(dtype))


def evaluate_cross_entropy(
    h, table, bias, targets, weights, vocab: int, softcap: float | None = None
) -> tuple[Array, Array]:
    """The `cross_entropy`, and the sum of the weights of tokens whose target is the argmax; not differentiable."""
    total = partition_spec(unreduced=("batch",))
    policy = LogitsPolicy(softcap=softcap)
    evaluate = manual_region(functools.partial(_evaluate, vocab=vocab, policy=policy), (total, total))
    return psum_unreduced(evaluate(h, table, bias, targets, weights))


def _evaluate(h, table, bias, targets, weights, *, vocab: int, policy: LogitsPolicy) -> tuple[Array, Array]:
    def add_chunk(total, part):
        x, targets, weights = part
        chunk = _forward_chunk(x, targets, table, bias, vocab, policy)
        correct = jnp.where(_is_likeliest(chunk, targets), weights, 0)
        return (total[0] + (chunk.nll * weights).sum(), total[1] + correct.sum()), None

    h = gather_sequence(h)
    parts = _in_chunks(h, targets, weights, table.shape[0])
    return lax.scan(add_chunk, (jnp.zeros((), _logits_dtype(h)),) * 2, parts)[0]


def score_targets(h, table, bias, targets, vocab: int, softcap: float | None = None) -> tuple[Array, Array]:
    """Log-likelihood of each target [batch, time] in nats, float32 or wider, and whether it is the argmax.

    Arguments: those of `cross_entropy`; not differentiable."""
    spec, policy = partition_spec("batch", None), LogitsPolicy(softcap=softcap)
    score = manual_region(functools.partial(_score_targets, vocab=vocab, policy=policy), (spec, spec))
    return score(h, table, bias, targets)


def _score_targets(h, table, bias, targets, *, vocab: int, policy: LogitsPolicy) -> tuple[Array, Array]:
    def score_chunk(_, part):
        x, targets, _ = part
        chunk = _forward_chunk(x, targets, table, bias, vocab, policy)
        return None, (-chunk.nll, _is_likeliest(chunk, targets))

    h = gather_sequence(h)
    parts = _in_chunks(h, targets, jnp.ones(targets.shape), table.shape[0])
    _, scored = lax.scan(score_chunk, None, parts)
    log_likelihood, is_likeliest = (x.ravel()[: targets.size].reshape(targets.shape) for x in scored)
    return log_likelihood, is_likeliest


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    h: Array,
    table: Array,
    bias: Array | None,
    targets: Array,
    weights: Array,
    vocab: int,
    policy: LogitsPolicy = DEFAULT,
) -> Array:
    """Sum over tokens of weight x negative log-likelihood, in nats, float32 or wider.

    h: [batch, sequence, width]; table: [local rows of the padded vocabulary, width]; bias: [local rows]; targets: int32
    [batch, time]; weights: float [batch, time]."""
    return evaluate_cross_entropy(h, table, bias, targets, weights, vocab, policy.softcap)[0]


def _forward(h, table, bias, targets, weights, vocab, policy):
    """Arguments: CustomVJPPrimals, which know whether they are differentiated."""
    over_batch = {"unreduced": ("batch",)}
    specs = (
        partition_spec("batch", SEQUENCE, None),
        partition_spec("vocab", None, **over_batch),
        partition_spec("vocab", **over_batch),
    )
    differentiated = tuple(x is not None and x.perturbed for x in (h, table, bias))
    gradient_specs = tuple(spec if has_one else None for spec, has_one in zip(specs, differentiated, strict=True))
    *operands, targets, weights = (None if x is None else x.value for x in (h, table, bias, targets, weights))
    region = functools.partial(_loss_and_gradients, vocab=vocab, policy=policy, differentiated=differentiated)
    loss, gradients = manual_region(region, (partition_spec(**over_batch), gradient_specs))(operands, targets, weights)
    gradients = [None if g is None else as_gradient(g, x) for g, x in zip(gradients, operands, strict=True)]
    return psum_unreduced(loss), (*gradients, weights)


def _loss_and_gradients(
    operands, targets, weights, *, vocab: int, policy: LogitsPolicy, differentiated: tuple[bool, ...]
):
    """Loss, and the gradients of the operands h, table and bias for a loss gradient of 1; None for those that are not
    differentiated."""
    (h, table, bias), (of_h, of_table, of_bias) = operands, differentiated

    def accumulator(x: Array, has_gradient: bool) -> Array | None:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, policy.accum_dtype)) if has_gradient else None

    def add_chunk(total, part):
        (loss, d_table, d_bias), (x, targets, weights) = total, part
        nll, logits, largest, normalizer = _forward_chunk(x, targets, table, bias, vocab, policy)
        is_target = global_indices("vocab", table.shape[0]) == targets[:, None]
        probabilities = jnp.exp(logits - largest[:, None]) / normalizer[:, None]
        d_logits = (probabilities - is_target) * weights[:, None]
        if policy.softcap is not None:  # padding, whose logits are -inf, has gradient 0
            d_logits = d_logits * jnp.where(jnp.isfinite(logits), 1 - jnp.square(logits / policy.softcap), 0)
        g = d_logits.astype(x.dtype)
        if of_table:
            d_table = d_table + jnp.einsum("nv,nd->vd", g, x, preferred_element_type=d_table.dtype)
        d_bias = d_bias + d_logits.sum(0, dtype=d_bias.dtype) if of_bias else None
        return (loss + (nll * weights).sum(), d_table, d_bias), jnp.einsum("nv,vd->nd", g, table) if of_h else None

    h = gather_sequence(h)
    batch, time, width = h.shape
    parts = _in_chunks(h, targets, weights, table.shape[0], policy.tokens)
    start = jnp.zeros((), _logits_dtype(h)), accumulator(table, of_table), accumulator(bias, of_bias)
    (loss, d_table, d_bias), d_h = finish_in_forward(lax.scan(add_chunk, start, parts))
    if of_h:
        d_h = reduce_scatter_or_psum(d_h.reshape(-1, width)[: batch * time].reshape(batch, time, width), "vocab")
    d_table, d_bias = (None if d is None else d.astype(x.dtype) for d, x in ((d_table, table), (d_bias, bias)))
    return loss, (d_h, d_table, d_bias)


def _backward(vocab, policy, saved, g):
    *gradients, weights = saved
    d_h, d_table, d_bias = (None if d is None else scale(g.astype(d.dtype), d) for d in gradients)
    return d_h, d_table, d_bias, None, jnp.zeros_like(weights)


cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)
