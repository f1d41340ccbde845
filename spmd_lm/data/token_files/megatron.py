"""Megatron-LM's tokenized data: PREFIX.bin with the ids, and PREFIX.idx with the lengths of sequences and the first
sequence of each document.

  .idx   b"MMIDIDX", two NUL; uint64 version 1; uint8 dtype; uint64 sequences; uint64 document indices
         int32 [sequences] lengths; int64 [sequences] first bytes; int64 [document indices] sequences, from 0 on

Neither file has checksums or names its vocabulary."""

import struct
from pathlib import Path

import numpy as np

from spmd_lm.config.data_sections import RULES
from spmd_lm.data.held_out import count_held_out
from spmd_lm.data.token_files.shard import Header, Shard, damaged, map_file
from spmd_lm.files import open_regular

MEGATRON_MAGIC = b"MMIDIDX\0\0"
PREAMBLE = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by Megatron-LM's codes; 6 and 7 are floats


def is_megatron(prefix: Path) -> bool:
    return prefix.name != "" and prefix.with_name(prefix.name + ".idx").is_file()


def open_megatron(prefix: Path) -> Shard:
    """The documents as a shard.  Raises DataError for files that are missing, truncated, damaged, or mismatched."""
    idx, bin_file = (prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin"))
    code, sequences, num_indices = _read_preamble(idx)
    dtype = np.dtype(DTYPES[code])
    expected = PREAMBLE.size + 12 * sequences + 8 * num_indices
    raw = map_file(idx, np.dtype("u1"), expected)[PREAMBLE.size :]
    lengths = raw[: 4 * sequences].view("<i4")
    first_bytes = raw[4 * sequences : 12 * sequences].view("<i8")
    indices = raw[12 * sequences :].view("<i8")
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if lengths.min(initial=0) < 0 or (first_bytes != ends[:-1] * dtype.itemsize).any():
        raise damaged(idx, "its sequences do not follow one another")
    steps = np.diff(indices)
    if not len(indices) or indices[0] != 0 or indices[-1] != sequences or steps.min(initial=0) < 0:
        raise damaged(idx, "its documents are not of its sequences")
    tokens = map_file(bin_file, dtype, int(ends[-1]))
    offsets = ends[indices].astype(np.uint64)
    header = Header(dtype.str[1:], 0, None, "", tokens.size, len(indices) - 1, tokens.nbytes, 0, [])
    return Shard(prefix, header, tokens, offsets)


def _read_preamble(idx: Path) -> tuple[int, int, int]:
    """The dtype's code, and the numbers of sequences and of document indices."""
    try:
        with open(open_regular(idx), "rb") as file:
            preamble = file.read(PREAMBLE.size)
    except OSError as error:
        raise damaged(idx, f"cannot be read: {error.strerror}") from None
    if len(preamble) < PREAMBLE.size or not preamble.startswith(MEGATRON_MAGIC):
        raise damaged(idx, "it does not begin as Megatron-LM's do")
    _, version, code, sequences, num_indices = PREAMBLE.unpack(preamble)
    if version != 1 or code not in DTYPES:
        raise damaged(idx, f"its version is {version} and its dtype {code}, which no Megatron-LM writes for tokens")
    return code, sequences, num_indices


def split_documents(shard: Shard, fraction: float, rules: int) -> tuple[Shard, Shard]:
    """The first documents of a shard, and the last ones, with `fraction` of its tokens; under rules 1, with `fraction`
    of its documents, at least one in each split if it has two."""
    count, offsets, size = shard.header.documents, shard.offsets, 0
    if rules < RULES:
        held_out = min(max(1, round(fraction * count)), count - 1) if count else 0
    else:
        held_out, size = count_held_out(np.empty(0), np.diff(offsets.astype(np.int64))[::-1], fraction)
    first = count - held_out  # first document held out whole; so are the last `size` tokens of the one before it
    cut = offsets[first : first + 1] - np.uint64(size)
    train, validation = [offsets[:first], cut], [cut, offsets[first + (not size) :]]
    return _part(shard, np.concatenate(train)), _part(shard, np.concatenate(validation))


def _part(shard: Shard, offsets: np.ndarray) -> Shard:
    return shard._replace(tokens=shard.tokens[int(offsets[0]) : int(offsets[-1])], offsets=offsets - offsets[0])
