"""Workarounds for XLA's compilers in the models' operations: symptom, compiler, remedy, and the test that sees it.

Seen with jax 0.10.2 to 0.12, unless a version is named; docs/compilers.md has the facts.  No value changes."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint


def run_again(*inputs: Any) -> Any:
    """Inputs of a computation, decoding or gather that backward repeats.

    XLA would merge it with the first one (CSE), and keep that result in memory.  A barrier prevents this; a CPU's
    compiler looks through it.  tests/planning/test_audit.py sees gathers on an H100."""
    return lax.optimization_barrier(inputs)


def finish_in_forward(results: Any) -> Any:
    """Results of a loop over chunks of logits.

    XLA unrolls a loop over one chunk, and would compute the loss and the table's gradient after backward, keeping the
    logits.  A barrier around all results prevents that.  tests/planning/test_audit.py sees the peak."""
    return lax.optimization_barrier(results)


def compute_first(keys: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry keys of dropout.

    Fused into the loops over entries, their rounds would be repeated for each row, and LLVM's vectorizer (CPUs, jax
    0.12) takes time exponential in their number.  A barrier ends the fusion."""
    return lax.optimization_barrier(keys)


def saved_statistics(statistics: list) -> list:
    """A norm's statistics in backward.

    A GPU's compiler would compute them again, and write the normalized x for the matmul that follows.  A barrier there
    prevents that.  tests/models/test_layers.py sees it; benchmarks/gpu_traffic.py sees the bytes."""
    return lax.platform_dependent(statistics, cuda=lax.optimization_barrier, default=list)


def keep_apart(w: Array, k: int) -> Array:
    """w for matmul number k of several that share it.

    A GPU's compiler would merge them into one, which waits for all shards.  A barrier hides that w is the same; two
    barriers without k would be merged too.  tests/planning/test_audit.py sees it on an H100."""
    return lax.optimization_barrier((w, jnp.int32(k)))[0]


def late_zeros(shape: tuple[int, ...], g: Array, dtype: jnp.dtype) -> Array:
    """Zeros to which gradients g are added.

    XLA makes constant zeros early, and keeps them in memory.  These depend on g: no compiler removes 0 * g, which is
    NaN where g is not finite.  tests/ops/test_embedding.py sees the memory."""
    return jnp.full(shape, 0 * g[(0,) * g.ndim], dtype)


def as_row_major(x: Array) -> Array:
    """x, constrained to row-major layout in memory: compilers would keep the layout of x's producer, and copy."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# ---- reduce-scatters of TPUs


def plain_reduce_scatter(x: Array, axes: Sequence[str], dim: int, row_major: bool) -> Array:
    """Reduce-scatters x along `dim` over mesh axes, one after the other.

    A TPU's compiler makes a full all-reduce of it over several dimensions of the torus at once, along the minor
    dimension in memory, or with dimensions of size one, which are squeezed out here.  It also pads most
    arrays along their first dimension, but few of those whose first dimension is twice the number of devices
    (`padded_columns`): hence the reshape.  A shard of an odd number of rows gives each device one row instead of two,
    and some topologies pad that.  tests/planning/test_audit.py sees it."""
    ones = tuple(d for d, size in enumerate(x.shape) if size == 1 and d != dim)
    x, dim = lax.squeeze(x, ones), dim - sum(d < dim for d in ones)
    for axis in axes:
        x = _reduce_scatter_along(axis, x, dim, row_major)
    return lax.expand_dims(x, ones)


def _reduce_scatter_along(axis: str, x: Array, dim: int, row_major: bool) -> Array:
    devices, shape = lax.axis_size(axis), x.shape
    x = x.reshape(_devices_first(shape, devices)) if dim == 0 else x
    x = as_row_major(x) if row_major else x
    shard = lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return shard.reshape(shape[0] // devices, *shape[1:]) if dim == 0 else shard


def _devices_first(shape: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """`shape` with two rows for each device, or one where its shard is odd, in a dimension of their own."""
    if shape[0] <= 2 * devices:
        return shape
    rows = devices * math.gcd(2, shape[0] // devices)
    return rows, shape[0] // rows, *shape[1:]


WINDOW_TILES = 1824
"""Tiles of 8 x 128 numbers that a TPU's compiler has room for in a reduce-scatter: a window of the shard for each
device, and four more.  Measured for v4, v5e and v5p; a v6e has twice the room, a 7x more (docs/compilers.md)."""


def padded_columns(shape: tuple[int, ...], axis_sizes: Sequence[int]) -> int:
    """The columns, shape[-1] or up to 1/32 more, to which `shape` is padded so that a TPU's compiler makes plain
    reduce-scatters of it along its first dimension, over axes of these sizes in turn.

    XLA halves a device's shard until a window of it for each device, and four more, fit into WINDOW_TILES.  Where the
    odd factor of the shard's tiles is too large for that, it pads the shard in a fused all-reduce-scatter, and moves
    what is then out of place by a permute.  Where no number of columns in that range helps, the result is shape[-1]."""
    columns = -(-shape[-1] // 128)
    for padded in range(columns, columns + columns // 32 + 1):
        if _halves_into_windows((*shape[:-1], 128 * padded), axis_sizes):
            return shape[-1] if padded == columns else 128 * padded
    return shape[-1]


def _halves_into_windows(shape: tuple[int, ...], axis_sizes: Sequence[int]) -> bool:
    """True if a shard of `shape`, scattered over these axes in turn, halves each time into windows that fit.  Its
    columns are a multiple of 128."""
    for devices in axis_sizes:
        first, *others = _devices_first(shape, devices)
        *outer, rows, columns = first // devices, *others  # one device's shard
        tiles = math.prod(outer) * -(-rows // 8) * (columns // 128)
        window = tiles // (tiles & -tiles)  # the odd factor
        if (devices + 4) * window > WINDOW_TILES:
            return False
        shape = (shape[0] // devices, *shape[1:])
    return True
