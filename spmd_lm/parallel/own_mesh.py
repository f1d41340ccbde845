"""Rules, and shardings of parameters, on a mesh of one's own: for models in a jax.jit outside of a Plan."""

from collections.abc import Iterator, Mapping

import jax
from jax.sharding import AbstractMesh, NamedSharding

from spmd_lm.active_rules import AxisRules, num_shards, partition_spec
from spmd_lm.axes import DimNames, is_dim_names
from spmd_lm.errors import LayoutError
from spmd_lm.ops.sharding_types import rules_of_mesh
from spmd_lm.parallel.rules import REPLICATED, Table
from spmd_lm.parallel.trees import Tree

SHARDABLE = ("batch", "sequence", "heads", "mlp", "vocab")
"""Names that rules of one's own may shard."""


def rules_on_mesh(mesh: AbstractMesh, axes: Mapping[str, str | tuple[str, ...] | None]) -> AxisRules:
    """Rules of one's own, for a mesh of Explicit axes.  axes: the mesh axes that shard a name of SHARDABLE, outermost
    first; a name that is missing is not sharded.  Raises LayoutError."""
    table = {name: (on,) if isinstance(on, str) else tuple(on or ()) for name, on in axes.items()}
    if problems := [*_mesh_problems(mesh), *_table_problems(mesh, table)]:
        raise LayoutError(*problems)
    return AxisRules({**REPLICATED, **table}, dict(mesh.shape))


def _mesh_problems(mesh: AbstractMesh) -> Iterator[str]:
    if mesh.empty:
        yield "there is no mesh: enter jax.set_mesh(mesh) first."
    elif others := [axis for axis in mesh.axis_names if axis not in mesh.explicit_axes]:
        make = f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,) * {len(mesh.axis_names)})"
        yield f"the mesh has axes that are not Explicit: {', '.join(others)}. Make it with {make}."


def _table_problems(mesh: AbstractMesh, table: Table) -> Iterator[str]:
    for name, on in table.items():
        if name not in SHARDABLE:
            yield f"'{name}' is no dimension that can be sharded; they are {', '.join(SHARDABLE)}."
        if len(set(on)) < len(on):
            yield f"{name} names an axis of the mesh twice."
        for axis in on:
            if not mesh.empty and axis not in mesh.axis_names:
                yield f"{name}='{axis}' is no axis of the mesh; it has {', '.join(mesh.axis_names)}."
        if name != "batch" and set(on) & set(table.get("batch", ())):
            yield f"{name} shares an axis of the mesh with batch: an axis shards rows or weights."
    branches = {table.get(name, ()) for name in ("heads", "mlp", "vocab")}
    if table.get("sequence") and branches != {table["sequence"]}:
        yield "sequence is to be sharded over the same axes as heads, mlp and vocab."


def param_shardings(names: Tree, shapes: Tree) -> Tree:
    """NamedShardings of parameters with these names and shapes, on jax.set_mesh's mesh by the rules of this context.

    Raises LayoutError without a mesh or rules, and for sizes that the mesh does not divide."""
    rules_of_mesh()
    mesh = jax.sharding.get_mesh()
    problems = {
        f"dimension '{name}' of size {size} is not divisible by the {num_shards(name)} devices of its axes."
        for dim_names, leaf in zip(jax.tree.leaves(names, is_leaf=is_dim_names), jax.tree.leaves(shapes), strict=True)
        for name, size in zip(dim_names, leaf.shape, strict=True)
        if name and size % num_shards(name)
    }
    if problems:
        raise LayoutError(*sorted(problems), "Only spmd-lm train pads: choose sizes that are divisible.")

    def sharding(dim_names: DimNames) -> NamedSharding:
        return NamedSharding(mesh, partition_spec(*dim_names))

    return jax.tree.map(sharding, names, is_leaf=is_dim_names)
