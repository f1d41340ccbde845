"""Tokens on their way to experts and back: in buffers whose sizes the model determines, not the data, or sorted by
expert, for a grouped product.

Shapes: T tokens of a device, k choices of each; S slots of all experts, of buffers [experts, groups, capacity]
flattened; E experts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.active_rules import active_axes
from spmd_lm.axes import EXPERTS
from spmd_lm.errors import ConfigError
from spmd_lm.ops.collectives import contract, weight_gradient
from spmd_lm.ops.norm import upcast


@jax.custom_vjp
def router_logits(x: Array, w: Array) -> Array:
    """x [..., width] times w [width, E], in float32 or wider.  Backward saves x in its own dtype."""
    return contract(upcast(x), upcast(w), (x.ndim - 1,), (0,))


def _router_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    d_x = contract(g, upcast(w), (g.ndim - 1,), (1,))
    return d_x.astype(x.dtype), weight_gradient(upcast(x), g, w).astype(w.dtype)


router_logits.defvjp(lambda x, w: (router_logits(x, w), (x, w)), _router_backward)


class Routes(NamedTuple):
    """slot_of: int32 [T, k], the slot of each choice; S for none.
    token_in: int32 [S], the token in each slot; T for none.
    counts: int32 [groups, E], the tokens of a group that choose each expert.
    dropped: number of choices without a slot, as their experts' buffers are full."""

    slot_of: Array
    token_in: Array
    counts: Array
    dropped: Array


def make_routes(chosen: Array, experts: int, group: int, capacity: int) -> Routes:
    """Slots for chosen experts, int32 [T, k]; E is no expert.  In each group of consecutive tokens an expert takes
    `capacity`, first those that chose it first, in their order, then those that chose it second (GShard,
    arXiv:2006.16668, algorithm 1).  Raises ConfigError for more slots than can be counted."""
    tokens, k = chosen.shape
    groups, size = tokens // group, experts * (tokens // group) * capacity
    if size >= 2**31:
        raise ConfigError(f"model.mlp: buffers of {size:,} slots for {tokens:,} tokens of a device. Use fewer tokens.")
    by_rank = chosen.reshape(groups, group, k).swapaxes(1, 2).reshape(groups, -1)
    is_choice = jax.nn.one_hot(by_rank, experts, dtype=jnp.int32)
    position = ((jnp.cumsum(is_choice, 1) - 1) * is_choice).sum(-1)  # in the expert's buffer
    buffer = by_rank * groups + jnp.arange(groups, dtype=jnp.int32)[:, None]
    has_slot = (position < capacity) & (by_rank < experts)
    slot = jnp.where(has_slot, buffer * capacity + position, size)
    slot_of = slot.reshape(groups, k, group).swapaxes(1, 2).reshape(tokens, k)
    index = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], slot_of.shape)
    token_in = jnp.full(size, tokens, jnp.int32).at[slot_of].set(index, mode="drop")
    counts = is_choice.sum(1)
    return Routes(slot_of, token_in, counts, counts.sum() - has_slot.sum())


