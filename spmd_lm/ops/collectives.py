"""Collectives over named dimensions: Megatron's f and g, and the few others that a model needs.

A model is written once for two ways to run.  Under a shard_map it sees one device's shard of each array, and the
functions here communicate.  On a mesh of Explicit axes it sees global arrays, and those decorated `typed_as` state the
sharding of their result instead; XLA then inserts the collectives (ops/sharding_types.py).

A function takes the name of a dimension (`reduce_scatter` and `psum_axes`: mesh axes) and runs over the mesh axes that
shard it; where none does, it returns its argument unchanged.  Only functions decorated `with_gradient`, or without a
collective, may be differentiated through."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.active_rules import active_axes, axis_rules, num_shards
from spmd_lm.axes import SEQUENCE, TIME
from spmd_lm.errors import LayoutError
from spmd_lm.ops import sharding_types
from spmd_lm.ops.compiler_workarounds import plain_reduce_scatter
from spmd_lm.ops.eight_bits import Dot
from spmd_lm.ops.sharding_types import TypeOf


def typed_as(typed: Callable) -> Callable[[Callable], Callable]:
    """Replaces a function by `typed` where arrays are global."""

    def decorate(f: Callable) -> Callable:
        @functools.wraps(f)
        def either(*args, **kwargs):
            return (typed if sharding_types.is_explicit() else f)(*args, **kwargs)

        return either

    return decorate


def shard_index(name: str) -> Array:
    """Index of this device's shard of the dimension `name`, int32.  Raises LayoutError where arrays are global."""
    if sharding_types.is_explicit():
        raise LayoutError(f"a shard of '{name}' is of one device: use parallel.partitioner=manual, or global_indices.")
    return lax.axis_index(axes).astype(jnp.int32) if (axes := active_axes(name)) else jnp.zeros((), jnp.int32)


@typed_as(sharding_types.global_indices)
def global_indices(name: str, local_size: int) -> Array:
    """The global indices of this device's `local_size` entries of the dimension `name`, int32 [local_size]."""
    return shard_index(name) * local_size + jnp.arange(local_size, dtype=jnp.int32)


def time_positions(size: int, device: Array | None = None) -> Array:
    """Positions, int32, in the row of the `size` tokens that a device along `time` has of it, this one unless another
    is given; their order: ops/shared_rows.py."""
    devices, rules = num_shards(TIME), axis_rules()
    device = shard_index(TIME) if device is None else device
    if rules is None or not rules.zigzag or devices == 1:
        return device * size + jnp.arange(size, dtype=jnp.int32)
    half = size // 2
    chunk = jnp.arange(half, dtype=jnp.int32)
    return jnp.concatenate([device * half + chunk, (2 * devices - 1 - device) * half + chunk])


def row_positions(size: int, name: str = TIME) -> Array:
    """Positions, int32, in the row of this device's `size` tokens.  name: the tokens' dimension; in the residual stream
    `sequence`, a shard of this device's tokens of the row."""
    if not active_axes(TIME):
        return global_indices(name, size)
    if name == TIME:
        return time_positions(size)
    return local_slice(time_positions(size * num_shards(name)), name, 0)


def local_slice(x: Array, name: str, dim: int) -> Array:
    """Slices out this device's shard of x along `dim`, a dimension called `name` that every device holds whole."""
    if not active_axes(name):
        return x
    size = x.shape[dim] // num_shards(name)
    return lax.dynamic_slice_in_dim(x, shard_index(name) * size, size, dim)


@dataclasses.dataclass(frozen=True)
class LocalKVHeads:
    """Selects the key/value heads, `width` wide, that this device's queries use, where some layer has fewer of them
    than `heads` has shards; elsewhere all.

    Several devices use one head, each for its own queries: its gradient is a partial sum over the shards."""

    width: int

    def __call__(self, w: Array) -> Array:
        """Selects from w [..., key/value heads x width], which every device holds."""
        if num_shards("heads") == num_shards("kv_heads"):
            return w
        typed = sharding_types.spec_with_last(w, active_axes("heads")) if sharding_types.is_explicit() else None
        return manual_region(self._slice, typed)(w)

    def _slice(self, w: Array) -> Array:
        heads, shards = w.shape[-1] // self.width, num_shards("heads")
        first, size = shard_index("heads") * heads // shards, max(heads // shards, 1)
        return lax.dynamic_slice_in_dim(w, first * self.width, size * self.width, w.ndim - 1)


