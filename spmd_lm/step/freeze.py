"""Parameters that training leaves as they are, chosen by name.

Names are paths in the tree of parameters, a layer's with its number: embedding.tokens, blocks.3.attention.query,
head.output.  A pattern is a shell's: blocks.[0-5].* are the first six layers, *bias every bias."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import jax
import numpy as np

from spmd_lm.axes import is_dim_names
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError
from spmd_lm.parallel.plan import Tree


def frozen(patterns: Sequence[str], names: Tree, shapes: Tree) -> Tree:
    """Of each parameter whether it is frozen, bool; of a stack, bool [layers].

    names, shapes: trees of the parameters' names and canonical shapes.  Raises ConfigError for a pattern that matches
    nothing, and where nothing would be left to train."""
    unused, known = set(patterns), []

    def matched(name: str) -> bool:
        known.append(name)
        fitting = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        unused.difference_update(fitting)
        return bool(fitting)

    def of(path: tuple, dimensions: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        first, *rest = (key.key for key in path)
        if "layers" not in dimensions:
            return np.array(matched(".".join([first, *rest])))
        return np.array([matched(".".join([first, str(layer), *rest])) for layer in range(leaf.shape[0])])

    made = jax.tree_util.tree_map_with_path(of, names, shapes, is_leaf=is_dim_names)
    if unused:
        raise ConfigError(*(_mending(pattern, known) for pattern in sorted(unused)))
    if all(leaf.all() for leaf in jax.tree.leaves(made)):
        raise ConfigError(f"optim.freeze={' '.join(patterns)} leaves no parameter to train. Leave some out.")
    return made


def _mending(pattern: str, known: list[str]) -> str:
    near = did_you_mean(pattern, known)
    way = f"Did you mean {near}?" if near else f"Names are as {known[0]} and {known[-1]}."
    return f"optim.freeze: {pattern} is the name of no parameter. {way}"


def trained(masks: Tree, shapes: Tree) -> int:
    """Number of parameters that are not frozen."""
    each = jax.tree.map(lambda mask, leaf: int((~mask).sum()) * math.prod(leaf.shape) // mask.size, masks, shapes)
    return sum(jax.tree.leaves(each))
