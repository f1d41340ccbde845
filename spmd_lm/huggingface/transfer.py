"""`spmd-lm import` and `spmd-lm export`: between a Hugging Face directory and a run's checkpoint.

Import reads of each tensor the parts that the devices of a layout hold, export gathers one tensor at a time: neither
has a second copy of the model on the host.  Both make a directory that appears whole or not at all."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.config.load import TOKENIZER_DIR, VOCABULARY_FILES, dump
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.vocabulary import BESIDE
from spmd_lm.errors import ConfigError, NonFiniteError
from spmd_lm.evaluation.evaluate import restore_run
from spmd_lm.huggingface import convert
from spmd_lm.huggingface.architectures import CARRIED, Row, Span
from spmd_lm.huggingface.convert import Tensor
from spmd_lm.huggingface.directory import CONFIG, Directory, differences
from spmd_lm.huggingface.safetensors_io import FLOATS, Planned, read_json, some, write, write_json
from spmd_lm.parallel.plan import Tree
from spmd_lm.runtime.atomic_dir import fresh, refuse_taken
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.init_from import paths


def shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The canonical shapes of a program's parameters, by path."""
    return {path: leaf.shape for path, leaf in paths(program.plan.shapes).items()}


def one_process(verb: str) -> None:
    """A checkpoint is restored by any number of processes, and made or read here by one."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"spmd-lm {verb} works in one process, and its checkpoint with any number. Unset JAX_COORDINATOR_ADDRESS; "
            f"--devices N simulates the devices of a layout."
        )


# --- import -----------------------------------------------------------------------------------------------------------


def import_run(found: Directory, config: RunConfig) -> dict[str, Any]:
    """Makes run.dir, with this model as its checkpoint at step 0.

    Raises ConfigError if run.dir is taken or cannot be written, or the tensors are not the model's; NonFiniteError for
    weights that are no numbers."""
    one_process("import")
    with fresh(config.run.directory) as place:
        program = Program(config)
        shapes = shapes_of(program)
        names = locate(found, shapes)
        first = program.abstract_canonical()
        params = read_params(found, names, first.params)
        moments = zeros_like(params)
        state = TrainState(jax.device_put(np.int32(0), first.step.sharding), params, moments, moments)
        meta = make_meta(config.model_dump(by_alias=True), samples=0, fingerprint="")
        with closing(Checkpointer(place / "checkpoints", config.checkpoint.keep, asynchronous=False)) as saves:
            saves.save(0, state, meta)
        (place / TOKENIZER_DIR).mkdir()
        for file in (found.path / CONFIG, *found.carried):
            shutil.copyfile(file, place / TOKENIZER_DIR / file.name)
        (place / "config.yaml").write_text(dump(config), "utf-8")
    what = found.description
    return {
        "directory": str(config.run.directory),
        "architecture": what.architecture.kind,
        "step": 0,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "files": [path.name for path in (*found.tensors.files, *found.carried)],
        "unread": [*what.unread, *sorted(convert.left_out(what.architecture, found.tensors.stored, shapes))],
    }


def locate(found: Directory, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Each tensor's name in the files, by its name in the table.

    ConfigError for tensors missing, extra, misshapen, or of a type that weights do not have."""
    architecture, stored = found.description.architecture, found.tensors.stored
    tensors = convert.tensors(architecture, shapes)
    spelled = {
        tensor.name: next((each for each in architecture.spellings(tensor.name) if each in stored), tensor.name)
        for tensor in tensors
    }
    expected = {spelled[tensor.name]: tensor.shape for tensor in tensors}
    spare = convert.copies(architecture, stored, shapes) | convert.left_out(architecture, stored, shapes)
    asked = {name: at for name, at in stored.items() if name in expected or name not in spare}
    problems = differences(expected, {name: at.shape for name, at in asked.items()})
    if strange := [f"{name} {at.dtype}" for name, at in asked.items() if at.dtype not in FLOATS]:
        problems.append(f"{len(strange)} of a type that is none of {', '.join(FLOATS)}: {some(strange)}")
    if problems:
        where = f"{found.path}: not the tensors of the model in {CONFIG}"
        raise ConfigError(*(f"{where}: {problem}. Fetch both again." for problem in problems))
    return spelled


