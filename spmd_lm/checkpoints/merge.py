"""`spmd-lm merge`: folds a run's adapters into its base, as a run of its own."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd_lm.checkpoints.new_run import copy_tokenizer, write_new_run
from spmd_lm.checkpoints.restored import restore_run
from spmd_lm.config.adapters import CODED, SUFFIX, NoAdapter, is_adapter
from spmd_lm.config.layers import path_in_block
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, NonFiniteError
from spmd_lm.models.adapters import LowRank, Scaling
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.models.layers import ScaledMatrix
from spmd_lm.ops.dense import Matrix
from spmd_lm.ops.few_bits import CodedMatrix, Coding
from spmd_lm.ops.low_rank import LowRankSum
from spmd_lm.ops.norm import upcast
from spmd_lm.parallel.trees import Tree, from_paths, leaves_by_path
from spmd_lm.runtime.directories import atomic_directory, require_absent_or_empty
from spmd_lm.runtime.processes import require_single_process
from spmd_lm.step.program import Program

COMPARED_TOKENS = 128


def merged_config(config: RunConfig, directory: Path) -> RunConfig:
    """The configuration of the merged model's run in `directory`: to evaluate, generate, export or train."""
    run = config.run.model_copy(update={"dir": str(directory), "init_from": None})
    precision = config.precision.model_copy(update={"frozen": None})
    optim = config.optim.model_copy(update={"freeze": ""})
    changes = {"run": run, "precision": precision, "optim": optim, "adapter": NoAdapter()}
    return config.model_copy(update=changes)


def merge_adapters(params: Mapping[str, jax.Array], model: LanguageModel) -> dict[str, jax.Array]:
    """This model's parameters by path, with adapters merged and quantization undone; computed in at least float32, one
    matrix at a time, with their shardings."""
    adapters, result = dict(model.adapters), dict[str, jax.Array]()
    for path, x in params.items():
        matrix, _, key = path.rpartition(".")
        if is_adapter(path.split(".")) or key in CODED[1:]:
            continue
        if key == CODED[0]:
            stored = {each: params[f"{matrix}.{each}"] for each in CODED if f"{matrix}.{each}" in params}
            path, x = matrix, _decode(stored, model.base, model.matrices[path_in_block(matrix)])
        if adapter := adapters.get(path_in_block(path)):
            factors = ("scale",) if isinstance(adapter, Scaling) else ("a", "b")
            x = _entries(x, {factor: params[f"{path}{SUFFIX}.{factor}"] for factor in factors}, adapter)
        of = path.removesuffix("_bias")
        scaling = adapters.get(path_in_block(of)) if of != path else None
        if isinstance(scaling, Scaling) and not scaling.transposed:
            x = x * params[f"{of}{SUFFIX}.scale"]
        result[path] = x.astype(model.dtype)
    return result


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode(stack: dict[str, jax.Array], coding: Coding, transposed: bool) -> jax.Array:
    return jax.vmap(lambda stored: CodedMatrix(stored, coding, "", transposed).entries)(stack)


@functools.partial(jax.jit, static_argnums=2)
def _entries(stack: jax.Array, stored: dict[str, jax.Array], adapter: LowRank | Scaling) -> jax.Array:
    """Stacked matrices with their adapters merged.  stored: the adapters' arrays."""
    stack, stored = jax.tree.map(upcast, (stack, stored))

    def entries(matrix: jax.Array, stored: dict[str, jax.Array]) -> jax.Array:
        if isinstance(adapter, Scaling):
            return ScaledMatrix(Matrix(matrix), stored["scale"]).entries
        return LowRankSum(Matrix(matrix), stored["a"], stored["b"], adapter.scaling, adapter.transposed).entries

    with jax.default_matmul_precision("highest"):
        return jax.vmap(entries)(stack, stored)


def merge_run(config: RunConfig, target: Path, fallback: bool = False) -> dict[str, Any]:
    """Creates `target`, a run of the merged model at step 0.  Returns its `directory`, the merged `step`, the number of
    `adapters`, and `moved`, the largest change of a logit relative to the largest logit.
    fallback: as for `restore_run`.

    Raises ConfigError for a run without adapters, and if `target` is not empty or cannot be written; CheckpointError
    if the checkpoint or its base is missing; NonFiniteError if logits are NaN."""
    require_single_process("merge")
    require_absent_or_empty(target)
    if config.adapter.kind == "none":
        raise ConfigError(f"{config.run.directory} has no adapters to merge: adapter.kind=none. Give a run that has.")
    adapted, params, step = restore_run(config, fallback)
    leaves = merge_adapters(leaves_by_path(params), adapted.model)
    to = merged_config(config, target)
    with atomic_directory(target) as directory:
        program = Program(to, trains=False)
        tree = from_paths(leaves, program.plan.shapes)
        moved = _moved(_logits(adapted, params), _logits(program, tree))
        write_new_run(program, tree, directory)
        copy_tokenizer(config.run.directory, directory)
    return {"directory": str(target), "step": step, "adapters": len(adapted.model.adapters), "moved": moved}


def _logits(program: Program, params: Tree) -> list[np.ndarray]:
    """The heads' outputs for a row of random tokens.  params: canonical."""
    tokens = np.random.default_rng(0).integers(program.config.model.vocab, size=COMPARED_TOKENS, dtype=np.int32)
    tokens = tokens[: program.config.model.context]
    batch = program.repeated_row(tokens, np.ones_like(tokens))
    return jax.tree.leaves(jax.device_get(program.forward(program.params_from_canonical(params), batch)))


def _moved(before: list[np.ndarray], after: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value before.  The vocabulary's padding stays -inf."""
    if any(np.isnan(a).any() for a in before):
        raise NonFiniteError("Nothing is merged: logits of the run with adapters are NaN. Use an earlier checkpoint.")
    with np.errstate(invalid="ignore"):
        moved = max(np.where(a == b, 0, np.abs(a - b)).max() for a, b in zip(before, after, strict=True))
    return float(moved / max(np.abs(a[np.isfinite(a)]).max() for a in before))
