"""Collectives over named dimensions: Megatron's f and g, and the few others that a model needs.

A step runs on every device on its own shard of each array, and a model is written for one such shard.  A function here
takes the name of a dimension (`reduce_scatter`: of a mesh axis) and runs over the mesh axes that shard it; where none
does, it returns its argument unchanged.  Only functions decorated `with_gradient` may be differentiated through."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from spmd_lm.axes import SEQUENCE, nontrivial_axes, num_shards


def shard_index(name: str) -> Array:
    """Which shard of the dimension `name` this device holds, int32."""
    return lax.axis_index(axes).astype(jnp.int32) if (axes := nontrivial_axes(name)) else jnp.zeros((), jnp.int32)


def global_indices(name: str, local_size: int) -> Array:
    """The global indices of this device's `local_size` entries of the dimension `name`, int32 [local_size]."""
    return shard_index(name) * local_size + jnp.arange(local_size, dtype=jnp.int32)


def local_slice(x: Array, name: str, dim: int) -> Array:
    """This device's shard of x along `dim`, a dimension called `name` that every device holds whole."""
    if not nontrivial_axes(name):
        return x
    size = x.shape[dim] // num_shards(name)
    return lax.dynamic_slice_in_dim(x, shard_index(name) * size, size, dim)


def psum(x: Any, name: str) -> Any:
    """The sum of `x` over the shards of `name`."""
    return lax.psum(x, axes) if (axes := nontrivial_axes(name)) else x


def pmax(x: Array, name: str) -> Array:
    """The maximum of `x` over the shards of `name`."""
    return lax.pmax(x, axes) if (axes := nontrivial_axes(name)) else x


def all_gather(x: Array, name: str, dim: int) -> Array:
    """x with all shards of the dimension `dim`, called `name`."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if (axes := nontrivial_axes(name)) else x


def gather_sequence(x: Array) -> Array:
    """x [batch, sequence, ...] with the whole sequence."""
    return all_gather(x, SEQUENCE, 1)


def reduce_scatter(x: Array, axes: str | tuple[str, ...], dim: int, *, row_major: bool = False) -> Array:
    """The sum of x over mesh axes, of which each device keeps its shard along `dim`.

    A TPU's compiler makes a full all-reduce of it where an array has dimensions of size one, which are therefore
    squeezed meanwhile, or where `dim` is the minor dimension in memory; and it pads most arrays, but none whose first
    dimension is the number of devices.  row_major: constrain x to row-major layout in memory, for arrays that would
    otherwise inherit the layout of what produced them."""
    ones = tuple(d for d, size in enumerate(x.shape) if size == 1 and d != dim)
    x, dim = lax.squeeze(x, ones), dim - sum(d < dim for d in ones)
    devices = lax.psum(1, axes)
    local_shape = (x.shape[0] // devices, *x.shape[1:])
    leading = dim == 0 and local_shape[0] > 1
    x = x.reshape(devices, *local_shape) if leading else x
    if row_major:
        x = with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))
    shard = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return lax.expand_dims(shard.reshape(local_shape) if leading else shard, ones)


def reduce_scatter_or_psum(x: Array, name: str) -> Array:
    """The sum of x [batch, whole sequence, width] over the shards of `name`; this device's shard of the sequence.

    One reduce-scatter where the sequence is sharded, otherwise an all-reduce."""
    if not (axes := nontrivial_axes(SEQUENCE)):
        return psum(x, name)
    assert axes == nontrivial_axes(name), (name, axes)
    return reduce_scatter(x, axes, 1)


def with_gradient(backward: Callable[[Array, str], Array]) -> Callable[[Callable], Callable[..., Array]]:
    """Gives a linear f(x, name) the gradient backward(g, name), where g is that of its result."""

    def decorate(f: Callable) -> Callable[..., Array]:
        linear = jax.custom_vjp(f, nondiff_argnums=(1,))
        linear.defvjp(lambda x, name: (f(x, name), None), lambda name, _, g: (backward(g, name),))
        return linear

    return decorate


@with_gradient(lambda g, name: reduce_scatter_or_psum(g, name))
def copy_to_region(x: Array, name: str) -> Array:
    """The residual stream x [batch, sequence, width] with its whole sequence, where it enters matrices that are sharded
    along `name`: Megatron's f (arXiv:1909.08053, section 3).  The shards' gradients are summed."""
    return gather_sequence(x)


@with_gradient(lambda g, name: gather_sequence(g))
def reduce_from_region(x: Array, name: str) -> Array:
    """The sum of x [batch, whole sequence, width] over the shards of `name`, as the residual stream holds it:
    Megatron's g (arXiv:1909.08053, section 3).  Every shard receives the same gradient."""
    return reduce_scatter_or_psum(x, name)


@with_gradient(lambda g, name: jnp.where(shard_index(name) == 0, g, 0))
def from_first_shard(x: Array, name: str = SEQUENCE) -> Array:
    """The value of x on the device that holds the beginning of the sequence; gradients reach that device alone."""
    return psum(jnp.where(shard_index(name) == 0, x, 0), name)


@with_gradient(lambda g, name: local_slice(g, name, 1))
def gather_replicated_grad(x: Array, name: str = SEQUENCE) -> Array:
    """x [batch, sequence, ...] with the whole sequence, for a computation that every device repeats: the gradient is
    the same on every device, so it is sliced, not summed."""
    return all_gather(x, name, 1)
