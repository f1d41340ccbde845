"""Safetensors files: slices of tensors are read by name, and tensors are written one at a time.

The safetensors library reads, and refuses a header that contradicts its file.  Its writer needs all tensors of a file
in memory at once, a second copy of the model, so `write_tensors` writes the format itself: the header's length in eight
little-endian bytes; the header, JSON with each tensor's dtype, shape and offsets; the tensors' bytes.  Pickles are
never opened: loading one runs the code in it."""

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.architectures import DimRange, Shape
from spmd_lm.huggingface.json_files import read_json, write_json
from spmd_lm.runtime.formatting import abbreviate

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}

FLOAT_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that weights may have, by the format's names."""

DTYPE_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}

# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    data: Any  # the library's PySafeSlice: an index into it reads that part
    dtype: str
    shape: Shape


class SafetensorsReader:
    """All tensors of a model's directory: of the files that model.safetensors.index.json lists, or of the only
    .safetensors file.

    Raises ConfigError, one line per problem, if files are missing, damaged, or pickles."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        self.files: list[Path] = []
        files = self._read_index() if (directory / INDEX_FILE).exists() else {self._find_single_file(): []}
        problems: list[str] = []
        for path, names in files.items():
            try:
                self._open(path, names)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)

    def read(self, name: str, index: Sequence[DimRange]) -> np.ndarray:
        """A slice of a tensor, in the file's dtype; nothing else is read."""
        try:
            return self.tensors[name].data[tuple(slice(*bounds) for bounds in index)]
        except Exception as error:  # the library raises a class of its own, derived from Exception alone
            reason = _first_line(error)
            raise ConfigError(f"{self.directory}: {name} cannot be read: {reason}. Download it again.") from error

    def _read_index(self) -> dict[Path, list[str]]:
        """The files that the index lists, each with the names of its tensors."""
        index = self.directory / INDEX_FILE
        weight_map = read_json(index).get("weight_map")
        valid = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
        if not valid or not weight_map:
            raise ConfigError(f"{index}: weight_map: expected a file name for each tensor. Download it again.")
        files: dict[str, list[str]] = {}
        for tensor, file in weight_map.items():
            files.setdefault(file, []).append(tensor)
        if invalid := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
            raise ConfigError(
                f"{index}: {abbreviate(map(repr, invalid))}: expected .safetensors files in the same directory. "
                f"Download the index again."
            )
        if missing := [file for file in files if not (self.directory / file).is_file()]:
            raise ConfigError(f"{index} lists {abbreviate(missing)}, not found. Download the missing files.")
        return {self.directory / file: tensors for file, tensors in files.items()}

    def _find_single_file(self) -> Path:
        """The only file of a model without an index."""
        files = sorted(self.directory.glob("*.safetensors"))
        if self.directory / SINGLE_FILE in files:
            return self.directory / SINGLE_FILE
        if len(files) == 1:
            return files[0]
        if files:
            raise ConfigError(
                f"{self.directory} has {len(files)} .safetensors files, {abbreviate(path.name for path in files)}, and "
                f"no {INDEX_FILE} that lists the model's. Download the index too, or leave one file."
            )
        pickles = sorted(path.name for path in self.directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise ConfigError(
                f"{self.directory} has its weights only as pickles ({abbreviate(pickles)}). Loading a pickle runs the "
                f"code in it, so pickles are not read. If you trust them, load them with their own library and save "
                f"them again: model.save_pretrained(DIR, safe_serialization=True)."
            )
        raise ConfigError(f"{self.directory} has no weights: no {SINGLE_FILE}. Give a directory with one.")

    def _open(self, path: Path, listed: Sequence[str]) -> None:
        """Adds the tensors of a file.  listed: those that the index says are in it."""
        from safetensors import safe_open

        tensors: dict[str, StoredTensor] = {}
        try:
            file = safe_open(path, framework="np")
            for name in file.offset_keys():
                data = file.get_slice(name)
                tensors[name] = StoredTensor(data, data.get_dtype(), tuple(data.get_shape()))
        except Exception as error:  # as in `read`
            reason = _first_line(error)
            raise ConfigError(f"{path}: damaged, or not safetensors: {reason}. Download it again.") from error
        if missing := [name for name in listed if name not in tensors]:
            raise ConfigError(f"{path}: without {abbreviate(missing)}, which {INDEX_FILE} lists. Download both again.")
        if duplicates := [name for name in tensors if name in self.tensors]:
            raise ConfigError(f"{path}: {abbreviate(duplicates)}: also in another file. Download the files again.")
        self.files.append(path)
        self.tensors |= tensors


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    shape: Shape
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    directory: Path, specs: Sequence[TensorSpec], values: Iterator[np.ndarray], max_shard_bytes: int
) -> list[Path]:
    """Writes model.safetensors; or, if that would exceed `max_shard_bytes`, several files and an index.

    values: in the order of `specs`; one is in memory at a time.  A file exceeds the limit only if one tensor does."""
    shards: list[list[TensorSpec]] = [[]]
    available = max_shard_bytes
    for spec in specs:
        if shards[-1] and spec.num_bytes > available:
            shards.append([])
            available = max_shard_bytes
        shards[-1].append(spec)
        available -= spec.num_bytes
    n = len(shards)
    files = [SINGLE_FILE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    weight_map: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        _write_file(directory / file, shard, values)
        weight_map |= {spec.name: file for spec in shard}
    if n > 1:
        total_size = sum(spec.num_bytes for spec in specs)
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
        files.append(INDEX_FILE)
    return [directory / file for file in files]


def _write_file(path: Path, specs: Sequence[TensorSpec], values: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # readers want the framework of the names and shapes
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns tensors to eight bytes
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec in specs:
            value = next(values)
            assert (value.shape, value.dtype) == (spec.shape, spec.dtype), (spec, value.shape, value.dtype)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
