"""`spmd-lm import`: a Hugging Face directory to a run with a checkpoint at step 0.  `spmd-lm export`: a run's newest
checkpoint to a Hugging Face directory.

The host never holds a second copy of the model.  Import reads only the slices of a tensor that the layout's devices
hold, one at a time; export gathers one tensor at a time."""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.adapters import coding_of
from spmd_lm.checkpoints.new_run import write_new_run
from spmd_lm.checkpoints.restored import restore_run
from spmd_lm.config.adapters import CODED
from spmd_lm.config.layers import path_in_block
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.vocabulary import CONFIG_JSON
from spmd_lm.errors import ConfigError, NonFiniteError
from spmd_lm.huggingface.architectures import (
    OUTPUT_EMBEDDING,
    HFTensor,
    Index,
    Shape,
    TensorPart,
)
from spmd_lm.huggingface.config_json import build_config
from spmd_lm.huggingface.directory import ModelDirectory, copy_files, tokenizer_files
from spmd_lm.huggingface.hub import HubModel
from spmd_lm.huggingface.quantized import abstract, encode, matrix_shape, quantization_config
from spmd_lm.huggingface.safetensors_io import FLOAT_DTYPES, INDEX_FILE, read_json, write_json, write_tensors
from spmd_lm.huggingface.source_config import DTYPE_KEYS, restore_keys
from spmd_lm.ops.few_bits import CodedMatrix, FakeQuant
from spmd_lm.parallel.array_parts import local_bounds
from spmd_lm.parallel.trees import Tree, leaves_by_path
from spmd_lm.runtime.directories import atomic_directory, require_absent_or_empty
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.runtime.processes import require_single_process
from spmd_lm.step.program import Program

SOURCE_FILE = "source.json"  # in a run: its commit on the hub, and hashes of the files
ROWS = 4096  # rows of an embedding table compared at a time
STATE = "optimizer state"


def format_result(result: dict[str, Any]) -> str:
    """The result of an import or an export, as text."""
    model = f"{result['architecture']} of {result['parameters']:,} parameters, step {result['step']}"
    lines = [f"{result['directory']}: {model}", f"files: {', '.join(result['files'])}"]
    if source := result.get("source"):
        lines.append(f"source: {source['reference']}, commit {source['commit']} (hashes: {SOURCE_FILE})")
    for what in ("unread", "left_out"):
        if names := result.get(what):
            lines.append(f"{'not read' if what == 'unread' else 'left out'}: {', '.join(names)}")
    if warning := result.get("warning"):
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def import_hf(model_dir: ModelDirectory, config: RunConfig, hub_model: HubModel | None = None) -> dict[str, Any]:
    """Creates run.dir, with this model as its checkpoint at step 0.

    Raises ConfigError if run.dir is not empty or cannot be written, or if the tensors are not the model's;
    NonFiniteError for NaN or infinite weights."""
    require_single_process("import")
    with atomic_directory(config.run.directory) as run_dir:
        program = Program(config, trains=False)
        shapes = {path: leaf.shape for path, leaf in leaves_by_path(program.plan.shapes).items()}
        file_names = match_tensors(model_dir, shapes)
        params = read_params(model_dir, file_names, program.abstract_canonical().params)
        write_new_run(program, params, run_dir)
        (run_dir / TOKENIZER_DIR).mkdir()
        copy_files(model_dir.path, (CONFIG_JSON, *model_dir.tokenizer_files), run_dir / TOKENIZER_DIR)
        if hub_model:
            write_json(run_dir / SOURCE_FILE, hub_model.record)
    architecture = model_dir.config.architecture
    unused = architecture.unused_head_names(model_dir.reader.tensors, shapes)
    files = [*(path.name for path in model_dir.reader.files), *model_dir.tokenizer_files]
    beyond = abbreviate(map(repr, model_dir.tokens_beyond))
    read = {CONFIG_JSON, INDEX_FILE, *(name.partition("/")[0] for name in files)}
    others = sorted(name for name in os.listdir(model_dir.path) if name not in read and not name.startswith("."))
    return {
        "directory": str(config.run.directory),
        "source": hub_model.record if hub_model else None,
        "architecture": architecture.model_type,
        "step": 0,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "files": files,
        "unread": [
            *(*model_dir.config.unknown_keys, *sorted(unused)),
            *([f"tokens that the model lacks: {beyond}"] if beyond else []),
            *(hub_model.others if hub_model else others),
        ],
        "warning": other_head(model_dir, shapes, file_names),
    }


