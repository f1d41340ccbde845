"""The first state of a run that starts as another one's model: its parameters, with new ones where there are none."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.plan import Tree
from spmd_lm.train.checkpoint import Checkpointer, check_same_model
from spmd_lm.train.program import Program
from spmd_lm.train.state import TrainState

POSITIONS = "embedding.positions"
"""Of this table the first rows serve a run whose rows are shorter."""


def paths(tree: Tree) -> dict[str, jax.Array]:
    """The leaves of a tree of dicts by path, as in 'blocks.attention.query'."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def begin(program: Program, origin: Path) -> tuple[TrainState, str]:
    """The state before the first step, and a line on where it comes from.

    Of the newest checkpoint in `origin` all parameters outside the head are taken, and those of the head that ours has
    in the same shape; the others are born, as without an origin.  CheckpointError if there is none, or another model's.
    """
    saves = Checkpointer(origin / "checkpoints")
    newest = saves.latest()
    if newest is None:
        raise CheckpointError(f"run.init_from={origin}: it holds no checkpoint. Train it first, with checkpoint.every.")
    check_same_model(saves.meta(newest)["config"], program.config.model_dump(by_alias=True), origin)
    there = saves.parameters(newest)
    state = program.canonical(program.init())
    ours = paths(state.params)
    taken = {name for name, leaf in ours.items() if name in there and _fits(name, there[name].shape, leaf.shape)}
    if lost := [name for name in ours if name not in taken and not name.startswith("head.")]:
        raise CheckpointError(f"{saves.directory / str(newest)} lacks {', '.join(lost)}. It is another model's.")
    wanted = {
        name: jax.ShapeDtypeStruct(there[name].shape, ours[name].dtype, sharding=ours[name].sharding) for name in taken
    }
    loaded = saves.restore_some(newest, wanted)
    fitted = lambda name: _first_rows(loaded[name], ours[name]) if name in taken else ours[name]  # noqa: E731
    params = jax.tree.unflatten(jax.tree.structure(state.params), map(fitted, ours))
    new, left = [name for name in ours if name not in taken], [name for name in there if name not in ours]
    told = f"starting as {origin} was after step {newest}"
    told += f", with a new {', '.join(new)}" if new else ""
    told += f", without its {', '.join(left)}" if left else ""
    return program.place(dataclasses.replace(state, params=params)), told


def _fits(name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    return theirs == ours or (name == POSITIONS and theirs[1:] == ours[1:] and theirs[0] > ours[0])


def _first_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    if x.shape == like.shape:
        return x
    return jax.jit(lambda x: jnp.copy(x[: like.shape[0]]), out_shardings=like.sharding)(x)
