"""Reads slices of tensors in safetensors files by name, and writes tensors one at a time.

The safetensors library does the reading, and refuses a header that contradicts the file.  Its writer holds all tensors
of a file in memory, so `write_tensors` writes the format itself.  Pickles are never opened: loading one runs the code
in it."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_lm.errors import ConfigError
from spmd_lm.files import MAX_MODEL_FILE, open_regular, parse_json, read_bytes, require_inside, safetensors_header
from spmd_lm.huggingface.architectures import Index
from spmd_lm.runtime.formatting import abbreviate

if TYPE_CHECKING:
    import jax

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}

# Supported dtypes of weights: numpy's name to safetensors'.
FLOAT_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
DTYPES = FLOAT_DTYPES | {"uint8": "U8", "int32": "I32", "int64": "I64"}
"""The same of all that is written."""

MAX_HEADER_BYTES = 2**24  # 100,000 tensors take 10 MB


def read_file(path: Path) -> bytes:
    """Bytes of a file in a model's directory.  Raises ConfigError if it is unreadable, too large, or a link out of the
    directory."""
    try:
        require_inside(path)
        return read_bytes(path, MAX_MODEL_FILE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises ConfigError for anything else."""
    text = read_file(path)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object, got {value!r:.40}. Download it again.")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


class SafetensorsReader:
    """Tensors of a model's directory: in the file `name`; else in those of its index; else in model.safetensors or the
    only .safetensors file.
    tensors: lazy slices by name.  get_dtype() and get_shape() read no data; indexing reads a part.
    Raises ConfigError, one line per problem, if files are missing, damaged, or pickles."""

    def __init__(self, directory: Path, name: str = ""):
        self.directory = directory
        self.tensors: dict[str, Any] = {}
        self.files: list[Path] = []
        files = {directory / name: list[str]()} if name else self._find_files()
        problems = [problem for path, listed in files.items() if (problem := self._open(path, listed))]
        if problems:
            raise ConfigError(*problems)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads only this slice of a tensor, in the file's dtype."""
        try:
            return self.tensors[name][tuple(slice(*bounds) for bounds in index)]
        except Exception as error:  # the library raises a class of its own, derived from Exception alone
            reason = _first_line(error)
            raise ConfigError(f"{self.directory}: {name} cannot be read: {reason}. Download it again.") from error

    def _find_files(self) -> dict[Path, list[str]]:
        """A model's files, each with the tensors that an index lists for it."""
        if os.path.lexists(self.directory / INDEX_FILE):
            return self._read_index()
        return {self.directory / find_single_file(self.directory, os.listdir(self.directory)): []}

    def _read_index(self) -> dict[Path, list[str]]:
        """The files in the index, each with the names of its tensors."""
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
        if missing := [file for file in files if not os.path.lexists(self.directory / file)]:
            raise ConfigError(f"{index} lists {abbreviate(missing)}, not found. Download the missing files.")
        return {self.directory / file: tensors for file, tensors in files.items()}

    def _open(self, path: Path, listed: Sequence[str]) -> str | None:
        """Adds a file's tensors; returns its problem, if any.  listed: names that the index expects."""
        from safetensors import safe_open

        try:
            require_inside(path)
            with open(path, "rb", opener=open_regular) as opened:  # the library would block on a pipe
                length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            file = safe_open(path, framework="np")
            tensors = {name: file.get_slice(name) for name in file.offset_keys()}
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror or error}."
        except Exception as error:  # as in `read`
            return f"{path}: damaged, or not safetensors: {_first_line(error)}. Download it again."
        if missing := [name for name in listed if name not in tensors]:
            return f"{path}: without {abbreviate(missing)}, which {INDEX_FILE} lists. Download both again."
        if duplicates := [name for name in tensors if name in self.tensors]:
            return f"{path}: {abbreviate(duplicates)}: also in another file. Download the files again."
        self.files.append(path)
        self.tensors |= tensors
        return None


def find_single_file(where: Path | str, names: Iterable[str]) -> str:
    """The weight file of a model without an index: model.safetensors, else the only one.  Raises ConfigError, naming
    `where`, otherwise."""
    top = sorted(name for name in names if "/" not in name)
    files = [name for name in top if name.endswith(".safetensors")]
    if SINGLE_FILE in files:
        return SINGLE_FILE
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(
            f"{where} has {len(files)} .safetensors files, {abbreviate(files)}, and no {INDEX_FILE} that lists the "
            f"model's. Download the index too, or leave one file."
        )
    if pickles := [name for name in top if Path(name).suffix in PICKLE_SUFFIXES]:
        raise ConfigError(
            f"{where} has its weights only as pickles ({abbreviate(pickles)}). Loading a pickle runs the code in it, "
            f"so pickles are not read. If you trust them, load them with their own library and save them again: "
            f"model.save_pretrained(DIR, safe_serialization=True)."
        )
    raise ConfigError(f"{where} has no weights: no {SINGLE_FILE}. Give a directory with one.")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def write_tensors(
    directory: Path,
    tensors: "Mapping[str, np.ndarray | jax.ShapeDtypeStruct]",
    values: Iterator[np.ndarray],
    max_shard_bytes: int,
    single_file: str = SINGLE_FILE,
) -> list[Path]:
    """Writes `single_file`, or an index and shards of at most `max_shard_bytes` or one larger tensor; returns paths.
    tensors: of which only shapes and dtypes are read.  values: in their order, one in memory at a time."""
    headers: list[dict[str, Any]] = [{}]
    end = total_size = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if headers[-1] and end + size > max_shard_bytes:
            headers.append({})
            end = 0
        offsets = [end, end + size]
        dtype = DTYPES[tensor.dtype.name]
        headers[-1][name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        end += size
        total_size += size
    n = len(headers)
    files = [single_file] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    for file, header in zip(files, headers, strict=True):
        _write_file(directory / file, header, values)
    if n > 1:
        weight_map = {name: file for file, header in zip(files, headers, strict=True) for name in header}
        write_json(directory / INDEX_FILE, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
        files.append(INDEX_FILE)
    return [directory / file for file in files]


def _write_file(path: Path, header: dict[str, Any], values: Iterator[np.ndarray]) -> None:
    metadata = {"__metadata__": {"format": "pt"}}  # readers require the framework of the names and shapes
    with open(path, "wb") as file:
        file.write(safetensors_header(metadata | header))
        for name, entry in header.items():
            value = next(values)
            stored = [DTYPES[value.dtype.name], [*value.shape]]
            assert stored == [entry["dtype"], entry["shape"]], (name, entry, stored)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