def other_head(model_dir: ModelDirectory, shapes: Mapping[str, Shape], file_names: Mapping[str, str]) -> str:
    """A warning if embeddings are tied but the files have a head that differs from the token table; '' otherwise."""
    tensor_of, stored = model_dir.config.architecture.tensor_of, model_dir.reader.tensors
    head, table = tensor_of(OUTPUT_EMBEDDING), file_names.get(tensor_of("embedding.tokens") or "")
    if OUTPUT_EMBEDDING in shapes or head not in stored or table is None:
        return ""
    what, names = f"{head} is not the token table", (head, table)
    rows, *others = (tuple(stored[name].get_shape()) for name in names)
    if others != [rows]:
        size = f", but {[*rows]}"
    else:
        differences = (
            np.abs(
                np.subtract(
                    *(
                        model_dir.reader.read(name, ((first, min(first + ROWS, rows[0])),)).astype(float)
                        for name in names
                    )
                )
            )
            for first in range(0, rows[0], ROWS)
        )
        largest = max((float(each.max(initial=0)) for each in differences), default=0.0)
        if largest == 0:
            return ""
        size = f": they differ by up to {largest:.3g}"
    advice = "To use it, set tie_word_embeddings to false there"
    return f"{what}{size}. {CONFIG_JSON} ties them, so the head is not used. {advice}."


