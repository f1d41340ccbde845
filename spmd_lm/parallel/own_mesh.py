"""Rules, and shardings of parameters, on a mesh of one's own: for models in a jax.jit outside of a Plan."""

from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, NamedSharding

from spmd_lm.axes import AxisRules, DimNames, has_axis_rules, is_dim_names, num_shards, partition_spec
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.rules import REPLICATED
from spmd_lm.parallel.trees import Tree

SHARDABLE = ("batch", "sequence", "heads", "mlp", "vocab")
"""Names that rules of one's own may shard."""


def rules_on_mesh(mesh: AbstractMesh, axes: Mapping[str, str | tuple[str, ...]]) -> AxisRules:
    """Rules of one's own, for a mesh of Explicit axes.  axes: the mesh axes that shard a name of SHARDABLE, outermost
    first; a name that is missing is not sharded.  Raises LayoutError."""
    table = {name: (on,) if isinstance(on, str) else tuple(on) for name, on in axes.items()}
    unknown = [name for name in table if name not in SHARDABLE]
    problems = [f"'{name}' is no dimension that can be sharded; they are {', '.join(SHARDABLE)}." for name in unknown]
    shared = [name for name, on in table.items() if name != "batch" and set(on) & set(table.get("batch", ()))]
    problems += [f"{name} shares an axis of the mesh with batch: an axis shards rows or weights." for name in shared]
    for name, axis in ((name, axis) for name, on in table.items() for axis in on):
        if axis not in mesh.axis_names:
            has = (
                f"it has {', '.join(mesh.axis_names)}" if mesh.axis_names else "there is none: enter jax.set_mesh(mesh)"
            )
            problems.append(f"{name}='{axis}' is no axis of the mesh; {has}.")
        elif axis not in mesh.explicit_axes:
            make = f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Explicit,) * {len(mesh.axis_names)})"
            problems.append(f"{name}='{axis}' is an axis of the mesh that is not Explicit. Make the mesh with {make}.")
    branches = {table.get(name, ()) for name in ("heads", "mlp", "vocab")}
    if table.get("sequence") and branches != {table["sequence"]}:
        problems.append("sequence is to be sharded over the same axes as heads, mlp and vocab.")
    if problems:
        raise LayoutError(*problems)
    return AxisRules({**REPLICATED, **table}, dict(mesh.shape))


def param_shardings(names: Tree, shapes: Tree) -> Tree:
    """NamedShardings of parameters with these names and shapes, on jax.set_mesh's mesh by the rules of this context.

    Raises LayoutError without a mesh or rules, and for sizes that the mesh does not divide."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or not has_axis_rules():
        raise LayoutError("there are no mesh and rules: enter jax.set_mesh(mesh) and spmd_lm.axis_rules(...) first.")
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
