"""A table lookup with the vocabulary split over devices: each looks up the rows it holds, and the sum completes them.

Megatron's parallel embedding (arXiv:1909.08053, section 3): one all-reduce forward, none backward; where the sequence
is split too, one reduce-scatter and one all-gather."""

import functools

import jax
import jax.numpy as jnp

from spmd_lm import axes
from spmd_lm.ops.collectives import gather_sequence, local_slice, reduce_scatter_or_psum, shard_index


def own_rows(ids: jax.Array, rows: int, name: str) -> tuple[jax.Array, jax.Array]:
    """`ids` as rows of this device's part of the dimension `name`, and whether they are in it."""
    local = ids - shard_index(name) * rows
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, ids: jax.Array, name: str) -> jax.Array:
    """table: [rows here, width], its rows called `name`; ids: int32 [batch, time] -> [batch, sequence, width].

    Of a whole table each device looks up its part of the sequence, and has gradients of no more."""
    if axes.num_shards(name) == 1:
        return table[local_slice(ids, axes.SEQUENCE, 1)]
    rows, mine = own_rows(ids, table.shape[0], name)
    return reduce_scatter_or_psum(jnp.where(mine[..., None], table[rows], 0).astype(table.dtype), name)


def _backward(name, saved, g):
    table, ids = saved
    if axes.num_shards(name) == 1:
        rows = local_slice(ids, axes.SEQUENCE, 1)
    else:
        rows, mine = own_rows(ids, table.shape[0], name)
        g = jnp.where(mine[..., None], gather_sequence(g), 0)
    wide = jnp.promote_types(table.dtype, jnp.float32)  # a sum in bfloat16 stalls at 256 equal addends
    return jnp.zeros(table.shape, wide).at[rows].add(g.astype(wide)).astype(table.dtype), None


lookup.defvjp(lambda table, ids, name: (lookup(table, ids, name), (table, ids)), _backward)
