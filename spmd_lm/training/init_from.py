"""The first state of a run that starts as another one's model: its parameters, with new ones where there are none."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from spmd_lm.checkpoints.checkpointer import Checkpointer, check_same_model
from spmd_lm.config.load import kept_vocabulary
from spmd_lm.config.schema import Data, RunConfig
from spmd_lm.data.tokenizers.vocabulary import find_vocabulary
from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.parallel.plan import Tree
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState

SHARED = ("head.norm", "head.pooler")
"""What heads of several objectives have, and mean the same by."""

POSITIONS = "embedding.positions"
"""Of this table the first rows serve a run whose rows are shorter."""


def paths(tree: Tree) -> dict[str, jax.Array]:
    """The leaves of a tree of dicts by path, as in 'blocks.attention.query'."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


@dataclasses.dataclass(frozen=True)
class Origin:
    """The newest checkpoint of another run, and what a program takes of it: all that is outside the head, and of the
    head what an objective of its kind has, or its SHARED part, where ours has it in the same shape."""

    saves: Checkpointer
    step: int
    there: Mapping[str, jax.ShapeDtypeStruct]  # its parameters, by path
    taken: frozenset[str]

    @classmethod
    def of(cls, program: Program, directory: Path) -> "Origin":
        """Raises CheckpointError if there is no checkpoint in `directory`, or another model's, and ConfigError for
        another vocabulary, before anything large is read."""
        saves = Checkpointer(directory / "checkpoints")
        newest = saves.latest()
        if newest is None:
            raise CheckpointError(
                f"run.init_from={directory}: it holds no checkpoint. Train it first, with checkpoint.every."
            )
        theirs, config = saves.meta(newest)["config"], program.config
        check_same_model(theirs, config.model_dump(by_alias=True), directory)
        check_vocabulary(config, directory, theirs if newest else None)
        there, ours = saves.parameters(newest), paths(program.plan.shapes)
        alike = theirs["objective"]["kind"] == config.objective.kind
        kept = lambda name: alike or not name.startswith("head.") or name.startswith(SHARED)  # noqa: E731
        fits = lambda name: name in there and _fits(name, there[name].shape, ours[name].shape)  # noqa: E731
        taken = frozenset(name for name in ours if kept(name) and fits(name))
        if lost := [name for name in ours if name not in taken and not name.startswith("head.")]:
            raise CheckpointError(f"{saves.directory / str(newest)} lacks {', '.join(lost)}. It is another model's.")
        return cls(saves, newest, there, taken)

    def state(self, program: Program) -> TrainState:
        """The state before the first step."""
        state = program.canonical(program.init())
        ours = paths(state.params)
        like = lambda name: jax.ShapeDtypeStruct(  # noqa: E731
            self.there[name].shape, ours[name].dtype, sharding=ours[name].sharding
        )
        loaded = self.saves.restore_some(self.step, {name: like(name) for name in self.taken})
        fitted = (_first_rows(loaded[name], leaf) if name in loaded else leaf for name, leaf in ours.items())
        params = jax.tree.unflatten(jax.tree.structure(state.params), fitted)
        return program.place(dataclasses.replace(state, params=params))

    def describe(self, program: Program) -> str:
        """A line on what comes from there and what does not."""
        ours = paths(program.plan.shapes)
        new = [name for name in ours if name not in self.taken]
        left = [name for name in self.there if name not in self.taken]
        told = f"starting as {self.saves.directory.parent} was after step {self.step}"
        told += f", with a new {', '.join(new)}" if new else ""
        return told + (f", without its {', '.join(left)}" if left else "")


def _fits(name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    return theirs == ours or (name == POSITIONS and theirs[1:] == ours[1:] and theirs[0] > ours[0])


def _first_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    if x.shape == like.shape:
        return x
    return jax.jit(lambda x: jnp.copy(x[: like.shape[0]]), out_shardings=like.sharding)(x)


def check_vocabulary(config: RunConfig, directory: Path, trained: dict | None) -> None:
    """Raises ConfigError for another vocabulary than that of the run in `directory`: the one that it keeps, or bytes.
    trained: how it was trained last; None for a run that took no step yet."""
    if not isinstance(config.data, Data):
        return
    name, kept = config.data.tokenizer, kept_vocabulary(directory)
    if kept:
        same = name != "bytes" and find_vocabulary(name).read_bytes() == find_vocabulary(str(kept)).read_bytes()
    else:
        same = name == "bytes" or trained is None or trained["data"].get("tokenizer") != "bytes"
    if not same:
        raise ConfigError(
            f"data.tokenizer={name} is not the vocabulary of {directory}, whose ids its model knows. "
            f"Use data.tokenizer={kept or 'bytes'}, or another run."
        )