def read_params(found: Directory, names: Mapping[str, str], abstract: Tree) -> Tree:
    """The canonical parameters, in the dtypes and shardings of `abstract`."""
    rows = {row.ours: row for row in found.description.architecture.rows}

    def make(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        row = rows[jax.tree_util.keystr(path, simple=True, separator=".")]
        return filled(leaf, lambda part: read_part(found, names, row, leaf, part))

    return jax.tree_util.tree_map_with_path(make, abstract)


def filled(leaf: jax.ShapeDtypeStruct, read: Callable[[tuple[Span, ...]], np.ndarray]) -> jax.Array:
    """An array of this shape, dtype and sharding, of which `read` gives any part.

    Each part is read once, and one is on the host at a time: jax.make_array_from_callback would read a part once for
    each device that holds it, and keep all of them until the last is there."""
    holders: dict[tuple[Span, ...], list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        part = tuple(each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(part, []).append(device)
    shards = []
    for part, devices in holders.items():
        value = read(part)
        shards += [jax.device_put(value, device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def read_part(
    found: Directory, names: Mapping[str, str], row: Row, leaf: jax.ShapeDtypeStruct, part: tuple[Span, ...]
) -> np.ndarray:
    """This part of a leaf of ours, from the parts of their tensors in which it lies."""
    shape = leaf.shape[row.stacked :]

    def one(name: str, part: tuple[Span, ...]) -> np.ndarray:
        theirs = found.tensors.read(names[name], row.within(part, shape))
        ours = (theirs.T if row.transposed else theirs).astype(leaf.dtype)
        if not np.isfinite(ours).all():
            raise NonFiniteError(f"{found.path}: {names[name]} has values that are no {leaf.dtype} numbers.")
        return ours

    if not row.stacked:
        return one(row.theirs, part)
    (first, end), *rest = part
    out = np.empty([stop - start for start, stop in part], leaf.dtype)
    for layer in range(first, end):
        out[layer - first] = one(row.theirs.format(layer=layer), tuple(rest))
    return out


def zeros_like(params: Tree) -> Tree:
    make = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)  # noqa: E731
    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, params))()


# --- export -----------------------------------------------------------------------------------------------------------


def export_run(config: RunConfig, target: Path, dtype: str, most: int) -> dict[str, Any]:
    """Makes `target`, with a run's newest parameters in `dtype`, in files of at most `most` bytes.

    Raises ConfigError if `target` is taken or cannot be written, or the model is of no known architecture;
    CheckpointError if there is no checkpoint, or one of another model."""
    one_process("export")
    refuse_taken(target)
    architecture, said = convert.write_config(config.model, config.objective)
    _, params, step = restore_run(config)
    leaves = paths(params)
    tensors = convert.tensors(architecture, {path: leaf.shape for path, leaf in leaves.items()})
    kept = [
        path for name in (*VOCABULARY_FILES, *BESIDE) if (path := config.run.directory / TOKENIZER_DIR / name).is_file()
    ]
    before = config.run.directory / TOKENIZER_DIR / CONFIG  # of the model that this one began as
    carried = {key: value for key, value in read_json(before).items() if key in CARRIED} if before.exists() else {}
    with fresh(target) as place:
        planned = [Planned(tensor.name, tensor.shape, jnp.dtype(dtype)) for tensor in tensors]
        values = (gathered(tensor, leaves).astype(jnp.dtype(dtype)) for tensor in tensors)
        files = write(place, planned, values, most)
        write_json(place / CONFIG, said | carried | {"torch_dtype": dtype})
        for file in kept:
            shutil.copyfile(file, place / file.name)
    return {
        "directory": str(target),
        "architecture": architecture.kind,
        "step": step,
        "parameters": sum(leaf.size for leaf in leaves.values()),
        "files": [path.name for path in (*files, *kept)],
        "dtype": dtype,
    }


def gathered(tensor: Tensor, leaves: Mapping[str, jax.Array]) -> np.ndarray:
    """One of their tensors, whole, on the host."""
    layers = [whole(leaves[row.ours], tensor.layer) for row in tensor.rows]
    parts = [layer.T if row.transposed else layer for row, layer in zip(tensor.rows, layers, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def whole(leaf: jax.Array, layer: int | None) -> np.ndarray:
    """A leaf, or one layer of a leaf that holds all of them, from the devices that have parts of it."""
    out = np.empty(leaf.shape if layer is None else leaf.shape[1:], leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        if layer is None:
            out[shard.index] = np.asarray(shard.data)
            continue
        start, stop, _ = shard.index[0].indices(leaf.shape[0])
        if start <= layer < stop:
            one = jax.lax.dynamic_index_in_dim(shard.data, np.int32(layer - start), keepdims=False)
            out[shard.index[1:]] = np.asarray(one)
    return out


# --- in words ---------------------------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> str:
    """A result of either, for a person."""
    what = f"{result['architecture']} of {result['parameters']:,} parameters, step {result['step']}"
    lines = [f"{result['directory']}: {what}", f"files: {', '.join(result['files'])}"]
    if unread := result.get("unread"):
        lines.append(f"not read: {', '.join(unread)}")
    return "\n".join(lines)
