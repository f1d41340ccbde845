"""Files of a stage in OUT.partial, and its record, NAME.json, written last; without it, the files do not count.

A record is a line of JSON, [value, {suffix: [bytes, CRC-32]}] for the files beside it, and a line with its own CRC-32.
A later start verifies all of them before it reads any, and still trusts nothing: anyone can compute a CRC-32."""

import io
import json
import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.lib.format import open_memmap
from pydantic import Field, TypeAdapter, ValidationError

from spmd_lm import files
from spmd_lm.errors import DataError
from spmd_lm.runtime.outputs import writing

READ_BYTES = 2**20  # at a time
MAX_RECORD = 2**26  # bytes; a chunk's record has a few hundred for each file of lines in the chunk

Natural = Annotated[int, Field(ge=0, lt=2**63)]
StageValue = TypeVar("StageValue")


def write_stage(path: Path, value: Any, contents: Mapping[str, bytes | np.ndarray]) -> None:
    """path: without a suffix.
    value: JSON, but not None.
    contents: contents of the files by suffix."""
    listed = {}
    with writing(path):
        for suffix, content in contents.items():
            data = npy_bytes(content) if isinstance(content, np.ndarray) else content
            files.write_atomically(path.with_suffix(suffix), data)
            listed[suffix] = [len(data), zlib.crc32(data)]
        line = json.dumps([value, listed])
        files.write_atomically(path.with_suffix(".json"), f"{line}\n{zlib.crc32(line.encode())}\n")


def npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def read_stage(path: Path, kind: type[StageValue], suffixes: Collection[str] = ()) -> StageValue | None:
    """The value of a record, or None.  Raises DataError for files that differ from what was written.

    kind: type of the value.
    suffixes: suffixes of the files beside it."""
    record = path.with_suffix(".json")
    try:
        line, _, checksum = files.read_bytes(record, MAX_RECORD).partition(b"\n")
        if checksum != b"%d\n" % zlib.crc32(line):
            raise ValueError("its checksum is not that of what was written")
        schema: TypeAdapter[Any] = TypeAdapter(tuple[kind, dict[str, tuple[int, int]]])  # type: ignore[valid-type]
        value, listed = schema.validate_python(files.parse_json(line))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise damaged_stage(record, first_fault(error)) from None
    if listed.keys() != {*suffixes}:
        raise damaged_stage(record, f"it is of {', '.join(sorted(listed))[:80] or 'no files'}")
    for suffix, (size, found) in listed.items():
        check_file(path.with_suffix(suffix), size, found)
    return value


def first_fault(error: Exception) -> str:
    """The problem, in a line."""
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"[:200]
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"{error!s:.200}"


def open_array(path: Path, dtype: type[np.generic], *shape: int | None) -> np.ndarray:
    """A memory map of an array with these dimensions; None for any.  Raises DataError for another array."""
    try:
        os.close(files.open_regular(path))
        array = open_memmap(path, mode="r")
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise damaged_stage(path, f"{error!s:.200}") from None
    fits = len(array.shape) == len(shape) and all(s in (None, n) for n, s in zip(array.shape, shape, strict=True))
    if array.dtype != dtype or not fits:
        raise damaged_stage(path, f"it has {array.dtype} {list(array.shape)}")
    return array


def check_file(path: Path, size: int, checksum: int) -> None:
    found_checksum = 0
    try:
        with open(files.open_regular(path), "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            while found == size and (block := file.read(READ_BYTES)):
                found_checksum = zlib.crc32(block, found_checksum)
    except OSError as error:
        raise damaged_stage(path, f"cannot be read: {error.strerror}") from None
    if found != size:
        raise damaged_stage(path, f"it has {found:,} bytes instead of {size:,}")
    if found_checksum != checksum:
        raise damaged_stage(path, "its checksum is not that of what was written")


def damaged_stage(path: Path, what: str) -> DataError:  # path: below OUT.partial
    partial = next(each for each in path.parents if each.suffix == ".partial")
    advice = f"Remove {partial} and {partial.with_suffix('')}, and prepare again"
    return DataError(f"{path}: damaged: {what}. {advice}.")
