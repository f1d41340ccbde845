"""Rows whose tokens several devices share: which of them a device has, and how it sees those of the others.

Tokens lie in the order of the row; where attention is a causal ring in zig-zag: of 2n chunks device c has c and
2n - 1 - c, so that all devices have as many pairs of a token with itself or an earlier one.  Token 0 is on the first
device in both."""

import math

import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.active_rules import active_axes, axis_rules, num_shards
from spmd_lm.axes import TIME
from spmd_lm.ops.collectives import psum, shard_index, time_positions, with_gradient


def own_tokens(x: Array, dim: int) -> Array:
    """This device's tokens of x, which has those of whole rows along `dim`."""
    if not active_axes(TIME):
        return x
    return jnp.take(x, time_positions(x.shape[dim] // num_shards(TIME)), dim, unique_indices=True, mode="clip")


@with_gradient(lambda g, name: own_tokens(psum(g, name), 1))
def _gather_rows(x: Array, name: str) -> Array:
    whole = jnp.zeros((x.shape[0], x.shape[1] * num_shards(name), *x.shape[2:]), x.dtype)
    return psum(whole.at[:, time_positions(x.shape[1])].set(x, unique_indices=True), name)


def gather_rows(x: Array) -> Array:
    """x [batch, time, ...] of this device's tokens as whole rows, in order.  Devices' gradients are summed."""
    return _gather_rows(x, TIME) if active_axes(TIME) else x


def on_first(x: Array) -> Array:
    """x on the first device along `time`, zeros on the others: what is of a row is counted once."""
    return jnp.where(shard_index(TIME) == 0, x, jnp.zeros((), x.dtype)) if active_axes(TIME) else x


def from_first(x: Array) -> Array:
    """x of the first device along `time`, on all of them."""
    return psum(on_first(x), TIME)


# ---- attention by heads (DeepSpeed-Ulysses, arXiv:2309.14509)


@with_gradient(lambda g, name: heads_to_time(g, name))
def time_to_heads(x: Array, name: str) -> Array:
    """x [batch, time, heads, ...] of a device's tokens: all tokens of the row, and of the heads the device's share.  An
    all-to-all; backward sends gradients the other way.  name: `time`."""
    return lax.all_to_all(x, active_axes(name), 2, 1, tiled=True)


@with_gradient(lambda g, name: time_to_heads(g, name))
def heads_to_time(x: Array, name: str) -> Array:
    """The inverse of `time_to_heads`."""
    return lax.all_to_all(x, active_axes(name), 1, 2, tiled=True)


def repeat_heads(x: Array) -> Array:
    """Key or value heads, x [batch, time, heads, width], each as often as it takes for all devices along `time` to get
    as many."""
    heads = x.shape[2]
    return jnp.repeat(x, math.lcm(heads, num_shards(TIME)) // heads, axis=2)


def attends_in_a_ring() -> bool:
    """True if keys and values travel between devices that share rows."""
    rules = axis_rules()
    return bool(active_axes(TIME)) and rules is not None and rules.ring
