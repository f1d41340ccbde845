"""Token ids of shards in buckets: BLOCKs are fetched when they are first needed, and kept in a cache on disk.

A block is the least that has a checksum.  To a cold cache each row of shuffled samples is a block, so what counts is
how many requests are under way at once; larger ones would send more that no row of the batch needs."""

import functools
import hashlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from spmd_lm.addresses import user_cache
from spmd_lm.buckets.copies import Copies, reading
from spmd_lm.data.token_files.shard import BLOCK, Header, damaged, wrong_block, wrong_size

# Requests.  Answers after 50 ms: 17 rows/s with 1, 100 with 8, 138 with 16 and more, where two cores were busy
# (2026-12-01).  With 32 at once, units of 4 MiB gave 72 rows/s, of 1 MiB 113 (tests' server).
AT_ONCE = 32
CACHE_BYTES = 2**36  # 34 billion ids of 16 bits, if half of the disk's free space is as much


class BlockCache:
    """Blocks in files of one directory, at most `limit` bytes: those that were read last.

    Other processes may share it.  A file appears whole; each counts what it adds, and looks at all files after
    every 1/32 of the limit, so that eight of them keep it too."""

    def __init__(self, directory: Path, limit: int | None = None):
        self.directory, self._added, self._adding = directory, 0, threading.Lock()
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="blocks")
        with reading():
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            in_use = sum(size for _, size, _ in self._files())
            self.limit = limit or min(CACHE_BYTES, (shutil.disk_usage(directory).free + in_use) // 2)
            self._trim()

    def has(self, name: str) -> bool:
        return os.access(self.directory / name, os.R_OK)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """These bytes of a file, as far as it has them; b'' if it is gone."""
        with suppress(FileNotFoundError), open(self.directory / name, "rb", buffering=0) as file:
            os.utime(file.fileno())
            return os.pread(file.fileno(), stop - start, start)
        return b""

    def write(self, name: str, content: bytes) -> None:
        partial = self.directory / f"{name}.{os.getpid()}.tmp"
        with self._adding:
            self._added += len(content)
            if self._added > self.limit // 32:
                self._trim()
                self._added = len(content)
            try:
                partial.write_bytes(content)
                partial.replace(self.directory / name)
            except OSError as error:  # a disk that is full
                partial.unlink(missing_ok=True)
                raise OSError(error.errno, error.strerror, str(partial)) from error

    def _trim(self) -> None:
        found = sorted(self._files())
        excess = sum(size for _, size, _ in found) - self.limit * 3 // 4
        for _, size, path in found:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each was read last, its size, and its path."""
        found = []
        for entry in os.scandir(self.directory):
            with suppress(FileNotFoundError):  # another process has removed it
                stat = entry.stat()
                found.append((stat.st_mtime_ns, stat.st_size, Path(entry.path)))
        return found


@functools.cache
def _cache_in(directory: Path) -> BlockCache:
    """One for all data sets of the process, as they share its limit."""
    return BlockCache(directory)


class BucketTokens:
    """The ids of a shard, which are sliced like the array of those on disk.  Raises DataError for an object that is
    missing, of another size, replaced since it was listed, or damaged, whatever data.verify is."""

    def __init__(self, copies: Copies, path: Path, header: Header):
        """path: where the .bin would be, if it were copied; messages name its address."""
        self.path, name = path, path.relative_to(copies.path).as_posix()
        self._bucket, self._name, self._checksums = copies.bucket, name, header.block_crc32
        self.dtype = np.dtype(header.dtype).newbyteorder("<")
        self.size, self.itemsize = header.tokens, self.dtype.itemsize
        self.nbytes = self.size * self.itemsize
        if name not in copies.objects:
            raise damaged(self.path, "it is missing")
        found = copies.objects[name]
        if found.size != self.nbytes:
            raise wrong_size(self.path, found.size, self.nbytes)
        self._version = found.version
        key = json.dumps([copies.bucket.address, name, found.size, dict(found.version)])
        self._key = hashlib.sha256(key.encode()).hexdigest()[:32]
        self.cache = _cache_in(user_cache() / "blocks")
        self._checked = np.zeros(len(self._checksums), bool)  # blocks of the cache, by this process

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self.size)
        assert step == 1
        start, stop = start * self.itemsize, max(start, stop) * self.itemsize
        blocks = range(start // BLOCK, -(-stop // BLOCK))

        def read(block: int) -> bytes:
            return self._read(block, max(0, start - block * BLOCK), min(BLOCK, stop - block * BLOCK))

        parts = self.cache.pool.map(read, blocks) if len(blocks) > 2 else map(read, blocks)
        return np.frombuffer(b"".join(parts), self.dtype)

    def has(self, block: int) -> bool:
        return bool(self._checked[block]) and self.cache.has(f"{self._key}-{block}")

    def fetch(self, block: int) -> None:
        self._read(block, 0, 1)

    def _read(self, block: int, start: int, stop: int) -> bytes:
        """Bytes of a block, from the cache if it is there and undamaged."""
        name = f"{self._key}-{block}"
        with reading():
            if self._checked[block] and len(content := self.cache.read(name, start, stop)) == stop - start:
                return content
            content = self.cache.read(name, 0, BLOCK)
            if zlib.crc32(content) != self._checksums[block]:
                at, end = block * BLOCK, min((block + 1) * BLOCK, self.nbytes)
                content = self._bucket.read_range(self._name, at, end, self._version)
                if zlib.crc32(content) != self._checksums[block]:
                    raise wrong_block(self.path, block, end - at)
                self.cache.write(name, content)
        self._checked[block] = True
        return content[start:stop]


def fetch_blocks(blocks: Iterable[tuple[BucketTokens, int]]) -> None:
    """Brings those that the cache lacks into it, AT_ONCE at a time."""
    missing = [(tokens, block) for tokens, block in blocks if not tokens.has(block)]
    if missing:
        list(missing[0][0].cache.pool.map(lambda each: each[0].fetch(each[1]), missing))
