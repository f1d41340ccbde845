"""A shard of tokenized documents: three files of one name.

  shard-00000.bin   token ids, one document after another: little-endian uint16 or uint32
  shard-00000.idx   MAGIC, then the offsets at which documents begin, and the end: little-endian uint64 [documents + 1]
  shard-00000.json  a Header, for reading and checking them

The .json is written last and makes the shard exist.  Every document ends with the end-of-sequence token, if the
tokenizer has one."""

import dataclasses
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from spmd_lm import files
from spmd_lm.buckets.copies import origin_of
from spmd_lm.errors import DataError

MAGIC = b"SPMDLM01"
BLOCK = 2**20  # bytes of a .bin that share a checksum
LARGEST_HEADER = 2**26  # bytes: enough for the checksums of 5 TB


@dataclasses.dataclass(frozen=True)
class Header:
    dtype: str
    vocab_size: int
    eos_token_id: int | None
    tokenizer: str  # SHA-256 of its vocabulary, or `bytes`
    tokens: int
    documents: int
    text_bytes: int
    idx_crc32: int
    block_crc32: list[int]  # one for each BLOCK of the .bin
    version: int = 1


class TokenIds(Protocol):
    """A memory map of one dimension, or what is sliced like one."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Shard(NamedTuple):
    path: Path  # without a suffix
    header: Header
    tokens: TokenIds
    offsets: np.ndarray  # uint64 [documents + 1], a memory map


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrower dtype that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ShardWriter:
    """Writes one shard, document by document.  Nothing appears under its name before `finish`; leftovers of `abandon`,
    or of a crash, are overwritten by the shard's next writer.  Equal documents give equal bytes."""

    def __init__(self, path: Path, vocab_size: int, eos_token_id: int | None, tokenizer: str):
        """path: without a suffix, in a directory that exists."""
        self.path, self.vocab_size, self.eos_token_id, self.tokenizer = path, vocab_size, eos_token_id, tokenizer
        self.dtype = token_dtype(vocab_size)
        self.ends, self.text_bytes, self.block_crc32 = [0], 0, list[int]()
        self.pending = bytearray()
        self.bin = files.create(path.with_suffix(".bin.tmp"))

    @property
    def tokens(self) -> int:
        return self.ends[-1]

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Appends a document's ids, given without the end-of-sequence token, and counts the bytes of its text.  Raises
        DataError for an id that is not below the vocabulary's size, OSError for a full disk."""
        if (stray := stray_token(tokens, self.vocab_size)) is not None:
            raise DataError(
                f"{self.path}: token {stray} is not below the {self.vocab_size} of the vocabulary. "
                "Use the tokenizer that these ids are of."
            )
        ids = tokens.astype(self.dtype)
        if self.eos_token_id is not None:
            ids = np.append(ids, self.dtype.type(self.eos_token_id))
        self.ends.append(self.ends[-1] + len(ids))
        self.text_bytes += text_bytes
        self.pending += ids.tobytes()
        if len(self.pending) >= BLOCK:
            self._write_blocks(len(self.pending) // BLOCK * BLOCK)

    def _write_blocks(self, size: int) -> None:
        written = self.pending[:size]
        self.block_crc32 += block_checksums(written)
        self.bin.write(written)
        del self.pending[:size]

    def finish(self) -> Header:
        """Makes the shard appear.  Raises OSError for a full disk, and then nothing appears."""
        self._write_blocks(len(self.pending))
        idx = MAGIC + np.array(self.ends, "<u8").tobytes()
        header = Header(
            self.dtype.str.lstrip("<"),
            self.vocab_size,
            self.eos_token_id,
            self.tokenizer,
            self.tokens,
            len(self.ends) - 1,
            self.text_bytes,
            zlib.crc32(idx),
            self.block_crc32,
        )
        self.bin.flush()
        os.fsync(self.bin.fileno())
        self.bin.close()
        self.path.with_suffix(".bin.tmp").replace(self.path.with_suffix(".bin"))
        files.write_atomically(self.path.with_suffix(".idx"), idx)
        files.write_atomically(self.path.with_suffix(".json"), json.dumps(dataclasses.asdict(header)) + "\n")
        return header

    def abandon(self) -> None:
        self.bin.close()
        self.path.with_suffix(".bin.tmp").unlink(missing_ok=True)


def stray_token(tokens: np.ndarray, vocab_size: int) -> int | None:
    """An id outside the vocabulary, or None."""
    if not tokens.size:
        return None
    low, high = int(tokens.min()), int(tokens.max())
    return low if low < 0 else high if high >= vocab_size else None


def block_checksums(data: bytes | bytearray | np.ndarray) -> list[int]:
    """CRC-32 of each BLOCK of bytes; the last one may be shorter."""
    view = np.frombuffer(data, np.uint8)
    return [zlib.crc32(view[start : start + BLOCK].data) for start in range(0, len(view), BLOCK)]


def map_tokens(path: Path, header: Header) -> TokenIds:
    return map_file(path, np.dtype(header.dtype).newbyteorder("<"), header.tokens)


def open_shard(path: Path, open_tokens: Callable[[Path, Header], TokenIds] = map_tokens) -> Shard:
    """Maps a shard's files after checking their sizes, header and offsets; the tokens are not read.  Raises DataError
    for a file that is missing, unreadable, truncated or damaged, or not of this format.
    open_tokens: opens the .bin."""
    header = read_header(path.with_suffix(".json"))
    tokens = open_tokens(path.with_suffix(".bin"), header)
    idx = map_file(path.with_suffix(".idx"), np.dtype("u1"), len(MAGIC) + 8 * (header.documents + 1))
    if zlib.crc32(idx.tobytes()) != header.idx_crc32:
        raise damaged(path.with_suffix(".idx"), "its checksum is not that of what was written")
    offsets = idx[len(MAGIC) :].view("<u8")
    if idx[: len(MAGIC)].tobytes() != MAGIC or not _increase(offsets, header.tokens):
        raise damaged(path.with_suffix(".idx"), "its offsets do not divide the tokens into documents")
    return Shard(path, header, tokens, offsets)


def _increase(offsets: np.ndarray, tokens: int) -> bool:
    return int(offsets[0]) == 0 and int(offsets[-1]) == tokens and bool((offsets[1:] >= offsets[:-1]).all())


def read_header(path: Path) -> Header:
    value = read_json(path)
    known = {field.name for field in dataclasses.fields(Header)}
    if value.get("version") != Header.version or value.keys() != known:
        raise damaged(path, f"it is not the header of a shard of version {Header.version}")
    header = Header(**value)
    counts = header.vocab_size, header.tokens, header.documents, header.text_bytes, header.idx_crc32
    listed = header.block_crc32 if isinstance(header.block_crc32, list) else [None]
    valid = all(type(count) is int and count >= 0 for count in (*counts, *listed))
    if not valid or header.dtype not in ("u2", "u4") or header.dtype != token_dtype(header.vocab_size).str[1:]:
        raise damaged(path, "its counts, vocabulary and dtype do not agree")
    if len(header.block_crc32) != -(-header.tokens * np.dtype(header.dtype).itemsize // BLOCK):
        raise damaged(path, "it does not have a checksum for each MiB of tokens")
    return header


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = files.parse_json(files.read_bytes(path, LARGEST_HEADER))
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise damaged(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object")
    return value


def map_file(path: Path, dtype: np.dtype, size: int, offset: int = 0) -> np.ndarray:
    """A read-only memory map of `size` values, from byte `offset` to the end of the file.  Raises DataError for a file
    that cannot be read, or of another size."""
    try:
        descriptor = files.open_regular(path)
        with open(descriptor, "rb") as file:
            found, expected = os.fstat(file.fileno()).st_size, offset + size * dtype.itemsize
            if found != expected:
                raise wrong_size(path, found, expected)
            if not size:  # an empty file cannot be mapped
                return np.empty(0, dtype)
            return np.memmap(file, dtype, "r", offset, size).view(np.ndarray)  # its slices are faster
    except OSError as error:
        raise unreadable(path, error) from None


def block_range(shard: Shard, block: int) -> np.ndarray:
    """The tokens in a BLOCK of the .bin."""
    size = BLOCK // shard.tokens.itemsize
    return shard.tokens[block * size : (block + 1) * size]


def check_block(shard: Shard, block: int) -> None:
    """Raises DataError if a BLOCK fails its checksum; files without checksums pass."""
    tokens = block_range(shard, block)
    if shard.header.block_crc32 and block_checksums(tokens) != [shard.header.block_crc32[block]]:
        raise wrong_block(shard.path.with_suffix(".bin"), block, tokens.nbytes)


def wrong_block(path: Path, block: int, size: int) -> DataError:
    where = f"bytes {block * BLOCK:,} to {block * BLOCK + size:,}"
    return damaged(path, f"the checksum of {where} is not that of what was written")


def wrong_size(path: Path, found: int, expected: int) -> DataError:
    return damaged(path, f"it has {found:,} bytes instead of {expected:,}")


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{origin_of(path)}: cannot be read: {error.strerror}. Mend that, or remove the data set and prepare it again."
    )


def damaged(path: Path, what: str) -> DataError:
    return DataError(f"{origin_of(path)}: damaged: {what}. Remove the data set, and prepare or copy it again.")
