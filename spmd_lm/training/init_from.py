"""Warm start: a run's first state from another run's parameters, newly initialized where that run has none."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from spmd_lm.checkpoints.checkpointer import Checkpointer, leaves_by_path
from spmd_lm.checkpoints.saved_run import check_warm_start
from spmd_lm.errors import CheckpointError
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.run_dir import check_vocabulary

SHARED_HEAD = ("head.norm", "head.pooler")
"""Parts of the head that have the same meaning under several objectives."""

POSITIONS = "embedding.positions"
"""A table whose first rows serve a run with a shorter context."""


@dataclasses.dataclass(frozen=True)
class PretrainedRun:
    """The newest checkpoint of another run, and which of its parameters a program reuses: all outside the head; of the
    head all under the same kind of objective, else SHARED_HEAD, where the shapes match."""

    checkpoints: Checkpointer
    step: int
    shapes: Mapping[str, jax.ShapeDtypeStruct]  # of all its parameters, by path
    reused: frozenset[str]

    @classmethod
    def open(cls, program: Program, directory: Path) -> "PretrainedRun":
        """CheckpointError if `directory` has no checkpoint, or one of another model, and ConfigError for another
        vocabulary, before any array is read."""
        checkpoints = Checkpointer(directory / "checkpoints")
        step = checkpoints.latest_step()
        if step is None:
            raise CheckpointError(
                f"run.init_from={directory}: it holds no checkpoint. Train it first, with checkpoint.every."
            )
        saved, config = checkpoints.meta(step)["config"], program.config
        check_warm_start(saved, config.model_dump(by_alias=True), directory)
        check_vocabulary(config, directory, saved if step else None)
        shapes, own_shapes = checkpoints.param_shapes(step), leaves_by_path(program.plan.shapes)
        same_objective = saved["objective"]["kind"] == config.objective.kind

        def is_reused(name: str) -> bool:
            if name.startswith("head.") and not (same_objective or name.startswith(SHARED_HEAD)):
                return False
            return name in shapes and _fits(name, shapes[name].shape, own_shapes[name].shape)

        reused = frozenset(filter(is_reused, own_shapes))
        if missing := [name for name in own_shapes if name not in reused and not name.startswith("head.")]:
            raise CheckpointError(
                f"{checkpoints.directory / str(step)} lacks {', '.join(missing)}: it is of another model. "
                f"Choose another run.init_from."
            )
        return cls(checkpoints, step, shapes, reused)

    def initial_state(self, program: Program) -> TrainState:
        """The state before the first step."""
        state = program.canonical(program.init())
        own = leaves_by_path(state.params)
        abstract = {
            name: jax.ShapeDtypeStruct(self.shapes[name].shape, own[name].dtype, sharding=own[name].sharding)
            for name in self.reused
        }
        loaded = self.checkpoints.restore_params_by_path(self.step, abstract)
        leaves = [_first_rows(loaded[name], leaf) if name in loaded else leaf for name, leaf in own.items()]
        params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
        return program.place(dataclasses.replace(state, params=params))

    def describe(self, program: Program) -> str:
        """Where the parameters come from, and which do not, in a line."""
        new = [name for name in leaves_by_path(program.plan.shapes) if name not in self.reused]
        unused = [name for name in self.shapes if name not in self.reused]
        message = f"initialized from {self.checkpoints.directory.parent} after step {self.step}"
        message += f", newly initialized: {', '.join(new)}" if new else ""
        return message + (f", not used: {', '.join(unused)}" if unused else "")


def _fits(name: str, saved: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return saved == own or (name == POSITIONS and saved[1:] == own[1:] and saved[0] > own[0])


def _first_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    if x.shape == like.shape:
        return x
    return jax.jit(lambda x: jnp.copy(x[: like.shape[0]]), out_shardings=like.sharding)(x)
