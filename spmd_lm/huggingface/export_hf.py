"""`spmd-lm export`: a run's newest checkpoint to a Hugging Face directory.

One tensor is gathered at a time: the host never has a second copy of the model."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.checkpoints.checkpointer import leaves_by_path
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.config.schema import RunConfig
from spmd_lm.evaluation.evaluate import restore_run
from spmd_lm.huggingface.architectures import SPECIAL_TOKEN_KEYS
from spmd_lm.huggingface.common import require_single_process
from spmd_lm.huggingface.config_json import build_config
from spmd_lm.huggingface.directory import CONFIG_FILE, tokenizer_files
from spmd_lm.huggingface.json_files import read_json, write_json
from spmd_lm.huggingface.safetensors_io import TensorSpec, write_tensors
from spmd_lm.huggingface.weights import HFTensor, hf_tensors
from spmd_lm.runtime.directories import atomic_directory, require_absent_or_empty


def export_hf(config: RunConfig, target: Path, dtype: str, max_shard_bytes: int) -> dict[str, Any]:
    """Creates `target`, with a run's newest parameters in `dtype`.

    Raises ConfigError if `target` is not empty or cannot be written, or if no Hugging Face architecture matches the
    model; CheckpointError if there is no checkpoint, or one of another model."""
    require_single_process("export")
    require_absent_or_empty(target)
    architecture, hf_config = build_config(config.model, config.objective)
    _, params, step = restore_run(config)
    leaves = leaves_by_path(params)
    tensors = hf_tensors(architecture, {path: leaf.shape for path, leaf in leaves.items()})
    tokenizer_dir = config.run.directory / TOKENIZER_DIR
    if (tokenizer_dir / CONFIG_FILE).exists():  # the run was imported
        source = read_json(tokenizer_dir / CONFIG_FILE)
        hf_config |= {key: value for key, value in source.items() if key in SPECIAL_TOKEN_KEYS}
    copied = tokenizer_files(tokenizer_dir)
    with atomic_directory(target) as directory:
        specs = [TensorSpec(tensor.name, tensor.shape, jnp.dtype(dtype)) for tensor in tensors]
        values = (gather_tensor(tensor, leaves).astype(jnp.dtype(dtype)) for tensor in tensors)
        written = write_tensors(directory, specs, values, max_shard_bytes)
        write_json(directory / CONFIG_FILE, hf_config | {"torch_dtype": dtype})
        for file in copied:
            shutil.copyfile(file, directory / file.name)
    return {
        "directory": str(target),
        "architecture": architecture.model_type,
        "step": step,
        "parameters": sum(leaf.size for leaf in leaves.values()),
        "files": [path.name for path in (*written, *copied)],
        "dtype": dtype,
    }


def gather_tensor(tensor: HFTensor, params: Mapping[str, jax.Array]) -> np.ndarray:
    """A tensor on the host, from the parameters that it concatenates."""
    values = []
    for mapping in tensor.mappings:
        value = gather_param(params[mapping.param], tensor.layer)
        values.append(value.T if mapping.transposed else value)
    return values[0] if len(values) == 1 else np.concatenate(values, axis=-1)


def gather_param(param: jax.Array, layer: int | None) -> np.ndarray:
    """A parameter, or one layer of a stacked one, on the host, from its shards on all devices."""
    gathered = np.empty(param.shape if layer is None else param.shape[1:], param.dtype)
    for shard in param.addressable_shards:
        if shard.replica_id:
            continue
        if layer is None:
            gathered[shard.index] = np.asarray(shard.data)
            continue
        start, stop, _ = shard.index[0].indices(param.shape[0])
        if start <= layer < stop:
            value = jax.lax.dynamic_index_in_dim(shard.data, np.int32(layer - start), keepdims=False)
            gathered[shard.index[1:]] = np.asarray(value)
    return gathered
