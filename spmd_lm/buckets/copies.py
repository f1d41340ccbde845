"""Small files of a data set in a bucket, copied to a directory of the user's cache, where they are read as files."""

import fcntl
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm import files
from spmd_lm.addresses import user_cache
from spmd_lm.buckets.bucket import Bucket, Found
from spmd_lm.errors import DataError

INDEX, LOCK = ".copied", ".lock"  # the first lists size, version and CRC-32 of each copy
MAX_INDEX = 2**28  # bytes
AT_ONCE = 32  # files


class Copies(NamedTuple):
    bucket: Bucket
    path: Path
    objects: dict[str, Found]  # all that the bucket has there, copied or not


def directory_of(address: str) -> Path:
    scheme, _, key = address.partition("://")
    return user_cache() / "data" / scheme / key


def origin_of(path: Path) -> str:
    """What people know this file by: the address that it is a copy from, or else its path."""
    with suppress(ValueError):
        scheme, *key = path.absolute().relative_to(directory_of("").absolute()).parts
        return f"{scheme}://{'/'.join(key)}"
    return str(path)


def copy_small_files(address: str, under: str = "") -> Copies:
    """Makes the address's directory hold the .json, .idx and tokenizer/ files that the bucket has now, or those below
    a name; what was copied before and is unchanged on both sides stays.  Raises DataError if that fails."""
    bucket, path = Bucket(address), directory_of(address)
    with reading():
        objects = bucket.objects(under)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path / LOCK):
            index = _read_index(path / INDEX)
            wanted = {
                name: [found.size, dict(found.version)] for name, found in objects.items() if _is_copied(name, found)
            }
            below = f"{under}/" if under else ""
            for name in [name for name in index if name.startswith(below) and name not in wanted]:
                (path / name).unlink(missing_ok=True)
                del index[name]

            def update(name: str) -> None:
                *known, checksum = index.get(name, [None])
                if known != wanted[name] or _checksum(path / name) != checksum:
                    _copy(copies, name)
                    index[name] = [*wanted[name], _checksum(path / name)]

            copies = Copies(bucket, path, objects)
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="copies") as pool:
                list(pool.map(update, wanted))
            files.write_atomically(path / INDEX, json.dumps(index))
    return copies


def _is_copied(name: str, found: Found) -> bool:
    parts = name.split("/")
    if {"", ".", ".."}.intersection(parts) or "\0" in name:  # it would lead out of the directory
        return False
    is_small = found.size <= files.MAX_MODEL_FILE  # what is larger is not read
    return name.endswith(".idx") or (is_small and (name.endswith(".json") or parts[0] == "tokenizer"))


def _copy(copies: Copies, name: str) -> None:
    path = copies.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.unlink(missing_ok=True)
    copies.bucket.download(name, partial, copies.objects[name].version)
    partial.replace(path)


def _read_index(path: Path) -> dict[str, list[Any]]:
    with suppress(OSError, ValueError):
        index = json.loads(files.read_bytes(path, MAX_INDEX))
        if isinstance(index, dict):
            return index
    return {}


def _checksum(path: Path) -> int | None:
    """CRC-32 of a file; None if there is none."""
    checksum = 0
    try:
        with open(path, "rb", opener=files.open_regular) as file:
            while part := file.read(2**20):
                checksum = zlib.crc32(part, checksum)
    except FileNotFoundError:
        return None
    return checksum


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the other processes of this machine in this block."""
    with open(path, "a", opener=files.open_regular) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def reading() -> Iterator[None]:
    """Raises DataError for what a bucket, or the cache, does not give."""
    try:
        yield
    except FileExistsError as error:
        raise DataError(
            f"{error.filename}: it was replaced while it was read. Start again, once nobody writes there."
        ) from error
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}. Mend that, and start again.") from error
