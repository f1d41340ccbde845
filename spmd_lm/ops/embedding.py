"""Embedding lookup with a sharded vocabulary: each device looks up the rows that it holds, and a sum completes them.

Megatron's parallel embedding (arXiv:1909.08053, section 3): one all-reduce forward, none backward; where the sequence
is sharded too, one reduce-scatter and one all-gather."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from spmd_lm.active_rules import num_shards, partition_spec
from spmd_lm.axes import SEQUENCE
from spmd_lm.ops.collectives import (
    as_gradient,
    gather_sequence,
    local_slice,
    manual_region,
    reduce_scatter_or_psum,
    shard_index,
)
from spmd_lm.ops.compiler_workarounds import late_zeros


def local_rows(ids: Array, rows: int, name: str) -> tuple[Array, Array]:
    """`ids` as row numbers of this device's shard of the dimension `name`, and whether each is in it."""
    local = ids - shard_index(name) * rows
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: Array, ids: Array, name: str) -> Array:
    """Embeddings [batch, sequence, width] of ids (int32 [batch, time]).  table: [rows sharded along `name`, width].

    If the rows are not sharded, each device looks up its shard of the sequence, and has the gradient of that alone."""
    return manual_region(functools.partial(_lookup, name=name), partition_spec("batch", SEQUENCE, None))(table, ids)


def _lookup(table: Array, ids: Array, name: str) -> Array:
    if num_shards(name) == 1:
        return table[local_slice(ids, SEQUENCE, 1)]
    rows, in_shard = local_rows(ids, table.shape[0], name)
    return reduce_scatter_or_psum(jnp.where(in_shard[..., None], table[rows], 0).astype(table.dtype), name)


def _table_gradient(table: Array, ids: Array, g: Array, name: str) -> Array:
    if num_shards(name) == 1:
        rows = local_slice(ids, SEQUENCE, 1)
    else:
        rows, in_shard = local_rows(ids, table.shape[0], name)
        g = jnp.where(in_shard[..., None], gather_sequence(g), 0)
    accum_dtype = jnp.promote_types(table.dtype, jnp.float32)  # a sum in bfloat16 stalls at 256 equal addends
    zeros = late_zeros(table.shape, g, accum_dtype)
    return zeros.at[rows].add(g.astype(accum_dtype)).astype(table.dtype)


def _forward(table, ids, name):
    return lookup(table, ids, name), (table, ids)


def _backward(name, saved, g):
    table, ids = saved
    # Where rows are not sharded, each device has the gradient of its shard of the sequence.
    addends = ("batch",) if num_shards(name) > 1 else ("batch", SEQUENCE)
    gradient = manual_region(
        functools.partial(_table_gradient, name=name), partition_spec(name, None, unreduced=addends)
    )
    return as_gradient(gradient(table, ids, g), table), None


lookup.defvjp(_forward, _backward)
