"""Between text and token ids.

Sources and generation know only `Tokenizer`, so that another one costs a class here and a kind in the configuration.
Vocabularies of files are in `subwords`."""

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from spmd_lm.config.schema import Data, Synthetic
from spmd_lm.data.masked_lm.word_boundaries import Special, Words, of_bytes
from spmd_lm.errors import ConfigError, DataError


class Tokenizer(Protocol):
    vocab: int  # every id that a text has is below it
    end: int | None  # the id between documents, which a text has only by its name; None where nothing parts them
    begin: int | None  # the id that a prompt begins with; None where it begins with its own first

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text`, 1-D, in the narrowest unsigned type that holds them."""
        ...

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text`, and which of its characters each is of: int32 [N, 2], the first and past the last."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """Text of any ids that a model may emit; never raises, for half a character is common in samples."""
        ...

    def masking(self) -> tuple[Special, Words]:
        """What masked rows are made with, and where words begin.  ConfigError if the vocabulary does not have it."""
        ...


class ByteTokenizer:
    """UTF-8 bytes.  NUL separates documents: no text file has one.  What masked rows need stands above the bytes."""

    vocab = 256
    end: int | None = 0
    begin: int | None = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        # surrogateescape: bytes of a command line that are not UTF-8 come back as they were typed
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8)

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        at = np.cumsum(ids & 0xC0 != 0x80, dtype=np.int32) - 1  # 0b10xxxxxx continues a character
        return ids, np.stack([at, at + 1], axis=1)

    def decode(self, ids: ArrayLike) -> str:
        ids = np.asarray(ids)
        # An id of the padding of the vocabulary has no byte; 0xff is never UTF-8, so it shows as U+FFFD.
        return np.where(ids < self.vocab, ids, 0xFF).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def masking(self) -> tuple[Special, Words]:
        text = [None if byte == self.end else bytes([byte]) for byte in range(256)]
        return Special(cls=256, sep=257, mask=258, pad=259), of_bytes([*text, None, None, None, None])


class NumberTokenizer:
    """Ids written as decimal numbers with spaces between: how a person reads a synthetic chain."""

    vocab = 2**32
    end: int | None = None
    begin: int | None = None

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], np.uint32)
        except (ValueError, OverflowError):
            raise DataError(f"prompt {text!r:.60}: a synthetic run reads numbers, as in --prompt '3 1 4'.") from None

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise self._wordless()

    def decode(self, ids: ArrayLike) -> str:
        return " ".join(str(token) for token in np.asarray(ids).tolist())

    def masking(self) -> tuple[Special, Words]:
        raise self._wordless()

    def _wordless(self) -> ConfigError:
        return ConfigError(
            "data.source=synthetic: a chain has no words. Use data.source=python-stdlib, "
            "or objective.kind=causal_lm with model.kind=gpt."
        )


def make(data: Data | Synthetic) -> Tokenizer:
    """DataError for a vocabulary that is not there or damaged."""
    if isinstance(data, Synthetic):
        return NumberTokenizer()
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    from spmd_lm.data.tokenizers.subwords import read

    return read(data.tokenizer)
