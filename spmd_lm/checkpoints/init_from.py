"""Warm start: a run's first state from another run's parameters; those that it lacks are initialized."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from spmd_lm.checkpoints.leaves import Shapes
from spmd_lm.checkpoints.saved_run import (
    check_vocabulary,
    check_warm_start,
    checked_meta,
    newest_readable,
    open_checkpoints,
)
from spmd_lm.config.adapters import CODED, is_adapter
from spmd_lm.config.layers import path_in_block
from spmd_lm.config.own_modules import ModuleRef
from spmd_lm.errors import CheckpointError
from spmd_lm.ops.few_bits import encode
from spmd_lm.parallel.host_memory import DEVICE, on_devices
from spmd_lm.parallel.trees import Tree, from_paths, leaves_by_path
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState

SHARED_HEAD = ("head.norm", "head.pooler")  # parts of the head with the same meaning under several objectives

POSITIONS = "embedding.positions"  # a table whose first rows serve a run with a shorter context


class PretrainedRun:
    """The newest checkpoint of another run, and the parameters that a program reuses from it: all outside the head, and
    of the head all if the objective is of the same kind, else SHARED_HEAD; shapes must match."""

    def __init__(self, program: Program, directory: Path, fallback: bool = False, step: int | None = None):
        """Reads the parameters.

        fallback: take the newest undamaged checkpoint.
        step: the only acceptable one.

        Raises CheckpointError if `directory` has no checkpoint, or one that is damaged or of another model; ConfigError
        for another vocabulary."""
        self.program, self.directory = program, directory
        self.checkpoints = open_checkpoints(directory, program.config.checkpoint)
        if not self.checkpoints.steps():
            raise CheckpointError(
                f"run.init_from={directory}: {'it holds no checkpoint' if directory.exists() else 'no such run'}. "
                "Train it first, with checkpoint.every."
            )
        if step is not None and step not in (steps := self.checkpoints.steps()):
            raise CheckpointError(
                f"run.init_from={directory} has step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}, but step "
                f"{step} is the base of {program.config.run.directory}. Bring {self.checkpoints.path(step)} back."
            )
        # Reused parameters, by path.
        self.params = newest_readable(self.checkpoints, self._read, fallback) if step is None else self._read(step)

    def _read(self, step: int) -> dict[str, jax.Array]:
        program, config = self.program, self.program.config
        meta = checked_meta(self.checkpoints, step)
        saved, own = meta["config"], config.model_dump(by_alias=True)["precision"]
        if (kind := saved.get("adapter", {}).get("kind", "none")) != "none":
            raise CheckpointError(
                f"run.init_from={self.directory} holds an adapter alone ({kind}), not its model. Merge both first: "
                f"spmd-lm merge {self.directory} OUT."
            )
        codes = [(each.get("quantized", "none"), each.get("quantized_group")) for each in (saved["precision"], own)]
        if codes[0] != codes[1]:
            theirs, ours = (f"precision.quantized={bits} in groups of {group}" for bits, group in codes)
            problem = f"run.init_from={self.directory} has {theirs}, and this run {ours}"
            raise CheckpointError(f"{problem}: no codes can be read as others. Use the run that was quantized.")
        check_warm_start(saved, config.model_dump(by_alias=True), self.directory)
        check_vocabulary(config, self.directory, meta if step else None)
        self.rounded = saved["precision"].get("fake_quant", "none")  # how it was trained
        self.step, self.shapes = step, self.checkpoints.param_shapes(step)  # shapes of all its parameters, by path
        modules = (saved["objective"].get("module"), config.objective.module)
        same_module = len({text and ModuleRef.parse(text)[1:] for text in modules}) == 1
        self.same_objective = saved["objective"]["kind"] == config.objective.kind and same_module
        uncoded = program if config.adapter.base == "none" else _without_codes(program)
        leaves = leaves_by_path(uncoded.abstract_canonical().params)
        reused = [name for name, leaf in leaves.items() if self._fits(name, leaf.shape)]
        self.new = [name for name in leaves if name not in reused]
        if missing := [name for name in self.new if not (name.startswith("head.") or is_adapter(name.split(".")))]:
            raise CheckpointError(
                f"{self.checkpoints.directory / str(step)} lacks {', '.join(missing)}: it is of another model. "
                f"Choose another run.init_from."
            )
        abstract = {
            name: jax.ShapeDtypeStruct(self.shapes[name].shape, self.shapes[name].dtype, sharding=leaves[name].sharding)
            for name in reused
        }
        if uncoded is program:
            read = self.checkpoints.restore_params_by_path(step, abstract)
            return {path: on_devices(partial(jnp.asarray, dtype=leaves[path].dtype), x) for path, x in read.items()}
        return self._coded(step, abstract, leaves)

    def _coded(self, step: int, abstract: Shapes, own: Shapes) -> dict[str, jax.Array]:
        """Reads and quantizes the parameters, one at a time.  own: as in a run without quantization."""
        coding, matrices, params = self.program.model.base, self.program.model.matrices, {}
        like = leaves_by_path(self.program.abstract_canonical().params)
        for path, leaf in abstract.items():
            (read,) = self.checkpoints.restore_params_by_path(step, {path: leaf}).values()
            if path in like:
                params[path] = read.astype(own[path].dtype)
            else:
                shardings = {key: like[f"{path}.{key}"].sharding for key in CODED if f"{path}.{key}" in like}
                transposed = matrices[path_in_block(path)]
                make = jax.jit(encode, static_argnums=(0, 2), out_shardings=shardings)
                coded = make(coding, read, transposed)
                params |= {f"{path}.{key}": value for key, value in coded.items()}
        return params

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self.shapes:
            return False
        if name.startswith("head.") and not (self.same_objective or name.startswith(SHARED_HEAD)):
            return False
        saved = self.shapes[name].shape
        return saved == shape or (name == POSITIONS and saved[1:] == shape[1:] and saved[0] > shape[0])

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        return self.program.from_canonical(self.program.initial_canonical(self.initial_params()))

    def initial_params(self) -> Tree:
        """The canonical parameters before the first step."""
        like = self.program.abstract_canonical().params
        own = self.program.initial_params(self.new) | self.params
        return jax.tree.map(_first_rows, from_paths(own, like), like)

    def describe(self) -> str:
        unused = [name for name in self.shapes if not {name, f"{name}.{CODED[0]}"} & self.params.keys()]
        message = f"initialized from {self.directory.absolute()} after step {self.step}"
        new = [name for name in self.new if not is_adapter(name.split("."))]
        message += f", newly initialized: {', '.join(new)}" if new else ""
        if self.rounded not in ("none", kind := self.program.config.precision.fake_quant):
            message += f", trained with precision.fake_quant={self.rounded} and used with {kind}"
        return message + (f", not used: {', '.join(unused)}" if unused else "")


def _without_codes(program: Program) -> Program:
    """The run's program, with a base that is not quantized."""
    adapter = program.config.adapter.model_copy(update={"base": "none"})
    config = program.config.model_copy(update={"adapter": adapter})
    return Program(config, [*program.plan.mesh.devices.flat], program.model.modules, trains=False)


def _first_rows(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape == like.shape:
        return x
    on_device = like.sharding.with_memory_kind(DEVICE)
    return on_devices(jax.jit(lambda x: jnp.copy(x[: like.shape[0]]), out_shardings=on_device), x)