def psum(x: Any, name: str) -> Any:
    """The sum of `x` over the shards of `name`."""
    return lax.psum(x, axes) if (axes := active_axes(name)) else x


def pmax(x: Array, name: str) -> Array:
    """The maximum of `x` over the shards of `name`."""
    return lax.pmax(x, axes) if (axes := active_axes(name)) else x


@typed_as(sharding_types.all_gather)
def all_gather(x: Array, name: str, dim: int) -> Array:
    """x with all shards of the dimension `dim`, called `name`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if (axes := active_axes(name)) else x


def gather_sequence(x: Array) -> Array:
    """x [batch, sequence, ...] with the whole sequence."""
    return all_gather(x, SEQUENCE, 1)


def reduce_scatter(x: Array, axes: Sequence[str], dim: int, *, row_major: bool = False) -> Array:
    """Reduce-scatters x along `dim` over mesh axes, one after the other.  row_major: constrain x to row-major layout in
    memory, for arrays that would otherwise inherit the layout of what produced them."""
    return plain_reduce_scatter(x, axes, dim, row_major)


def reduce_scatter_or_psum(x: Array, name: str) -> Array:
    """Sums x [batch, whole sequence, width] over the shards of `name`: a reduce-scatter onto this device's shard of the
    sequence where that is sharded, otherwise an all-reduce."""
    if not (axes := active_axes(SEQUENCE)):
        return psum(x, name)
    assert axes == active_axes(name), (name, axes)
    return reduce_scatter(x, axes, 1)


def with_gradient(backward: Callable[[Array, str], Array]) -> Callable[[Callable], Callable[..., Array]]:
    """Gives a linear f(x, name) the gradient backward(g, name), where g is that of its result."""

    def decorate(f: Callable) -> Callable[..., Array]:
        linear = jax.custom_vjp(f, nondiff_argnums=(1,))
        linear.defvjp(lambda x, name: (f(x, name), None), lambda name, _, g: (backward(g, name),))
        return linear

    return decorate


@typed_as(sharding_types.copy_to_region)
@with_gradient(lambda g, name: reduce_scatter_or_psum(g, name))
def copy_to_region(x: Array, name: str) -> Array:
    """The residual stream x [batch, sequence, width] with its whole sequence, where it enters matrices that are sharded
    along `name`: Megatron's f (arXiv:1909.08053, section 3).  The shards' gradients are summed."""
    return gather_sequence(x)


@typed_as(sharding_types.reduce_from_region)
@with_gradient(lambda g, name: gather_sequence(g))
def reduce_from_region(x: Array, name: str) -> Array:
    """The sum of x [batch, whole sequence, width] over the shards of `name`, as the residual stream holds it:
    Megatron's g (arXiv:1909.08053, section 3).  Every shard receives the same gradient."""
    return reduce_scatter_or_psum(x, name)


@with_gradient(lambda g, name: g)
def sum_of_shares(x: Array, name: str) -> Array:
    """The sum of x over the shards of `name`, for a loss that the shards compute in part: each has its gradient."""
    return psum(x, name)


@typed_as(sharding_types.residual_stream)
def residual_stream(x: Array) -> Array:
    """x [batch, sequence, width], and its gradient, laid out as the residual stream is."""
    return x


@typed_as(sharding_types.first_tokens)
def first_tokens(h: Array) -> Array:
    """The first token of each shard of h [batch, sequence, width] along the sequence: [batch, shards, width]."""
    return h[:, :1]


@typed_as(sharding_types.from_first_shard)
def from_first_shard(x: Array, dim: int) -> Array:
    """The first entry along `dim`, which has one per shard of the sequence; gradients reach the first shard alone."""
    return _from_first_shard(lax.squeeze(x, (dim,)), SEQUENCE)


@with_gradient(lambda g, name: jnp.where(shard_index(name) == 0, g, 0))
def _from_first_shard(x: Array, name: str) -> Array:
    return psum(jnp.where(shard_index(name) == 0, x, 0), name)


