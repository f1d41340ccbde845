"""Arithmetic on trees of arrays."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def tree_add(total: Tree, new: Tree) -> Tree:
    """The sum, in the dtypes of `total`."""
    return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, new)


def tree_add_subset(total: Tree, subset: Tree) -> Tree:
    """`total`, nested dicts, plus `subset`, which has some of its entries."""
    if not isinstance(total, dict):
        return tree_add(total, subset)
    return {key: tree_add_subset(value, subset[key]) if key in subset else value for key, value in total.items()}


def zeros_like(tree: Tree) -> Tree:
    """Zeros of the shapes and dtypes of `tree`, arrays or their descriptions."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
