"""Frozen parameters: shell patterns over their names."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase, translate

import jax
import numpy as np

from spmd_lm.axes import DimNames, is_dim_names
from spmd_lm.config.layers import layer_path
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.trees import Tree

MAX_UNMATCHED = 3
"""Most unmatched patterns that an error lists: finding the nearest of 60,000 names takes a second."""


def frozen_mask(patterns: Sequence[str], names: Tree, shapes: Tree, trainable: Collection[str] | None = None) -> Tree:
    """A tree of bools, True for frozen parameters: one per array, or, if there are patterns, one per layer of a stack.

    patterns: shell globs of paths in the tree of parameters, in which a layer has its index: embedding.tokens,
    blocks.[0-5].*, *bias.  names, shapes: trees of the parameters' dimension names and canonical shapes.  trainable:
    paths, without layers, of the parameters that training may change; None for all.  Raises ConfigError for a pattern
    that matches nothing, and if every parameter would be frozen."""
    known: list[str] = []
    any_pattern = re.compile("|".join(map(translate, patterns)) if patterns else r"(?!)")

    def is_frozen(*path: str) -> bool:
        known.append(".".join(path))
        return any_pattern.match(known[-1]) is not None

    def leaf_mask(path: tuple, dim_names: DimNames, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        keys = tuple(key.key for key in path)
        place, (first, *rest) = layer_path(keys)
        stays = trainable is not None and ".".join((first, *rest)) not in trainable
        if "layers" not in dim_names or not patterns:
            return np.array(is_frozen(first, *rest) or stays)
        step = len(names[first]) if (first, *rest) != keys else 1  # layers of a period
        return np.array([is_frozen(first, str(place + i * step), *rest) or stays for i in range(leaf.shape[0])])

    mask = jax.tree_util.tree_map_with_path(leaf_mask, names, shapes, is_leaf=is_dim_names)
    problems: list[str] = []
    for pattern in sorted(set(patterns)):
        if len(problems) < MAX_UNMATCHED and not any(fnmatchcase(name, pattern) for name in known):
            near = did_you_mean(pattern, known)
            hint = f"Did you mean {near}?" if near else f"Names are like {known[0]} and {known[-1]}."
            problems.append(f"optim.freeze: {pattern} matches no parameter. {hint}")
    if not problems and all(leaf.all() for leaf in jax.tree.leaves(mask)):
        problems.append(f"optim.freeze={' '.join(patterns)} freezes every parameter. Leave some out.")
    if problems:
        raise ConfigError(*problems)
    return mask


def trained_count(mask: Tree, shapes: Tree) -> int:
    """Number of parameters that are not frozen."""
    pairs = zip(jax.tree.leaves(mask), jax.tree.leaves(shapes), strict=True)
    return sum(int((~frozen).sum()) * leaf.size // frozen.size for frozen, leaf in pairs)