@typed_as(lambda x, name=SEQUENCE: sharding_types.all_gather(x, name, 1))
@with_gradient(lambda g, name: local_slice(g, name, 1))
def gather_replicated_grad(x: Array, name: str = SEQUENCE) -> Array:
    """x [batch, sequence, ...] with the whole sequence, for a computation that every device repeats: the gradient is
    the same on every device, so it is sliced, not summed."""
    return all_gather(x, name, 1)


# ---- statements of how arrays are laid out, where they are global


@typed_as(sharding_types.contract)
def contract(
    x: Array,
    y: Array,
    x_dims: Sequence[int],
    y_dims: Sequence[int],
    gradient_of: Array | TypeOf | None = None,
    dot: Dot = lax.dot_general,
) -> Array:
    """Contracts x and y over these dimensions, on each device over its own shards alone.

    gradient_of: the array that the result is a gradient of, or its type."""
    return dot(x, y, ((tuple(x_dims), tuple(y_dims)), ((), ())))


@typed_as(sharding_types.weight_gradient)
def weight_gradient(left: Array, right: Array, w: Array, dot: Dot = lax.dot_general) -> Array:
    """The gradient of w: left [batch, time, rows] times right [batch, time, columns], summed over this device's tokens.

    One 2-D product: contracting batch and time as two dimensions takes 16% more of a whole step on a CPU."""
    left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
    return contract(left, right, (0,), (0,), dot=dot)


@typed_as(sharding_types.broadcast_like)
def broadcast_like(vector: Array, x: Array) -> Array:
    """vector [width] in the shape of x [..., width].  Not to be differentiated through."""
    return lax.broadcast_in_dim(vector, x.shape, (x.ndim - 1,))


@typed_as(sharding_types.partial_sum)
def partial_sum(x: Array, dims: Sequence[int] | None = None, gradient_of: Array | None = None) -> Array:
    """The sum over `dims` (default: all) of this device's shard of x.  gradient_of: the array whose gradient it is."""
    return x.sum(None if dims is None else tuple(dims))


@typed_as(lambda x, axes: sharding_types.psum_unreduced(x))
def psum_axes(x: Any, axes: Sequence[str]) -> Any:
    """All-reduces x over mesh axes, which must be all those over which it is a partial sum."""
    return lax.psum(x, axes) if axes else x


@typed_as(sharding_types.psum_unreduced)
def psum_unreduced(x: Any) -> Any:
    """Sums x over the axes on which it is unreduced, where arrays are global; one device's shards are returned as they
    are: the step sums them once, at its end."""
    return x


@typed_as(jax.sharding.reshard)
def constrain(x: Array, specs: Any) -> Array:
    """Reshards a tree of arrays, where they are global, to these PartitionSpecs."""
    return x


@typed_as(sharding_types.zeros_like_gradient)
def zeros_like_gradient(x: Array, dtype: jnp.dtype) -> Array:
    """Zeros in which gradients of x accumulate."""
    return jnp.zeros(x.shape, dtype)


@typed_as(sharding_types.as_gradient)
def as_gradient(g: Array, x: Array) -> Array:
    """The partial sum g as the gradient of x: summed, unless x's type leaves that to the step."""
    return g


@typed_as(sharding_types.group_rows)
def group_rows(x: Array, size: int) -> Array:
    """x [batch, ...] as [batch / size, size, ...]."""
    return x.reshape(-1, size, *x.shape[1:])


@typed_as(sharding_types.split_heads)
def split_heads(x: Array, width: int) -> Array:
    """x [batch, time, heads x width] as [batch, time, heads, width]."""
    return x.reshape(*x.shape[:-1], -1, width)


@typed_as(sharding_types.join_heads)
def join_heads(x: Array) -> Array:
    """The inverse of `split_heads`."""
    return x.reshape(*x.shape[:-2], -1)


@typed_as(sharding_types.scale)
def scale(factor: Array, x: Array) -> Array:
    """A number times x, which may be a partial sum."""
    return factor * x


@typed_as(sharding_types.manual_region)
def manual_region(f: Callable, out_specs: Any) -> Callable:
    """Runs `f` on every device's own shards: where arrays are global, in a shard_map.

    out_specs: those of its results there; axes on which they are partial sums must be *unreduced*.  Differentiated
    through, it sums gradients over axes that do not shard an argument."""
    return f
