"""Tensors in safetensors files: read a part at a time, by name, and written one at a time.

The format: eight bytes of header length, little-endian; a JSON header, name -> dtype, shape and where its bytes are;
the bytes.  Reading goes through the `safetensors` library, which refuses a header that lies; it writes only what is
whole in memory, hence a writer of our own.  No pickle is ever opened: loading one runs the code in it."""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spmd_lm.errors import ConfigError

INDEX = "model.safetensors.index.json"
ALONE = "model.safetensors"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}

FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What the format calls the types that weights have."""

NAMES = {dtype: name for name, dtype in FLOATS.items()}

SHOWN = 8


def some(names: Iterable[str]) -> str:
    """The first few of these, and how many more there are."""
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  ConfigError if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise ConfigError(f"{path}: not JSON: nested too deep. Fetch it again.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object, got {value!r:.40}. Fetch it again.")
    return value


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, not read yet."""

    file: Any  # safetensors.safe_open
    dtype: str
    shape: tuple[int, ...]


class Tensors:
    """The tensors of all model files of a directory: model.safetensors.index.json and the files that it names, or the
    one .safetensors file.

    Raises ConfigError, a line for each problem, for files that are absent, damaged, or pickles."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.stored: dict[str, Stored] = {}
        self.files: list[Path] = []
        told = self._index() if (directory / INDEX).exists() else dict.fromkeys([self._alone()], ())
        problems: list[str] = []
        for path, names in told.items():
            try:
                self._open(path, names)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)

    def read(self, name: str, index: Sequence[tuple[int, int]]) -> np.ndarray:
        """The part [start, stop) of each dimension of a tensor, in its own dtype; no more of the file is read."""
        stored = self.stored[name]
        try:
            return stored.file.get_slice(name)[tuple(slice(*span) for span in index)]
        except Exception as error:  # the library has one class of its own for all that it finds
            raise ConfigError(f"{self.directory}: {name} cannot be read: {_reason(error)}. Fetch it again.") from error

    def _index(self) -> dict[Path, tuple[str, ...]]:
        """The files that the index names, each with the tensors that are said to be in it."""
        where = self.directory / INDEX
        files = read_json(where).get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise ConfigError(f"{where}: weight_map: expected the name of a file for each tensor. Fetch it again.")
        names: dict[str, list[str]] = {}
        for tensor, file in files.items():
            names.setdefault(file, []).append(tensor)
        if foreign := [file for file in names if Path(file).name != file or not file.endswith(".safetensors")]:
            raise ConfigError(
                f"{where}: {some(map(repr, foreign))}: expected names of .safetensors files beside the index."
            )
        if absent := [file for file in names if not (self.directory / file).is_file()]:
            raise ConfigError(f"{where} names {some(absent)}, not there. Fetch what is missing.")
        return {self.directory / file: tuple(tensors) for file, tensors in names.items()}

    def _alone(self) -> Path:
        """The one file of a model without an index."""
        found = sorted(self.directory.glob("*.safetensors"))
        if self.directory / ALONE in found:
            return self.directory / ALONE
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(
                f"{self.directory} has {len(found)} .safetensors files, {some(path.name for path in found)}, and no "
                f"{INDEX} to say which are the model's. Fetch it too, or leave one file."
            )
        pickles = sorted(path.name for path in self.directory.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise ConfigError(
                f"{self.directory} has its weights as pickles alone ({some(pickles)}), which run code when they are "
                f"loaded, so they are not. Where you trust them, load them with their own library and save them again: "
                f"model.save_pretrained(DIR, safe_serialization=True)."
            )
        raise ConfigError(f"{self.directory} has no weights: no {ALONE}. Give a directory with one.")

    def _open(self, path: Path, told: Sequence[str]) -> None:
        from safetensors import safe_open

        try:
            file = safe_open(path, framework="np")
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            stored = {name: Stored(file, at.get_dtype(), tuple(at.get_shape())) for name, at in found.items()}
        except Exception as error:  # as above
            raise ConfigError(f"{path}: damaged, or no safetensors: {_reason(error)}. Fetch it again.") from error
        if absent := [name for name in told if name not in stored]:
            raise ConfigError(f"{path}: without {some(absent)}, which {INDEX} says are in it. Fetch both again.")
        if twice := [name for name in stored if name in self.stored]:
            raise ConfigError(f"{path}: {some(twice)} are in another file too. Fetch them again.")
        self.files.append(path)
        self.stored |= stored


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(directory: Path, tensors: Sequence[Planned], values: Iterator[np.ndarray], most: int) -> list[Path]:
    """Writes these tensors, whose values come in the same order, to model.safetensors; or where their bytes are more
    than `most`, to several files of no more than that, unless one tensor is, and an index.

    One tensor is in memory at a time."""
    files: list[list[Planned]] = [[]]
    room = most
    for tensor in tensors:
        if files[-1] and tensor.bytes > room:
            files.append([])
            room = most
        files[-1].append(tensor)
        room -= tensor.bytes
    n = len(files)
    names = [ALONE] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    for name, group in zip(names, files, strict=True):
        _write_file(directory / name, group, values)
    if n > 1:
        weights = {tensor.name: name for name, group in zip(names, files, strict=True) for tensor in group}
        index = {"metadata": {"total_size": sum(tensor.bytes for tensor in tensors)}, "weight_map": weights}
        write_json(directory / INDEX, index)
        names.append(INDEX)
    return [directory / name for name in names]


def _write_file(path: Path, tensors: Sequence[Planned], values: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # whose names and shapes these are; readers ask for it
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin on a multiple of eight bytes
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            value = next(values)
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), (tensor, value.shape, value.dtype)
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
