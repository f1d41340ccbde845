"""Cross-entropy of a linear head that never holds its logits: one chunk of tokens at a time, gradients formed on the
way.

The vocabulary may be split over devices.  Then only token-sized values cross them: a maximum, a normaliser and the
target's logit forward, one sum of the input gradient backward (arXiv:1909.08053, section 3).  Logits are float32 or
wider whatever the matrices are.  Rows of the table at or beyond `vocab` are padding: they take no probability and no
gradient.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm import axes
from spmd_lm.ops.collectives import gather_sequence, global_indices, pmax, psum, reduce_scatter_or_psum
from spmd_lm.ops.embedding import own_rows

CHUNK_BYTES = 2**27
"""Most bytes of logits that one device holds at a time.  Below about 32 MiB a CPU loses time to short products."""


def chunks(tokens: int, row_bytes: int) -> tuple[int, int]:
    """(number, tokens in each) of the fewest equal chunks that hold `tokens` with logits within CHUNK_BYTES.

    Together they may hold a few tokens more: those have weight 0."""
    number = min(tokens, -(-tokens * row_bytes // CHUNK_BYTES))
    return number, -(-tokens // number)


def _wide(x: jax.Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _local(h, table, bias, targets, weights, vocab: int, sums: str, differentiate: bool):
    """What one device does: sums over its tokens of weight x nll and of weights whose target is the likeliest; or, if
    asked, the first and its gradients."""
    h = gather_sequence(h)
    b, t, width = h.shape
    rows, wide = table.shape[0], _wide(h)
    n, size = chunks(b * t, rows * wide.itemsize)

    def cut(a):
        flat = a.reshape(b * t, *a.shape[2:])
        return jnp.pad(flat, [(0, n * size - b * t)] + [(0, 0)] * (flat.ndim - 1)).reshape(n, size, *a.shape[2:])

    column = global_indices("vocab", rows)

    def chunk(carry, part):
        x, y, w = part
        z = jnp.einsum("nd,vd->nv", x, table, preferred_element_type=wide)
        if bias is not None:
            z = z + bias.astype(wide)
        if vocab < rows * axes.num_shards("vocab"):
            z = jnp.where(column < vocab, z, -jnp.inf)
        top = pmax(z.max(-1), "vocab")
        own, mine = own_rows(y, rows, "vocab")
        own = jnp.where(mine, jnp.take_along_axis(z, own[:, None], 1)[:, 0], 0)
        e = jnp.exp(z - top[:, None])
        norm, own = psum((e.sum(-1), own), "vocab")
        nll = jnp.log(norm) + top - own
        loss = carry[0] + (nll * w).sum()
        if not differentiate:
            return (loss, carry[1] + jnp.where(own >= top, w, 0).sum()), None
        wide_g = e * (w / norm)[:, None] - jnp.where(column == y[:, None], w[:, None], 0)
        g = wide_g.astype(x.dtype)
        d_table = carry[1] + jnp.einsum("nv,nd->vd", g, x, preferred_element_type=carry[1].dtype)
        d_bias = None if bias is None else carry[2] + wide_g.sum(0, dtype=carry[2].dtype)
        return (loss, d_table, d_bias), jnp.einsum("nv,vd->nd", g, table)

    inputs = cut(h), cut(targets), cut(weights.astype(wide))
    if not differentiate:
        return lax.scan(chunk, (jnp.zeros((), wide),) * 2, inputs)[0]
    zeros = lambda x: None if x is None else jnp.zeros(x.shape, jnp.promote_types(x.dtype, sums))  # noqa: E731
    (loss, d_table, d_bias), d_h = lax.scan(chunk, (jnp.zeros((), wide), zeros(table), zeros(bias)), inputs)
    d_h = reduce_scatter_or_psum(d_h.reshape(n * size, width)[: b * t].reshape(b, t, width), "vocab")
    narrow = lambda d, x: None if x is None else d.astype(x.dtype)  # noqa: E731
    return loss, d_h, narrow(d_table, table), narrow(d_bias, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def cross_entropy(
    h: jax.Array,
    table: jax.Array,
    bias: jax.Array | None,
    targets: jax.Array,
    weights: jax.Array,
    vocab: int,
    sums: str = "float32",
) -> jax.Array:
    """Sum over tokens of weight x negative log-likelihood, in nats, float32 or wider.

    h: [batch, sequence, width]; table: [padded vocab here, width]; bias: [padded vocab here], of the logits; targets:
    int32 [batch, time]; weights: float [batch, time].  sums: dtype in which the chunks' gradients of the table are
    added up, or the table's if that is wider."""
    return _local(h, table, bias, targets, weights, vocab, sums, differentiate=False)[0]


def scores(h, table, bias, targets, weights, vocab: int) -> tuple[jax.Array, jax.Array]:
    """The same, and the sum of the weights of those tokens whose target is the likeliest.  Not differentiable."""
    return _local(h, table, bias, targets, weights, vocab, "float32", differentiate=False)


def _forward(h, table, bias, targets, weights, vocab, sums):
    loss, *gradients = _local(h, table, bias, targets, weights, vocab, sums, differentiate=True)
    return loss, (*gradients, weights)


def _backward(vocab, sums, saved, g):
    *gradients, weights = saved
    d_h, d_table, d_bias = (None if d is None else g.astype(d.dtype) * d for d in gradients)
    return d_h, d_table, d_bias, None, jnp.zeros_like(weights)


cross_entropy.defvjp(_forward, _backward)
