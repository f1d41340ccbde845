"""What a transposed function has saved, less what its caller has anyway."""

import functools
from collections.abc import Callable
from typing import Any

import jax

Tree = Any


def without(pull: Callable, known: Tree) -> tuple[list[jax.Array], Callable]:
    """What `pull`, as jax.vjp made it, has saved, less the arrays of `known`; and the way back: rebuild(saved, known).

    `rebuild` is a tree without leaves, so that a loop can hand it on beside what is saved."""
    leaves, treedef = jax.tree.flatten(pull)
    ours = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
    places = tuple(ours.get(id(leaf)) for leaf in leaves)
    return [leaf for leaf, at in zip(leaves, places, strict=True) if at is None], jax.tree_util.Partial(
        functools.partial(_rebuild, treedef, places)
    )


def _rebuild(treedef, places: tuple[int | None, ...], saved: list[jax.Array], known: Tree) -> Callable:
    rest, ours = iter(saved), jax.tree.leaves(known)
    return jax.tree.unflatten(treedef, [next(rest) if at is None else ours[at] for at in places])
