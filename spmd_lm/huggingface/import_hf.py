"""`spmd-lm import`: a Hugging Face directory to a run with a checkpoint at step 0.

Of each tensor, only the slices that the layout's devices hold are read, one at a time: the host never has a second copy
of the model."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import jax
import numpy as np

from spmd_lm.checkpoints.checkpointer import Checkpointer, leaves_by_path, make_meta
from spmd_lm.config.load import TOKENIZER_DIR, dump
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, NonFiniteError
from spmd_lm.huggingface.architectures import DimRange, Shape, WeightMapping
from spmd_lm.huggingface.common import require_single_process
from spmd_lm.huggingface.directory import CONFIG_FILE, ModelDirectory
from spmd_lm.huggingface.safetensors_io import FLOAT_DTYPES
from spmd_lm.huggingface.weights import buffer_names, hf_tensors, shape_mismatches, unused_head_names
from spmd_lm.parallel.plan import Tree
from spmd_lm.runtime.directories import atomic_directory
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.step.program import Program


def import_hf(model_dir: ModelDirectory, config: RunConfig) -> dict[str, Any]:
    """Creates run.dir, with this model as its checkpoint at step 0.

    Raises ConfigError if run.dir is not empty or cannot be written, or if the tensors are not the model's;
    NonFiniteError for NaN or infinite weights."""
    require_single_process("import")
    with atomic_directory(config.run.directory) as run_dir:
        program = Program(config)
        shapes = param_shapes(program)
        file_names = match_tensors(model_dir, shapes)
        params = read_params(model_dir, file_names, program.abstract_canonical().params)
        state = program.initial_canonical(params)
        meta = make_meta(config.model_dump(by_alias=True), num_samples=0, fingerprint="")
        keep = config.checkpoint.keep
        with closing(Checkpointer(run_dir / "checkpoints", keep, asynchronous=False)) as checkpointer:
            checkpointer.save(0, state, meta)
        (run_dir / TOKENIZER_DIR).mkdir()
        for file in (model_dir.path / CONFIG_FILE, *model_dir.tokenizer_files):
            shutil.copyfile(file, run_dir / TOKENIZER_DIR / file.name)
        (run_dir / "config.yaml").write_text(dump(config), "utf-8")
    architecture = model_dir.config.architecture
    unused = unused_head_names(architecture, model_dir.reader.tensors, shapes)
    return {
        "directory": str(config.run.directory),
        "architecture": architecture.model_type,
        "step": 0,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "files": [path.name for path in (*model_dir.reader.files, *model_dir.tokenizer_files)],
        "unread": [*model_dir.config.unknown_keys, *sorted(unused)],
    }


def param_shapes(program: Program) -> dict[str, Shape]:
    """The canonical shapes of a program's parameters, by path."""
    return {path: leaf.shape for path, leaf in leaves_by_path(program.plan.shapes).items()}


def match_tensors(model_dir: ModelDirectory, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """The name in the files of each tensor of a model with these parameters.

    Raises ConfigError for tensors that are missing, unexpected, of another shape, or not of a floating-point dtype."""
    architecture, stored = model_dir.config.architecture, model_dir.reader.tensors
    file_names: dict[str, str] = {}
    expected: dict[str, Shape] = {}
    for tensor in hf_tensors(architecture, shapes):
        spellings = [name for name in architecture.spellings(tensor.name) if name in stored]
        file_names[tensor.name] = spellings[0] if spellings else tensor.name
        expected[file_names[tensor.name]] = tensor.shape
    ignored = buffer_names(architecture, stored, shapes) | unused_head_names(architecture, stored, shapes)
    found = {name: tensor for name, tensor in stored.items() if name in expected or name not in ignored}
    problems = shape_mismatches(expected, {name: tensor.shape for name, tensor in found.items()})
    if others := [f"{name} {tensor.dtype}" for name, tensor in found.items() if tensor.dtype not in FLOAT_DTYPES]:
        problems.append(f"{len(others)} of a dtype other than {', '.join(FLOAT_DTYPES)}: {abbreviate(others)}")
    if problems:
        where = f"{model_dir.path}: the tensors do not match {CONFIG_FILE}"
        raise ConfigError(*(f"{where}: {problem}. Download both again." for problem in problems))
    return file_names


def read_params(model_dir: ModelDirectory, file_names: Mapping[str, str], abstract: Tree) -> Tree:
    """The canonical parameters, in the dtypes and shardings of `abstract`."""
    mappings = {mapping.param: mapping for mapping in model_dir.config.architecture.weights}

    def read_param(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mapping = mappings[jax.tree_util.keystr(path, simple=True, separator=".")]
        return make_sharded_array(leaf, lambda index: read_slice(model_dir, file_names, mapping, leaf, index))

    return jax.tree_util.tree_map_with_path(read_param, abstract)


def make_sharded_array(abstract: jax.ShapeDtypeStruct, read: Callable[[tuple[DimRange, ...]], np.ndarray]) -> jax.Array:
    """An array of this shape, dtype and sharding, from a function that reads any slice of it.

    Each slice is read once, and one is on the host at a time.  jax.make_array_from_callback would read a slice once per
    device that holds it, and keep all slices until the last one is read."""
    devices_by_index: dict[tuple[DimRange, ...], list[jax.Device]] = {}
    for device, slices in abstract.sharding.addressable_devices_indices_map(abstract.shape).items():
        index = tuple(each.indices(size)[:2] for each, size in zip(slices, abstract.shape, strict=True))
        devices_by_index.setdefault(index, []).append(device)
    shards = []
    for index, devices in devices_by_index.items():
        value = read(index)
        shards += [jax.device_put(value, device) for device in devices]
    return jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, shards)


def read_slice(
    model_dir: ModelDirectory,
    file_names: Mapping[str, str],
    mapping: WeightMapping,
    abstract: jax.ShapeDtypeStruct,
    index: tuple[DimRange, ...],
) -> np.ndarray:
    """A slice of a parameter, from the slices of tensors that store it."""
    layer_shape = mapping.layer_shape(abstract.shape)

    def read_tensor(tensor: str, index: tuple[DimRange, ...]) -> np.ndarray:
        name = file_names[tensor]
        stored = model_dir.reader.read(name, mapping.tensor_index(index, layer_shape))
        value = (stored.T if mapping.transposed else stored).astype(abstract.dtype)
        if not np.isfinite(value).all():
            raise NonFiniteError(f"{model_dir.path}: {name} has values that are not finite in {abstract.dtype}.")
        return value

    if not mapping.stacked:
        return read_tensor(mapping.tensor, index)
    (first, end), *layer_index = index
    layers = np.empty([stop - start for start, stop in index], abstract.dtype)
    for layer in range(first, end):
        layers[layer - first] = read_tensor(mapping.tensor.format(layer=layer), tuple(layer_index))
    return layers
