"""The token ids that loaders read, in memory or in files of any size.

Shape suffixes: R rows, S tokens of a row, D documents."""

from typing import Protocol

import numpy as np


class TokenArray(Protocol):
    """Documents, one after another.  size: in tokens."""

    size: int

    def read(self, start_R: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each start on, int32 [R, S]; no row may go past the last token.  Raises DataError
        for tokens that fail their checksum or are not in the vocabulary, where that is checked."""

    def document_starts(self) -> np.ndarray:
        """Starts of documents, and the end of the last one, int64 [D + 1]; separators belong to the document before."""

    def document_texts(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends of each document's text, without separators, int64 [D] each."""


class TokensInMemory:
    """A 1-D array of ids, with documents separated by `eos_token_id` unless it is None."""

    def __init__(self, ids: np.ndarray, eos_token_id: int | None):
        assert ids.ndim == 1
        self.ids, self.size = ids, ids.size
        self.separators = np.flatnonzero(ids == eos_token_id) if eos_token_id is not None else np.empty(0, np.int64)

    def read(self, start_R: np.ndarray, length: int) -> np.ndarray:
        return self.ids[start_R[:, None] + np.arange(length)].astype(np.int32)

    def document_starts(self) -> np.ndarray:
        return np.concatenate([[0], self.separators + 1, [self.size]])

    def document_texts(self) -> tuple[np.ndarray, np.ndarray]:
        starts = self.document_starts()
        return starts[:-1], np.append(self.separators, self.size)
