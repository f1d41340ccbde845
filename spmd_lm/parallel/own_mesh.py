"""Rules, shardings of parameters, and ZeRO-3, on a user's own mesh: for models in a jax.jit outside of a Plan."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import AxisRules, active_axes, num_shards, partition_spec
from spmd_lm.axes import SEQUENCE, ZERO_WIDTH, DimNames, is_dim_names, sharded_names
from spmd_lm.errors import LayoutError
from spmd_lm.ops.sharding_types import TypeOf, as_gradient, manual_region, rules_of_mesh
from spmd_lm.parallel import zero
from spmd_lm.parallel.rules import REPLICATED, Table
from spmd_lm.parallel.trees import Tree

SHARDABLE = ("batch", "sequence", "heads", "mlp", "vocab", "zero")
"""Names that a user's rules may shard; `zero` is the width of matrices between their uses."""


def rules_on_mesh(mesh: AbstractMesh, axes: Mapping[str, str | tuple[str, ...] | None]) -> AxisRules:
    """A user's rules for a mesh of Explicit axes.  axes: the mesh axes that shard a name of SHARDABLE, outermost first;
    a missing one is not sharded.  Raises LayoutError.

    Other dimensions that a user's modules name must each be given too."""
    table = {name: (on,) if isinstance(on, str) else tuple(on or ()) for name, on in axes.items()}
    if problems := [*_mesh_problems(mesh), *_table_problems(mesh, table)]:
        raise LayoutError(*problems)
    table[ZERO_WIDTH], table["kv_heads"] = table.pop("zero", ()), table.get("heads", ())
    gathers = any(mesh.shape[axis] > 1 for axis in table[ZERO_WIDTH])
    return AxisRules({**REPLICATED, **table}, dict(mesh.shape), with_gathered=with_gathered if gathers else None)


def _mesh_problems(mesh: AbstractMesh) -> Iterator[str]:
    if mesh.empty:
        yield "there is no mesh: enter jax.set_mesh(mesh) first."
    elif others := [axis for axis in mesh.axis_names if axis not in mesh.explicit_axes]:
        make = f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,) * {len(mesh.axis_names)})"
        yield f"the mesh has axes that are not Explicit: {', '.join(others)}. Make it with {make}."


def _table_problems(mesh: AbstractMesh, table: Table) -> Iterator[str]:
    for name, on in table.items():
        if name not in SHARDABLE and name in REPLICATED:
            yield f"'{name}' is no dimension that can be sharded; they are {', '.join(SHARDABLE)}."
        if len(set(on)) < len(on):
            yield f"{name} names an axis of the mesh twice."
        for axis in on:
            if not mesh.empty and axis not in mesh.axis_names:
                yield f"{name}='{axis}' is no axis of the mesh; it has {', '.join(mesh.axis_names)}."
        if name not in ("batch", "zero") and set(on) & set(table.get("batch", ())):
            yield f"{name} shares an axis of the mesh with batch: an axis shards rows or weights."
    if others := [axis for axis in table.get("zero", ()) if axis not in table.get("batch", ())]:
        yield f"zero names {', '.join(others)}, which is no axis of batch: ZeRO shards what batch's devices replicate."
    branches = {table.get(name, ()) for name in ("heads", "mlp", "vocab")}
    if table.get("sequence") and branches != {table["sequence"]}:
        yield "sequence is to be sharded over the same axes as heads, mlp and vocab."


def param_shardings(names: Tree, shapes: Tree, own_names: Collection[str] = ()) -> Tree:
    """NamedShardings of parameters with these names and shapes, on jax.set_mesh's mesh by the rules of this context.
    own_names: dimensions that a user's modules name.

    Raises LayoutError without a mesh or rules, for rules of names that the model does not have, and for sizes that the
    mesh does not divide."""
    known = {*REPLICATED, ZERO_WIDTH, *own_names}
    if unknown := [name for name in rules_of_mesh().rules if name not in known]:
        what = f"spmd_lm.axis_rules({unknown[0]}=...) is of a dimension that this model does not have"
        raise LayoutError(f"{what}; it has {', '.join([*SHARDABLE, *own_names])}.")
    mesh = jax.sharding.get_mesh()
    problems = {
        f"dimension '{name}' of size {size} is not divisible by the {num_shards(sharded)} devices of its axes."
        for dim_names, leaf in zip(jax.tree.leaves(names, is_leaf=is_dim_names), jax.tree.leaves(shapes), strict=True)
        for name, sharded, size in zip(dim_names, sharded_names(dim_names), leaf.shape, strict=True)
        if sharded and size % num_shards(sharded)
    }
    if problems:
        raise LayoutError(*sorted(problems), "Only spmd-lm train pads: choose sizes that are divisible.")

    def sharding(dim_names: DimNames) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(*sharded_names(dim_names)))

    return jax.tree.map(sharding, names, is_leaf=is_dim_names)


def with_gathered(f: Callable, names: Tree, *, regather: bool, prevent_cse: bool = False) -> Callable:
    """run(params, x, *inputs) = f(params, x, *inputs), where params have these names, and are sharded by the rule
    `zero`.

    Backward scatters their gradients; x has one too, and inputs have none.  regather: backward gathers a second time,
    so that no gathered weights are kept until then.  prevent_cse: see zero.with_gathered_weights."""
    names = jax.tree.map(sharded_names, names, is_leaf=is_dim_names)
    token_axes = {*active_axes("batch"), *active_axes(SEQUENCE)}
    device = jax.sharding.get_abstract_mesh().abstract_device
    in_order = device is not None and device.platform == "cpu"

    def zero_axes(names: DimNames) -> tuple[str, ...]:
        return active_axes(ZERO_WIDTH) if ZERO_WIDTH in names else ()

    def specs(tree: Tree, names: Tree, what: str) -> Tree:
        """PartitionSpecs.  Matrices are `what`, reduced or unreduced, over axes along which devices hold the same shard
        and have seen other tokens; vectors keep theirs."""

        def spec(names: DimNames, x: Array) -> P:
            if ZERO_WIDTH not in sharded_names(names):
                return jax.typeof(x).sharding.spec
            sharding = {axis for name in names if name for axis in active_axes(name)}
            return partition_spec(*names).update(**{what: token_axes - sharding})

        return jax.tree.map(spec, names, tree, is_leaf=is_dim_names)

    def gather(params: Tree) -> Tree:
        run = functools.partial(zero.gather, names=names, zero_axes=zero_axes, sizes={})
        gathered_names = jax.tree.map(zero.gathered_names, names, is_leaf=is_dim_names)
        return manual_region(run, specs(params, gathered_names, "reduced"))(params)

    def scatter(types: Tree, grads: Tree) -> Tree:
        run = functools.partial(zero.scatter, names=names, zero_axes=zero_axes, padded_shape=lambda _, shape: shape)
        run = functools.partial(run, dtype=jnp.result_type(*jax.tree.leaves(grads)), in_order=in_order)
        grads = manual_region(run, specs(grads, names, "unreduced"))(grads)
        return jax.tree.map(lambda g, x: as_gradient(g.astype(x.type.dtype), x), grads, types)

    def run(params: Tree, x: Array | None, *inputs):
        types = jax.tree.map(lambda p: TypeOf(jax.typeof(p)), params)
        how = {"prevent_cse": prevent_cse, "scatter_first": not regather}
        gathering = zero.with_gathered_weights(f, gather, functools.partial(scatter, types), **how)
        # Not stop_gradient(params) where a loop over layers saves them: it would save a copy of the stack.
        return gathering(params, params, None if regather else gather(lax.stop_gradient(params)), x, *inputs)

    return run
