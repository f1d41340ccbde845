"""Trees of arrays: casts, sums, subsets, and the residuals of a VJP, which is a pytree too."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from spmd_lm.config.adapters import CODED

Tree = Any


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree of dicts and dataclasses by path, as in 'blocks.attention.query'."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


@dataclasses.dataclass(frozen=True)
class LaterLeaf:
    """An array that is read when it is needed."""

    read: Callable[[], Array]


def read_now(tree: Tree) -> Tree:
    """The tree with arrays in place of LaterLeafs."""
    return jax.tree.map(lambda x: x.read() if isinstance(x, LaterLeaf) else x, tree)


def from_paths(leaves: Mapping[str, Any], like: Tree) -> Tree:
    """A tree like `like`, whose leaves are taken from `leaves` by their paths."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in leaves_by_path(like)])


def is_coded(path: tuple) -> bool:
    """True for an array of a quantized matrix.  path: its keys, jax's."""
    return bool(path) and getattr(path[-1], "key", None) in CODED


def cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    """Casts a tree to this dtype, except for the arrays of quantized matrices."""

    def cast_leaf(path: tuple, x: Array) -> Array:
        return x if is_coded(path) else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast_leaf, tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """Casts the leaves to the dtypes of the leaves of `like`."""
    return jax.tree.map(lambda x, to: x.astype(to.dtype), tree, like)


def tree_add(total: Tree, new: Tree) -> Tree:
    """The sum, in the dtypes of `total`."""
    return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, new)


def subset_of(tree: Tree, like: Tree) -> Tree:
    """The leaves of `tree`, nested dicts, that `like`, nested dicts, has too."""
    if not isinstance(tree, dict):
        return tree
    return {key: subset_of(value, like[key]) for key, value in tree.items() if key in like}


def exclude(tree: Tree, subset: Tree) -> Tree:
    """The leaves of `tree`, nested dicts, that are not in `subset`, which has some of its entries."""
    return {
        key: exclude(value, subset.get(key, {})) if isinstance(value, dict) else value
        for key, value in tree.items()
        if isinstance(value, dict) or key not in subset
    }


def merge(tree: Tree, other: Tree) -> Tree:
    """Nested dicts with the leaves of both; `other` takes precedence."""
    if not (isinstance(tree, dict) and isinstance(other, dict)):
        return other
    return tree | {key: merge(tree[key], value) if key in tree else value for key, value in other.items()}


def tree_add_subset(total: Tree, subset: Tree) -> Tree:
    """`total`, nested dicts, plus `subset`, which has some of its entries."""
    if not isinstance(total, dict):
        return tree_add(total, subset)
    return {key: tree_add_subset(value, subset[key]) if key in subset else value for key, value in total.items()}


def drop_residuals(vjp: Callable, known: Tree) -> tuple[list[Array], Callable]:
    """(residuals, rebuild) of `vjp`, a function that jax.vjp returned: its residuals minus the arrays of `known`, which
    its caller can supply again, and rebuild(residuals, known), which is `vjp` again.

    `rebuild` is a pytree without leaves, so that a loop can carry it beside the residuals."""
    leaves, treedef = jax.tree.flatten(vjp)
    known_ids = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
    sources = tuple(known_ids.get(id(leaf)) for leaf in leaves)
    residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
    return residuals, jax.tree_util.Partial(functools.partial(_rebuild, treedef, sources))


def _rebuild(treedef, sources: tuple[int | None, ...], residuals: list[Array], known: Tree) -> Callable:
    rest, known_leaves = iter(residuals), jax.tree.leaves(known)
    return jax.tree.unflatten(treedef, [next(rest) if source is None else known_leaves[source] for source in sources])
