"""What a stage leaves in OUT.partial: files, and a record, NAME.json, written last: without it nothing is there.

A record is a line of JSON, [value, {suffix: [bytes, CRC-32]}] of the files beside it, and a line with its own CRC-32.
A later start compares all of them before it reads any."""

import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spmd_lm import files
from spmd_lm.errors import DataError
from spmd_lm.runtime.outputs import writing

READ_BYTES = 2**20  # at a time


def write_stage(path: Path, value: Any, contents: Mapping[str, bytes | np.ndarray]) -> None:
    """path: without a suffix.  value: what JSON can say, but not None.  contents: of the files, by their suffixes."""
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


def read_stage(path: Path) -> Any:
    """The value of a record; None if there is none.  Raises DataError for files that are not as they were written."""
    record = path.with_suffix(".json")
    try:
        line, _, checksum = record.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    if checksum != b"%d\n" % zlib.crc32(line):
        raise damaged_stage(record, "its checksum is not that of what was written")
    value, listed = json.loads(line)
    for suffix, (size, checksum) in listed.items():
        check_file(path.with_suffix(suffix), size, checksum)
    return value


def check_file(path: Path, size: int, checksum: int) -> None:
    found, found_checksum = 0, 0
    try:
        with open(files.open_regular(path), "rb", buffering=0) as file:
            while block := file.read(READ_BYTES):
                found, found_checksum = found + len(block), zlib.crc32(block, found_checksum)
    except OSError as error:
        raise damaged_stage(path, f"cannot be read: {error.strerror}") from None
    if found != size:
        raise damaged_stage(path, f"it has {found:,} bytes instead of {size:,}")
    if found_checksum != checksum:
        raise damaged_stage(path, "its checksum is not that of what was written")


def damaged_stage(path: Path, what: str) -> DataError:
    """path: below OUT.partial."""
    partial = next(each for each in path.parents if each.suffix == ".partial")
    advice = f"Remove {partial} and {partial.with_suffix('')}, and prepare again"
    return DataError(f"{path}: damaged: {what}. {advice}.")
