"""Warm start: a run's first state from another run's parameters, newly initialized where that run has none."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from spmd_lm.checkpoints.saved_run import (
    check_vocabulary,
    check_warm_start,
    checked_meta,
    newest_readable,
    open_checkpoints,
)
from spmd_lm.config.own_modules import ModuleRef
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState

SHARED_HEAD = ("head.norm", "head.pooler")
"""Parts of the head that have the same meaning under several objectives."""

POSITIONS = "embedding.positions"
"""A table whose first rows serve a run with a shorter context."""


class PretrainedRun:
    """The newest checkpoint of another run, and which of its parameters a program reuses: all outside the head; of the
    head all under the same kind of objective, else SHARED_HEAD, where the shapes match."""

    def __init__(self, program: Program, directory: Path, fallback: bool = False):
        """Reads the parameters.  CheckpointError if `directory` has no checkpoint, or one that is damaged or of another
        model, and ConfigError for another vocabulary.  fallback: takes the newest checkpoint that is not damaged."""
        self.program, self.directory = program, directory
        self.checkpoints = open_checkpoints(directory, program.config.checkpoint)
        if not self.checkpoints.steps():
            raise CheckpointError(
                f"run.init_from={directory}: {'it holds no checkpoint' if directory.exists() else 'no such run'}. "
                "Train it first, with checkpoint.every."
            )
        self.params = newest_readable(self.checkpoints, self._read, fallback)  # those reused, by path

    def _read(self, step: int) -> dict[str, jax.Array]:
        program, config = self.program, self.program.config
        meta = checked_meta(self.checkpoints, step)
        saved = meta["config"]
        check_warm_start(saved, config.model_dump(by_alias=True), self.directory)
        check_vocabulary(config, self.directory, meta if step else None)
        self.step, self.shapes = step, self.checkpoints.param_shapes(step)  # of all its parameters, by path
        modules = (saved["objective"].get("module"), config.objective.module)
        same_module = len({text and ModuleRef.parse(text)[1:] for text in modules}) == 1
        self.same_objective = saved["objective"]["kind"] == config.objective.kind and same_module
        own = leaves_by_path(program.abstract_canonical().params)
        reused = [name for name, leaf in own.items() if self._fits(name, leaf.shape)]
        self.new = [name for name in own if name not in reused]
        if missing := [name for name in self.new if not name.startswith("head.")]:
            raise CheckpointError(
                f"{self.checkpoints.directory / str(step)} lacks {', '.join(missing)}: it is of another model. "
                f"Choose another run.init_from."
            )
        abstract = {
            name: jax.ShapeDtypeStruct(self.shapes[name].shape, own[name].dtype, sharding=own[name].sharding)
            for name in reused
        }
        return self.checkpoints.restore_params_by_path(step, abstract)

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter of this name and shape can be taken from this run."""
        if name not in self.shapes:
            return False
        if name.startswith("head.") and not (self.same_objective or name.startswith(SHARED_HEAD)):
            return False
        saved = self.shapes[name].shape
        return saved == shape or (name == POSITIONS and saved[1:] == shape[1:] and saved[0] > shape[0])

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        state = self.program.canonical(self.program.init())
        own = leaves_by_path(state.params) | self.params
        params = jax.tree.unflatten(jax.tree.structure(state.params), own.values())
        params = jax.tree.map(_first_rows, params, state.params)
        return self.program.from_canonical(dataclasses.replace(state, params=params))

    def describe(self) -> str:
        """Where the parameters come from, and which do not, in a line."""
        unused = [name for name in self.shapes if name not in self.params]
        message = f"initialized from {self.directory.absolute()} after step {self.step}"
        message += f", newly initialized: {', '.join(self.new)}" if self.new else ""
        return message + (f", not used: {', '.join(unused)}" if unused else "")


def _first_rows(x: jax.Array, like: jax.Array) -> jax.Array:
    if x.shape == like.shape:
        return x
    return jax.jit(lambda x: jnp.copy(x[: like.shape[0]]), out_shardings=like.sharding)(x)
