"""Embedding lookup with a sharded vocabulary: each device looks up the rows that it holds, and a sum completes them.

Megatron's parallel embedding (arXiv:1909.08053, section 3): one all-reduce forward, none backward; where the sequence
is sharded too, one reduce-scatter and one all-gather."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from spmd_lm.axes import SEQUENCE, num_shards
from spmd_lm.ops.collectives import gather_sequence, local_slice, reduce_scatter_or_psum, shard_index


def local_rows(ids: Array, rows: int, name: str) -> tuple[Array, Array]:
    """`ids` as row numbers of this device's shard of the dimension `name`, and whether they are in it."""
    local = ids - shard_index(name) * rows
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: Array, ids: Array, name: str) -> Array:
    """Embeddings [batch, sequence, width] of ids (int32 [batch, time]).  table: [local rows, width], of `name`.

    If the rows are not sharded each device looks up its shard of the sequence, and its gradient is of that alone."""
    if num_shards(name) == 1:
        return table[local_slice(ids, SEQUENCE, 1)]
    rows, in_shard = local_rows(ids, table.shape[0], name)
    return reduce_scatter_or_psum(jnp.where(in_shard[..., None], table[rows], 0).astype(table.dtype), name)


def _backward(name, saved, g):
    table, ids = saved
    if num_shards(name) == 1:
        rows = local_slice(ids, SEQUENCE, 1)
    else:
        rows, in_shard = local_rows(ids, table.shape[0], name)
        g = jnp.where(in_shard[..., None], gather_sequence(g), 0)
    wide = jnp.promote_types(table.dtype, jnp.float32)  # a sum in bfloat16 stalls at 256 equal addends
    return jnp.zeros(table.shape, wide).at[rows].add(g.astype(wide)).astype(table.dtype), None


lookup.defvjp(lambda table, ids, name: (lookup(table, ids, name), (table, ids)), _backward)
