"""Between text and token ids.

Sources and generation know only `Tokenizer`, so that another one costs a class here and a kind in the configuration."""

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from spmd_lm.config.schema import PythonStdlib, Synthetic, Text
from spmd_lm.errors import DataError


class Tokenizer(Protocol):
    vocab: int  # every id is below it
    end: int | None  # the id between documents, which no text has; None where there are no documents

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text`, 1-D, in the narrowest unsigned type that holds them."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Text of any ids that a model may emit; never raises, for half a character is common in samples."""
        ...


class ByteTokenizer:
    """UTF-8 bytes.  NUL separates documents: no text file has one."""

    vocab = 256
    end: int | None = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        # surrogateescape: bytes of a command line that are not UTF-8 come back as they were typed
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8)

    def decode(self, ids: ArrayLike) -> str:
        ids = np.asarray(ids)
        # An id of the padding of the vocabulary has no byte; 0xff is never UTF-8, so it shows as U+FFFD.
        return np.where(ids < self.vocab, ids, 0xFF).astype(np.uint8).tobytes().decode("utf-8", "replace")


class NumberTokenizer:
    """Ids written as decimal numbers with spaces between: how a person reads a synthetic chain."""

    vocab = 2**32
    end: int | None = None

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], np.uint32)
        except (ValueError, OverflowError):
            raise DataError(f"prompt {text!r:.60}: a synthetic run reads numbers, as in --prompt '3 1 4'.") from None

    def decode(self, ids: ArrayLike) -> str:
        return " ".join(str(token) for token in np.asarray(ids).tolist())


def make(data: PythonStdlib | Text | Synthetic) -> Tokenizer:
    if isinstance(data, Synthetic):
        return NumberTokenizer()
    return {"bytes": ByteTokenizer}[data.tokenizer]()