def sort_by_expert(chosen: Array, experts: int, group: int, multiple: int) -> tuple[Routes, Array]:
    """Slots for chosen experts, int32 [T, k], in the order of experts, then of tokens; E is no expert.  And how many
    slots each expert has, int32 [E].  There are as many as choices, rounded up to a multiple of `multiple`; the last
    expert has those that are empty too, so that each is somebody's."""
    (tokens, k), flat = chosen.shape, chosen.reshape(-1)
    size = -(-flat.size // multiple) * multiple
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    slot = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size, dtype=jnp.int32)).reshape(chosen.shape)
    token_in = jnp.where(flat[order] < experts, order // k, tokens)
    token_in = jnp.pad(token_in, (0, size - flat.size), constant_values=tokens)
    counts = jax.nn.one_hot(chosen.reshape(tokens // group, -1), experts, dtype=jnp.int32).sum(1)
    sizes = counts.sum(0)
    routes = Routes(jnp.where(chosen < experts, slot, size), token_in, counts, jnp.zeros((), jnp.int32))
    return routes, sizes.at[-1].add(size - sizes.sum())


def _rows(x: Array, index: Array) -> Array:
    """The rows of x [n, width] at these indices; zeros for n."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: Array, routes: Routes) -> Array:
    """Copies tokens x [T, width] into their slots, [S, width]; zeros where a slot is empty."""
    return _rows(x, routes.token_in)


def _dispatch_backward(routes: Routes, g: Array) -> tuple[Array, None]:
    return upcast(_rows(g, routes.slot_of)).sum(1).astype(g.dtype), None


dispatch.defvjp(lambda x, routes: (dispatch(x, routes), routes), _dispatch_backward)


@jax.custom_vjp
def combine(y: Array, gates: Array, routes: Routes) -> Array:
    """The sum over a token's choices of gate x the row of y [S, width] in its slot: [T, width], summed in the dtype of
    gates [T, k], float32 or wider."""
    return (_rows(y, routes.slot_of) * gates[..., None]).sum(1).astype(y.dtype)


def _combine_backward(saved: tuple[Array, Array, Routes], g: Array) -> tuple[Array, Array, None]:
    y, gates, routes = saved
    g = _rows(g, routes.token_in).astype(gates.dtype)  # of slots
    gate_in = jnp.zeros(y.shape[0], gates.dtype).at[routes.slot_of].set(gates, mode="drop")
    d_gates = (y * g).sum(1).at[routes.slot_of].get(mode="fill", fill_value=0)
    return (g * gate_in[:, None]).astype(y.dtype), d_gates, None


combine.defvjp(lambda y, gates, routes: (combine(y, gates, routes), (y, gates, routes)), _combine_backward)


@jax.custom_vjp
def to_experts(x: Array) -> Array:
    """Sends buffers x [E, slots, width] of all experts to the devices that have these experts: [experts of this device,
    slots of all devices along `expert`, width].  An all-to-all; backward sends gradients the other way."""
    return _exchange(x, 0, 1)


@jax.custom_vjp
def from_experts(x: Array) -> Array:
    """The inverse of `to_experts`."""
    return _exchange(x, 1, 0)


def _exchange(x: Array, split: int, concat: int) -> Array:
    axes = active_axes(EXPERTS)
    return lax.all_to_all(x, axes, split, concat, tiled=True) if axes else x


to_experts.defvjp(lambda x: (to_experts(x), None), lambda _, g: (from_experts(g),))
from_experts.defvjp(lambda x: (from_experts(x), None), lambda _, g: (to_experts(g),))


def matmul_of_each(x: Array, w: Array, *, transpose: bool = False) -> Array:
    """Each expert's x [experts, slots, width] times its w [experts, width, other]; with `transpose`, x [experts, slots,
    other] times w transposed."""
    return lax.dot_general(x, w, (((2,), (1 + transpose,)), ((0,), (0,))))


@jax.custom_vjp
def biases_of_rows(biases: Array, expert_of: Array) -> Array:
    """The bias, of biases [E, other], of the expert of each row, int32 [S] in ascending order: [S, other]."""
    return biases[expert_of]


def _biases_backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    biases, expert_of = saved
    total = jax.ops.segment_sum(upcast(g), expert_of, len(biases), indices_are_sorted=True)
    return total.astype(biases.dtype), None


biases_of_rows.defvjp(
    lambda biases, expert_of: (biases_of_rows(biases, expert_of), (biases, expert_of)), _biases_backward
)


class Tiles(NamedTuple):
    """megablox's tiles of a product [m, k] by [k, n].  rows: those of m, which they divide.

    With the largest, operands, result and sum take 13 of the 16 MiB that a TPU's compiler gives a kernel."""

    rows: int
    itemsize: int

    def __call__(self, m: int, k: int, n: int) -> tuple[int, int, int]:
        return self.rows, _tile(k, 2048 // self.itemsize), _tile(n, 1024)


def _tile(size: int, most: int) -> int:
    """At most `most`, of nearly equal tiles; multiples of 128 where there are several."""
    number = -(-size // most)
    return size if number == 1 else -(-size // (number * 128)) * 128


def row_tile(rows: int, experts: int) -> int:
    """Rows of a tile, for so many rows of all experts: small where an expert has few, as each begins a tile."""
    return 512 if rows >= 512 * experts else 128


def _megablox(x: Array, w: Array, sizes: Array, *, transpose: bool = False, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox import ops

    tiles = Tiles(row_tile(len(x), len(w)), x.dtype.itemsize)
    return ops.gmm(x, w, sizes, x.dtype, tiles, None, None, transpose, interpret)


def _one_row(rows: int, experts: int) -> int:
    return 1


def _traced(x: Array, w: Array, sizes: Array, *, transpose: bool = False) -> Array:
    """Stands for any grouped product in a trace.  Compiled it would multiply every row by every matrix, but on TPUs,
    and there for the gradient of w."""
    return lax.ragged_dot(x, w.swapaxes(1, 2) if transpose else w, sizes)


class GroupedProduct(NamedTuple):
    """matmul: (x, w, sizes, transpose=False), rows x [S, width] in the order of their experts, `sizes` of each, times
    w [E, width, other]; with `transpose`, x [S, other] times each w transposed.  row_tile: (choices, E), of which S has
    to be a multiple."""

    matmul: Callable[..., Array]
    row_tile: Callable[[int, int], int]


GROUPED = {"megablox": GroupedProduct(_megablox, row_tile), "traced": GroupedProduct(_traced, _one_row)}
