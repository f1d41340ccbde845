"""The functions of ops/collectives.py for global arrays, whose types say how they are sharded.

On a mesh of Explicit axes a model writes no collective.  It states how a result is laid out, and XLA inserts the
collectives.  Besides how each dimension is sharded, a type says two things: a value is *unreduced* over an axis if each
device along it holds a partial sum, and *reduced* if all hold the same value and its gradient is unreduced.  Megatron's
f (arXiv:1909.08053, section 3) is then a reshard to *reduced*, and g one from *unreduced*.
Where an operation would need a further collective, jax raises an error when the model is traced."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from spmd_lm.active_rules import AxisRules, active_axes, axis_rules, partition_spec
from spmd_lm.axes import SEQUENCE, DimNames, as_tuple, is_dim_names
from spmd_lm.errors import LayoutError
from spmd_lm.ops.eight_bits import Dot

Specs = Any
"""A tree of PartitionSpecs."""


def is_explicit() -> bool:
    """True while tracing on global arrays: on a mesh of Explicit axes, outside of shard_map."""
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def partitions(x: Array) -> tuple:
    """The mesh axes of each dimension of x, by its type."""
    return jax.typeof(x).sharding.spec.partitions


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TypeOf:
    """The type of an array whose values backward does not need; a pytree without leaves."""

    type: Any


def gradient_spec(x: Array | TypeOf) -> P:
    """PartitionSpec of the gradient of x: unreduced where x is reduced, and vice versa."""
    return (x.type if isinstance(x, TypeOf) else jax.typeof(x)).to_ct_aval().sharding.spec


def _sharding_axes(x: Array, dims: Sequence[int]) -> set[str]:
    """The mesh axes that shard these dimensions of x."""
    return {axis for dim in dims for axis in as_tuple(partitions(x)[dim])}


def _remaining(x: Array, dims: Sequence[int]) -> list:
    """The partitions of all other dimensions of x."""
    return [partition for dim, partition in enumerate(partitions(x)) if dim not in dims]


def rules_of_mesh() -> AxisRules:
    """The rules of this context.  Raises LayoutError if there are none, or if they are for another mesh."""
    rules, mesh = axis_rules(), jax.sharding.get_abstract_mesh()
    if rules is None:
        raise LayoutError("there is no mesh of Explicit axes: enter jax.set_mesh(mesh) and spmd_lm.axis_rules(...).")
    if dict(mesh.shape) != rules.sizes or mesh.explicit_axes != mesh.axis_names:
        raise LayoutError(
            f"the rules are for a mesh of {rules.sizes}, and this one has {dict(mesh.shape)}, Explicit axes: "
            f"{', '.join(mesh.explicit_axes)}. Enter spmd_lm.axis_rules(...) inside of jax.set_mesh(mesh)."
        )
    return rules


def checked(tree: Any, names: Any, advice: str) -> Any:
    """The tree of arrays, whose types no longer name axes of one device.

    Raises LayoutError where `rules_of_mesh` does, and for leaves that are unreduced, or not sharded as the rules shard
    their dimension names."""
    rules, problems = rules_of_mesh(), []

    def checked_leaf(path: tuple, dim_names: DimNames, x: Array) -> Array:
        spec, wanted = jax.typeof(x).sharding.spec, partition_spec(*dim_names)
        nontrivial = P(*(tuple(axis for axis in as_tuple(part) if rules.sizes[axis] > 1) for part in spec.partitions))
        if nontrivial.partitions == wanted.partitions and not spec.unreduced:
            return reshard(x, wanted.update(reduced=spec.reduced))
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        problems.append(f"{where} is laid out as {spec}, and the rules shard {dim_names} as {wanted}.")
        return x

    result = jax.tree_util.tree_map_with_path(checked_leaf, names, tree, is_leaf=is_dim_names)
    if problems:
        raise LayoutError(*problems, advice)
    return result


def copy_to_region(x: Array, name: str) -> Array:
    batch, _, *rest = partitions(x)
    return reshard(x, P(batch, None, *rest, reduced=set(active_axes(name))))


def reduce_from_region(x: Array, name: str) -> Array:
    batch, _, *rest = partitions(x)
    return reshard(x, P(batch, active_axes(SEQUENCE), *rest))


def residual_stream(x: Array) -> Array:
    return reshard(x, partition_spec("batch", SEQUENCE, None))


def all_gather(x: Array, _: str, dim: int) -> Array:
    return reshard(x, P(*(None if d == dim else partition for d, partition in enumerate(partitions(x)))))


def global_indices(name: str, size: int) -> Array:
    return reshard(jnp.arange(size, dtype=jnp.int32), partition_spec(name))


def first_tokens(h: Array) -> Array:
    return (
        manual_region(lambda h: h[:, :1], partition_spec("batch", SEQUENCE, None))(h) if partitions(h)[1] else h[:, :1]
    )


def from_first_shard(x: Array, dim: int) -> Array:
    first = jnp.arange(x.shape[dim]) == 0
    return jnp.where(lax.expand_dims(first, [d for d in range(x.ndim) if d != dim]), x, 0).sum(dim)


def contract(
    x: Array,
    y: Array,
    x_dims: Sequence[int],
    y_dims: Sequence[int],
    gradient_of: Array | TypeOf | None = None,
    dot: Dot = lax.dot_general,
) -> Array:
    assert dot is lax.dot_general  # a scale is of one device's shard
    dims = ((tuple(x_dims), tuple(y_dims)), ((), ()))
    if gradient_of is not None:
        return lax.dot_general(x, y, dims, out_sharding=gradient_spec(gradient_of))
    remaining = _remaining(x, x_dims) + _remaining(y, y_dims)
    return lax.dot_general(x, y, dims, out_sharding=P(*remaining, unreduced=_sharding_axes(x, x_dims)))


def weight_gradient(left: Array, right: Array, w: Array, dot: Dot = lax.dot_general) -> Array:
    left, right = (reshard(x, P(*partitions(x))) for x in (left, right))
    if partitions(left)[1] is None:
        left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
    dims = range(left.ndim - 1)
    return contract(left, right, dims, dims, w, dot)


def broadcast_like(vector: Array, x: Array) -> Array:
    return lax.broadcast_in_dim(vector, x.shape, (x.ndim - 1,), out_sharding=P(*partitions(x)))


def partial_sum(x: Array, dims: Sequence[int] | None = None, gradient_of: Array | None = None) -> Array:
    dims = tuple(range(x.ndim) if dims is None else dims)
    if gradient_of is not None:
        return lax.reduce_sum(x, dims, out_sharding=gradient_spec(gradient_of))
    return lax.reduce_sum(x, dims, out_sharding=P(*_remaining(x, dims), unreduced=_sharding_axes(x, dims)))


def psum_unreduced(x: Any) -> Any:
    return jax.tree.map(lambda leaf: reshard(leaf, P(*partitions(leaf))), x)


def as_gradient(g: Array, x: Array) -> Array:
    return reshard(g, gradient_spec(x))


def group_rows(x: Array, size: int) -> Array:
    batch, *rest = partitions(x)
    return lax.reshape(x, (x.shape[0] // size, size, *x.shape[1:]), out_sharding=P(batch, None, *rest))


def split_heads(x: Array, width: int) -> Array:
    *outer, size = x.shape
    return lax.reshape(x, (*outer, size // width, width), out_sharding=P(*partitions(x), None))


def join_heads(x: Array) -> Array:
    *outer, heads, width = x.shape
    return lax.reshape(x, (*outer, heads * width), out_sharding=P(*partitions(x)[:-1]))


def spec_with_last(x: Array, axes: tuple[str, ...]) -> P:
    """PartitionSpec of x once these axes shard its last dimension."""
    spec = jax.typeof(x).sharding.spec
    return P(*spec.partitions[:-1], axes, reduced=set(spec.reduced) - set(axes))


def zeros_like_gradient(x: Array, dtype: jnp.dtype) -> Array:
    return reshard(jnp.zeros(x.shape, dtype), gradient_spec(x))


def scale(factor: Array, x: Array) -> Array:
    return reshard(factor, P(reduced=jax.typeof(x).sharding.spec.unreduced)) * x


def manual_region(f: Callable, out_specs: Specs) -> Callable:
    def run(*args, **kwargs):
        in_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (args, kwargs))
        region = jax.shard_map(
            lambda args, kwargs: f(*args, **kwargs), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return region(args, kwargs)

    return run