def match_tensors(model_dir: ModelDirectory, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Maps each tensor of a model with these parameters to its name in the files.  Raises ConfigError for tensors that
    are missing, unexpected, of another shape, or not of a floating-point dtype."""
    architecture, stored = model_dir.config.architecture, model_dir.reader.tensors
    file_names: dict[str, str] = {}
    expected: dict[str, Shape] = {}
    for tensor in model_dir.config.tensors(shapes):
        spelling = next((name for name in architecture.spellings(tensor.name) if name in stored), tensor.name)
        file_names[tensor.name] = spelling
        expected[spelling] = tensor.shape
    ignored = architecture.buffer_names(stored, shapes) | architecture.unused_head_names(stored, shapes)
    found = {name: tuple(stored[name].get_shape()) for name in stored if name in expected or name not in ignored}
    misshapen = [
        f"{name} is {[*found[name]]}, not {[*shape]}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    dtypes = {name: stored[name].get_dtype() for name in found}
    names_by_problem = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": misshapen,
        f"of a dtype other than {', '.join(FLOAT_DTYPES.values())}": [
            f"{name} {dtype}" for name, dtype in dtypes.items() if dtype not in FLOAT_DTYPES.values()
        ],
    }
    counted = [f"{len(names)} {problem}: {abbreviate(names)}" for problem, names in names_by_problem.items() if names]
    if counted:
        where = f"{model_dir.path}: the tensors do not match {CONFIG_JSON}"
        raise ConfigError(*(f"{where}: {problem}. Download both again." for problem in counted))
    return file_names


def read_params(model_dir: ModelDirectory, file_names: Mapping[str, str], abstract: Tree) -> Tree:
    """Canonical parameters, in the dtypes and shardings of `abstract`."""
    leaves = leaves_by_path(abstract)
    stored: dict[str, dict[tuple[int, ...], tuple[HFTensor, TensorPart]]] = {}
    for tensor in model_dir.config.tensors({path: leaf.shape for path, leaf in leaves.items()}):
        for part in tensor.parts:
            stored.setdefault(part.param, {})[part.at] = tensor, part
    params = [read_param(model_dir, file_names, stored[path], leaf) for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), params)


def read_param(
    model_dir: ModelDirectory,
    file_names: Mapping[str, str],
    stored: Mapping[tuple[int, ...], tuple[HFTensor, TensorPart]],
    abstract: jax.ShapeDtypeStruct,
) -> jax.Array:
    """A parameter, from the slices of tensors that store it.  stored: location by index in the stack, by () without
    one."""

    def read_part(at: tuple[int, ...], index: Index) -> np.ndarray:
        tensor, part = stored[at]
        name = file_names[tensor.name]
        value = tensor.pick(part, index, model_dir.reader.read(name, tensor.index(part, index))).astype(abstract.dtype)
        if not np.isfinite(value).all():
            raise NonFiniteError(f"{model_dir.path}: {name} has values that are not finite in {abstract.dtype}.")
        return value

    def read_slice(index: Index) -> np.ndarray:
        if () in stored:
            return read_part((), index)
        stacked = len(next(iter(stored)))
        leading, within = index[:stacked], index[stacked:]
        value = np.empty([stop - start for start, stop in index], abstract.dtype)
        for at in itertools.product(*(range(*bounds) for bounds in leading)):
            value[tuple(i - start for i, (start, _) in zip(at, leading, strict=True))] = read_part(at, within)
        return value

    return make_sharded_array(abstract, read_slice)


def make_sharded_array(abstract: jax.ShapeDtypeStruct, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """An array of this shape, dtype and sharding, from a function that reads any slice of it.

    Each slice is read once, and one is on the host at a time.  jax.make_array_from_callback would read a slice once per
    device that holds it, and keep all slices until the last one is read."""
    devices_by_index: dict[Index, list[jax.Device]] = {}
    for device, index in local_bounds(abstract.shape, abstract.sharding).items():
        devices_by_index.setdefault(index, []).append(device)
    shards = []
    for index, devices in devices_by_index.items():
        value = read(index)
        shards += [jax.device_put(value, device) for device in devices]
    return jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, shards)


def export_hf(
    config: RunConfig, target: Path, dtype: str, max_shard_bytes: int, fallback: bool = False
) -> dict[str, Any]:
    """Creates `target`, with a run's newest parameters in `dtype`, rounded as precision.fake_quant says; matrices that
    precision.quantized has made codes stay codes.
    fallback: as for `restore_run`.  Raises ConfigError if `target` is not empty or cannot be written, or if no Hugging
    Face architecture matches the model, or no format its codes; CheckpointError if there is no checkpoint, or one of
    another model."""
    require_single_process("export")
    require_absent_or_empty(target)
    tokenizer_dir = config.run.directory / TOKENIZER_DIR
    imported = os.path.lexists(tokenizer_dir / CONFIG_JSON)
    source = read_json(tokenizer_dir / CONFIG_JSON) if imported else {}
    architecture, hf_config = build_config(config.model, config.objective, str(source.get("model_type")))
    coding = coding_of(config.adapter, config.precision)
    of_codes = {"quantization_config": quantization_config(coding, architecture, dtype)} if coding else {}
    program, params, step = restore_run(config, fallback)
    leaves = leaves_by_path(params)
    uncoded = leaves_by_path(dataclasses.replace(program.model, base=None).shapes)
    tensors = architecture.tensors({path: leaf.shape for path, leaf in uncoded.items()}, config.model.heads)
    hf_config = restore_keys(hf_config, source, config, step)
    hf_config |= dict.fromkeys(DTYPE_KEYS & source.keys() or {"torch_dtype"}, dtype) | of_codes
    copied = tokenizer_files(tokenizer_dir)
    with atomic_directory(target) as directory:
        shapes = {name: each for tensor in tensors for name, each in _abstract(tensor, leaves, program, dtype).items()}
        values = (value for tensor in tensors for value in _values(tensor, leaves, program, dtype))
        written = write_tensors(directory, shapes, values, max_shard_bytes)
        write_json(directory / CONFIG_JSON, hf_config)
        copy_files(tokenizer_dir, copied, directory)
    return {
        "directory": str(target),
        "architecture": architecture.model_type,
        "step": step,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "files": [*(path.name for path in written), *copied],
        "dtype": dtype,
        "left_out": [*(f"{CONFIG_JSON}: {key}" for key in sorted(source.keys() - hf_config.keys())), STATE],
    }


def cast(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """A tensor in `dtype`.  Raises NonFiniteError for values that overflow."""
    with np.errstate(over="ignore"):
        result = value.astype(dtype)
    if not np.isfinite(result).all():
        what = f"{name} has values up to {float(np.abs(value).max()):.3g}, which are not finite in {dtype}"
        raise NonFiniteError(f"{what}. Use --dtype bfloat16 or float32.")
    return result


def _abstract(
    tensor: HFTensor, params: Mapping[str, jax.Array], program: Program, dtype: str
) -> dict[str, jax.ShapeDtypeStruct]:
    """What is written of a tensor: itself, or what stores its codes."""
    param, coding = tensor.parts[0].param, program.model.base
    if param in params or coding is None:
        return {tensor.name: jax.ShapeDtypeStruct(tensor.shape, dtype)}
    shape = matrix_shape(tensor, program.model.matrices[path_in_block(param)])
    return abstract(tensor.name, shape, coding, dtype)


def _values(tensor: HFTensor, params: Mapping[str, jax.Array], program: Program, dtype: str) -> list[np.ndarray]:
    """The values of `_abstract`."""
    if tensor.parts[0].param in params:
        return [cast(tensor.name, gather_tensor(tensor, params, program), dtype)]
    return encode(tensor, [gather_codes(part, params, program) for part in tensor.parts], dtype)


def gather_tensor(tensor: HFTensor, params: Mapping[str, jax.Array], program: Program) -> np.ndarray:
    """A tensor on the host, concatenated from parameters, as they multiply."""
    return tensor.join(_as_multiplied(part, params, program) for part in tensor.parts)


def gather_codes(part: TensorPart, params: Mapping[str, jax.Array], program: Program) -> CodedMatrix:
    """A quantized matrix, from one device's arrays."""
    paths = {key: f"{part.param}.{key}" for key in CODED}
    stored = {key: jnp.asarray(gather_param(params[path], part.at)) for key, path in paths.items() if path in params}
    assert program.model.base, part
    return CodedMatrix(stored, program.model.base, "", program.model.matrices[path_in_block(part.param)])


def _as_multiplied(part: TensorPart, params: Mapping[str, jax.Array], program: Program) -> np.ndarray:
    """A parameter, decoded if it is codes, and rounded as a step rounds it if precision.fake_quant says so."""
    if part.param not in params:
        return np.asarray(gather_codes(part, params, program).entries)
    value = gather_param(params[part.param], part.at)
    kind, precision = program.model.fake_quant, program.config.precision
    if kind == "none" or not part.param.startswith("blocks."):
        return value
    transposed = program.model.matrices.get(path_in_block(part.param))
    if transposed is None:
        return value
    rounded = FakeQuant(kind, transposed)(jnp.asarray(value.astype(precision.compute)))
    return np.asarray(rounded).astype(value.dtype)


def gather_param(param: jax.Array, at: tuple[int, ...] = ()) -> np.ndarray:
    """A parameter, or the entry at an index in its stack, gathered on the host."""
    gathered = np.empty(param.shape[len(at) :], param.dtype)
    for shard in param.addressable_shards:
        if shard.replica_id:
            continue
        starts, stops, _ = zip(*map(slice.indices, shard.index, param.shape), strict=True)
        if all(start <= i < stop for i, start, stop in zip(at, starts, stops, strict=False)):
            gathered[shard.index[len(at) :]] = _entry(shard.data, at, starts)
    return gathered


def _entry(shard: jax.Array, at: tuple[int, ...], starts: Sequence[int]) -> np.ndarray:
    """The entry at an index in a stack, of which a device has the part from `starts` on; no more is copied."""
    if not at:
        return np.asarray(shard)
    begin = [np.int32(i - start) for i, start in zip((*at, *starts[len(at) :]), starts, strict=True)]
    return np.asarray(jax.lax.dynamic_slice(shard, begin, [1] * len(at) + [*shard.shape[len(at) :]]))[(0,) * len(at)]
