"""Tokens of many shards as one array, read through memory maps or from a bucket, and checked on the way."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from spmd_lm.data.token_files.bucket_tokens import AT_ONCE, BucketTokens, fetch_blocks
from spmd_lm.data.token_files.shard import BLOCK, Shard, block_range, check_block, stray_token
from spmd_lm.errors import DataError

Verify = Literal["touch", "full", "off"]


class ShardedTokens:
    """A TokenArray.

    verify: when a BLOCK of a file is compared with its checksum, and its ids with vocab_size: before its first use
      (touch), at the start (full), or never (off)."""

    def __init__(self, shards: Sequence[Shard], vocab_size: int, eos_token_id: int | None, verify: Verify = "touch"):
        """eos_token_id: last token of each document; None if documents end with their text."""
        self.shards, self.vocab_size, self.eos_token_id = shards, vocab_size, eos_token_id
        ends = np.cumsum([0, *(shard.tokens.size for shard in shards)])
        self.first_token, self.size = ends[:-1], int(ends[-1])
        self.sizes = np.diff(ends)
        blocks = [-(-shard.tokens.nbytes // BLOCK) for shard in shards]
        self.first_block = np.cumsum([0, *blocks])[:-1]
        self.tokens_per_block = np.array([BLOCK // shard.tokens.itemsize for shard in shards])
        self.unchecked = np.full(sum(blocks), verify != "off")
        self.num_unchecked = int(self.unchecked.sum())
        self.in_bucket = any(isinstance(shard.tokens, BucketTokens) for shard in shards)
        if verify == "full":
            for i, count in enumerate(blocks):
                for first in range(0, count, AT_ONCE):
                    last = min(first + AT_ONCE, count) - 1
                    self._fetch(np.array([i]), np.array([first]), np.array([last]))
                    self._check(i, first, last + 1)

    def read(self, start_R: np.ndarray, length: int) -> np.ndarray:
        shard_R = np.searchsorted(self.first_token, start_R, side="right") - 1
        local_R = start_R - self.first_token[shard_R]
        if self.num_unchecked or self.in_bucket:
            # The blocks of each row within the shard in which it begins.
            last_R = np.minimum(local_R + length, self.sizes[shard_R]) - 1
            first_R, last_R = (at_R // self.tokens_per_block[shard_R] for at_R in (local_R, last_R))
            self._fetch(shard_R, first_R, last_R)
            self._check_rows(shard_R, first_R, last_R)
        rows = np.empty((len(start_R), length), np.int32)
        for row, i, start in zip(rows, shard_R.tolist(), local_R.tolist(), strict=True):
            found = self.shards[i].tokens[start : start + length]
            row[: len(found)] = found
            if len(found) < length:
                self._read_on(row[len(found) :], i + 1)
        return rows

    def _read_on(self, row: np.ndarray, i: int) -> None:
        """Fills the rest of a row from the first token of shard i on."""
        while len(row):
            assert i < len(self.shards), "a row goes past the last token"
            found = self.shards[i].tokens[: len(row)]
            self._check(i, 0, -(-found.nbytes // BLOCK))
            row[: len(found)] = found
            row, i = row[len(found) :], i + 1

    def _fetch(self, shard_R: np.ndarray, first_R: np.ndarray, last_R: np.ndarray) -> None:
        """Brings the blocks of all rows into the cache at once, if they are in a bucket."""
        if not self.in_bucket:
            return
        rows = zip(shard_R.tolist(), first_R.tolist(), last_R.tolist(), strict=True)
        blocks = dict.fromkeys((i, block) for i, first, last in rows for block in range(first, last + 1))
        fetch_blocks((tokens, b) for i, b in blocks if isinstance(tokens := self.shards[i].tokens, BucketTokens))

    def _check_rows(self, shard_R: np.ndarray, first_R: np.ndarray, last_R: np.ndarray) -> None:
        base_R = self.first_block[shard_R]
        suspect = self.unchecked[base_R + first_R] | self.unchecked[base_R + last_R] | (last_R > first_R + 1)
        for r in np.flatnonzero(suspect).tolist():
            self._check(int(shard_R[r]), int(first_R[r]), int(last_R[r]) + 1)

    def _check(self, i: int, first: int, stop: int) -> None:
        """Checks the unchecked blocks among first..stop-1 of shard i."""
        base = int(self.first_block[i])
        for block in (np.flatnonzero(self.unchecked[base + first : base + stop]) + first).tolist():
            shard = self.shards[i]
            check_block(shard, block)
            if (stray := stray_token(block_range(shard, block), self.vocab_size)) is not None:
                raise DataError(
                    f"{shard.path}: it has the token {stray}, but the vocabulary has {self.vocab_size}. "
                    "Use the data.tokenizer that it was made with, and a model.vocab that holds it."
                )
            self.unchecked[base + block] = False
            self.num_unchecked -= 1

    def document_starts(self) -> np.ndarray:
        parts = [shard.offsets[:-1].astype(np.int64) + first for shard, first in self._with_first_tokens()]
        return np.concatenate([*parts, [self.size]])

    def document_texts(self) -> tuple[np.ndarray, np.ndarray]:
        starts = self.document_starts()
        return starts[:-1], starts[1:] - (self.eos_token_id is not None)

    def _with_first_tokens(self):
        return zip(self.shards, self.first_token.tolist(), strict=True)
