"""Parameters that training does not change, chosen by name.

A name is a path in the tree of parameters, that of a layer with its index: embedding.tokens,
blocks.3.attention.query, head.output.  Patterns are shell globs: blocks.[0-5].* are the first six layers, *bias every
bias."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import jax
import numpy as np

from spmd_lm.axes import DimNames, is_dim_names
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.plan import Tree


def frozen_mask(patterns: Sequence[str], names: Tree, shapes: Tree) -> Tree:
    """Whether each parameter is frozen, bool; for a stack, bool [layers].

    names, shapes: trees of the parameters' dimension names and canonical shapes.  Raises ConfigError for a pattern that
    matches nothing, and if every parameter would be frozen."""
    unused, known = set(patterns), []

    def is_frozen(name: str) -> bool:
        known.append(name)
        matching = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        unused.difference_update(matching)
        return bool(matching)

    def leaf_mask(path: tuple, dim_names: DimNames, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        first, *rest = (key.key for key in path)
        if "layers" not in dim_names:
            return np.array(is_frozen(".".join([first, *rest])))
        return np.array([is_frozen(".".join([first, str(layer), *rest])) for layer in range(leaf.shape[0])])

    mask = jax.tree_util.tree_map_with_path(leaf_mask, names, shapes, is_leaf=is_dim_names)
    if unused:
        raise ConfigError(*(_unknown_name(pattern, known) for pattern in sorted(unused)))
    if all(leaf.all() for leaf in jax.tree.leaves(mask)):
        raise ConfigError(f"optim.freeze={' '.join(patterns)} freezes every parameter. Leave some out.")
    return mask


def _unknown_name(pattern: str, known: list[str]) -> str:
    near = did_you_mean(pattern, known)
    hint = f"Did you mean {near}?" if near else f"Names are like {known[0]} and {known[-1]}."
    return f"optim.freeze: {pattern} matches no parameter. {hint}"


def trained_count(mask: Tree, shapes: Tree) -> int:
    """Number of parameters that are not frozen."""

    def count(frozen: np.ndarray, leaf: jax.ShapeDtypeStruct) -> int:
        return int((~frozen).sum()) * math.prod(leaf.shape) // frozen.size

    return sum(jax.tree.leaves(jax.tree.map(count, mask, shapes)))
