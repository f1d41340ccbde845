"""Collective matmul: Megatron's f and g as rings of n matmuls, each of which hides the permute for the next one.

The all-gather of a sharded sequence and the matmul with all of it become n matmuls with one shard each; the matmul and
the reduce-scatter of its partial sums become n matmuls whose results are added up on the way (Wang et al., ASPLOS 2023,
doi:10.1145/3567955.3567959).  Shards and sums travel in both directions, half of the ring each: n - 1 permutes of one
shard, the same bytes as the collective.  Where the sequence is not sharded, Megatron's all-reduce becomes such a
reduce-scatter, then an all-gather that nothing hides.

Shards lie in a different order on each device: its own, then that of the device after it, and so on round the ring.
Layers that treat every token alike may leave them so (`ordered` is false), which saves a copy.

In bfloat16 a sum is rounded on each device that it passes through."""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.active_rules import active_axes
from spmd_lm.axes import SEQUENCE
from spmd_lm.ops.collectives import all_gather, contract, weight_gradient
from spmd_lm.ops.compiler_workarounds import keep_apart
from spmd_lm.ops.eight_bits import Dot, EightBits, dot_of

TIME = 1  # the dimension of the sequence


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def all_gather_matmul(
    x: Array, weights: tuple[Array, ...], name: str, ordered: bool, eight_bits: EightBits | None = None
) -> list[Array]:
    """Megatron's f and the linears after it: all-gathers the residual stream x [batch, sequence, width] and multiplies
    it by each of `weights` [width, other], sharded along `name`: [batch, time, other] each.  ordered: if false, tokens
    stay in the ring's order (see above)."""
    return _gather_and_multiply(x, weights, name, ordered, dot_of(eight_bits))[1]


def _all_gather_matmul_forward(x, weights, name, ordered, eight_bits):
    gathered, outputs = _gather_and_multiply(x, weights, name, ordered, dot_of(eight_bits))
    return outputs, (gathered, weights)  # the weights themselves: see ops.dense


def _all_gather_matmul_backward(name, ordered, eight_bits, saved, grads):
    gathered, weights = saved
    d_x = _multiply_and_scatter(grads, weights, name, ordered, dot_of(eight_bits, left=True))
    dot = dot_of(eight_bits, right=True)
    return d_x, tuple(weight_gradient(gathered, g, w, dot) for g, w in zip(grads, weights, strict=True))


all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul_reduce_scatter(h: Array, w: Array, name: str, ordered: bool, eight_bits: EightBits | None = None) -> Array:
    """The linear before Megatron's g, and g: multiplies h [batch, time, other] by w [width, other] transposed, both
    sharded along `name`, and reduce-scatters the result to the residual stream [batch, sequence, width].  ordered: as
    in the all_gather_matmul that h comes from."""
    return _multiply_and_scatter([h], [w], name, ordered, dot_of(eight_bits))


def _matmul_reduce_scatter_forward(h, w, name, ordered, eight_bits):
    return matmul_reduce_scatter(h, w, name, ordered, eight_bits), (h, w)


def _matmul_reduce_scatter_backward(name, ordered, eight_bits, saved, g):
    h, w = saved
    gathered, (d_h,) = _gather_and_multiply(g, [w], name, ordered, dot_of(eight_bits, left=True))
    return d_h, weight_gradient(gathered, h, w, dot_of(eight_bits, left=True))


matmul_reduce_scatter.defvjp(_matmul_reduce_scatter_forward, _matmul_reduce_scatter_backward)


def _gather_and_multiply(
    x: Array, weights: Sequence[Array], name: str, ordered: bool, dot: Dot
) -> tuple[Array, list[Array]]:
    """All-gathers x [batch, sequence, width] along the sequence; returns it and its product with each of `weights`."""
    w = _side_by_side(weights, 1)
    if active_axes(SEQUENCE):
        axes = _ring_axes(name)
        shards = _shards_from(x, axes)
        outputs = [contract(rows, keep_apart(w, k), (2,), (0,), dot=dot) for k, rows in enumerate(shards)]
        gathered, output = (_concatenate(each, axes, ordered) for each in (shards, outputs))
    else:
        gathered, output = x, contract(x, w, (2,), (0,), dot=dot)
    ends = list(itertools.accumulate(w.shape[1] for w in weights))
    return gathered, jnp.split(output, ends[:-1], -1)


def _multiply_and_scatter(
    factors: Sequence[Array], weights: Sequence[Array], name: str, ordered: bool, dot: Dot
) -> Array:
    """The sum of factors [batch, time, other] times weights [width, other] transposed, over the pairs and over the
    shards of `name`: the residual stream [batch, sequence, width]."""
    axes, factor, w = _ring_axes(name), _side_by_side(factors, 2), _side_by_side(weights, 1)
    n = lax.axis_size(axes)
    size, rest = divmod(factor.shape[TIME], n)
    assert not rest, (factor.shape, n)
    first = lax.axis_index(axes) if ordered or not active_axes(SEQUENCE) else 0

    def addend(k: int) -> Array:
        rows = lax.dynamic_slice_in_dim(factor, (first + k) % n * size, size, TIME)
        return contract(rows, keep_apart(w, k), (2,), (1,), dot=dot)

    total = _sum_over(addend, axes)
    return total if active_axes(SEQUENCE) else all_gather(total, name, TIME)


def _ring_axes(name: str) -> tuple[str, ...]:
    """The mesh axes that shard `name`, and the sequence if it is sharded."""
    axes = active_axes(name)
    assert active_axes(SEQUENCE) in ((), axes), (name, axes)
    return axes


def _side_by_side(arrays: Sequence[Array], dim: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, dim)


# ---- the ring along mesh axes


def _ways(axes: tuple[str, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(direction, hops) both ways round the ring, which together reach every other device."""
    n = lax.axis_size(axes)
    return (1, n // 2), (-1, (n - 1) // 2)


def _shards_from(x: Array, axes: tuple[str, ...]) -> list[Array]:
    """The x of all devices: entry k is from the device k places after this one."""
    n = lax.axis_size(axes)
    shards = [x] * n
    for way, hops in _ways(axes):
        for hop in range(1, hops + 1):
            shards[-way * hop % n] = _send(shards[-way * (hop - 1) % n], axes, way)
    return shards


def _concatenate(shards: list[Array], axes: tuple[str, ...], ordered: bool) -> Array:
    """Concatenates the shards of `_shards_from` along the sequence."""
    gathered = jnp.concatenate(shards, TIME)
    return jnp.roll(gathered, lax.axis_index(axes) * shards[0].shape[TIME], TIME) if ordered else gathered


def _sum_over(addend: Callable[[int], Array], axes: tuple[str, ...]) -> Array:
    """Reduce-scatter: the sum of all devices' addends for this one.  addend(k): for the device k places after it."""
    n = lax.axis_size(axes)
    total = addend(0)
    for way, hops in _ways(axes):
        arriving = None
        for hop in range(hops, 0, -1):
            mine = addend(way * hop % n)
            arriving = _send(mine if arriving is None else arriving + mine, axes, way)
        total = total if arriving is None else total + arriving
    return total


def _send(x: Array, axes: tuple[str, ...], way: int) -> Array:
    """Permutes x one place along the ring: to the next device, or with way -1 to the previous one."""
    n = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + way) % n) for i in range(n)])
