"""Reads a file's documents one at a time, in bounded memory; decompresses and hashes the file meanwhile."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from spmd_lm.errors import ConfigError

BUFFER = 2**20
ZSTD_INPUT = 2**10  # bytes at a time, which decompress to at most 32 MiB
MAX_WINDOW = 2**27  # bytes of a .zst file's window; the default limit of the zstd command

try:
    from zstandard import ZstdError
except ImportError:

    class ZstdError(Exception):  # type: ignore[no-redef]
        """Stands in for zstandard's; never raised."""


DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, ZstdError)  # errors of reading a damaged file


class HashingFile(io.RawIOBase):
    """Passes a file's bytes, as they are read, to `count`."""

    def __init__(self, file: BinaryIO, count: Callable[[bytes], None]):
        self.file, self.count = file, count

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer)) or b""
        self.count(data)
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        while self.read(BUFFER):
            pass


def require_zstandard(where: str) -> Any:
    try:
        import zstandard
    except ImportError:
        advice = "Run pip install 'spmd-lm[prepare]', or decompress it"
        raise ConfigError(f"{where}: zstandard, which reads .zst, is not installed. {advice}.") from None
    return zstandard


class ZstdFile(io.RawIOBase):
    """Decompresses a .zst.  Raises EOFError for a truncated file, which zstandard's own reader does not report."""

    def __init__(self, file: BinaryIO):
        library = require_zstandard(".zst")
        self.file, self.new_frame = file, library.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj
        self.frame: Any = None
        self.input, self.output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.output and self._decompress():
            pass
        size = min(len(buffer), len(self.output))
        buffer[:size], self.output = self.output[:size], self.output[size:]
        return size

    def _decompress(self) -> bool:
        """Decompresses one piece of input; False at the end."""
        self.input = self.input or self.file.read(ZSTD_INPUT)
        if not self.input:
            if self.frame is not None:
                raise EOFError("it ends in the middle")
            return False
        self.frame = self.frame or self.new_frame()
        self.output = memoryview(self.frame.decompress(self.input))
        self.input = b""
        if self.frame.eof:
            self.frame, self.input = None, self.frame.unused_data
        return True


def decompressed(file: io.RawIOBase, suffix: str) -> BinaryIO:
    buffered = io.BufferedReader(file, BUFFER)
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=buffered))
    if suffix == ".zst":
        return io.BufferedReader(ZstdFile(buffered), BUFFER)
    return buffered


def documents_of_lines(file: BinaryIO, most: int, per_line: bool) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, from 1, bytes) of each line; None for bytes if there are over `most`, line end excluded.
    Without `per_line`, yields the whole file likewise, line ends included, as number 0."""
    if not per_line:
        data = file.read(most + 1)
        yield 0, None if len(data) > most else data
        return
    number = 0
    while line := file.readline(most + 2):
        number += 1
        rest, is_long = line, len(line) > most and len(line.rstrip(b"\r\n")) > most
        while rest and len(line) > most + 1 and not rest.endswith(b"\n"):
            rest = file.readline(BUFFER)
            is_long = is_long or bool(rest.rstrip(b"\r\n"))
        yield number, None if is_long else line
