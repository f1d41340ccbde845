"""A table lookup with the vocabulary split over devices: each looks up the rows it holds, and the sum completes them.

Megatron's parallel embedding (arXiv:1909.08053, section 3): one all-reduce forward, none backward."""

import functools

import jax
import jax.numpy as jnp

from spmd_lm import axes

IDS, OUT = ("batch", None), ("batch", None, None)


def own_rows(ids: jax.Array, rows: int, name: str = "vocab") -> tuple[jax.Array, jax.Array]:
    """Inside `per_shard`: `ids` as rows of this device's part of the dimension `name`, and whether they are in it."""
    local = ids - axes.index(name) * rows
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, ids: jax.Array, name: str = "vocab") -> jax.Array:
    """table: [rows, width], its rows called `name`; ids: int32 [batch, time] -> [batch, time, width]."""

    def local(table, ids):
        rows, mine = own_rows(ids, table.shape[0], name)
        return axes.total(jnp.where(mine[..., None], table[rows], 0).astype(table.dtype), name)

    return axes.per_shard(local, ((name, None), IDS), OUT)(table, ids)


def _backward(name, saved, g):
    table, ids = saved

    def local(table, ids, g):
        rows, mine = own_rows(ids, table.shape[0], name)
        wide = jnp.promote_types(table.dtype, jnp.float32)  # a sum in bfloat16 stalls at 256 equal addends
        d_table = jnp.zeros(table.shape, wide).at[rows].add(jnp.where(mine[..., None], g, 0).astype(wide))
        return d_table.astype(table.dtype)

    return axes.per_shard(local, ((name, None), IDS, OUT), (name, None))(table, ids, g), None


lookup.defvjp(lambda table, ids, name: (lookup(table, ids, name), (table, ids)), _backward)
