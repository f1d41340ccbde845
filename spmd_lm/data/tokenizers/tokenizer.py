"""Between text and token ids: the Tokenizer protocol, and the tokenizers that need no files.

The rest of the program knows only `Tokenizer`, so another one costs a class here and a key in the configuration.
Tokenizers of vocabulary files are in `subwords`."""

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from spmd_lm.config.schema import Data, Synthetic
from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens, WordBoundaries
from spmd_lm.errors import ConfigError, DataError


class Tokenizer(Protocol):
    vocab_size: int  # every id that `encode` returns is below it
    eos_token_id: int | None  # between documents; a text has it only by its name; None if documents are not separated
    bos_token_id: int | None  # before a prompt; None if nothing is put there

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text`, 1-D, in the narrowest unsigned type that holds the vocabulary.  No special tokens are
        added."""

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text`, and the characters of each: int32 [N, 2], the first and past the last."""

    def decode(self, ids: ArrayLike) -> str:
        """Text of any ids that a model may emit.  Never raises: half a character is common in samples."""

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        """What rows of masked or labelled text are built with.  ConfigError if the vocabulary lacks it."""


class ByteTokenizer:
    """UTF-8 bytes.  NUL separates documents: no text file has one.  [CLS], [SEP], [MASK] and [PAD] follow the bytes."""

    vocab_size = 256
    eos_token_id: int | None = 0
    bos_token_id: int | None = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        # surrogateescape: bytes of a command line that are not UTF-8 come back as they were typed
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        character = np.cumsum(ids & 0xC0 != 0x80, dtype=np.int32) - 1  # 0b10xxxxxx continues a character
        return ids, np.stack([character, character + 1], axis=1)

    def decode(self, ids: ArrayLike) -> str:
        ids = np.asarray(ids)
        # The ids of a padded vocabulary beyond the bytes become 0xff, which is never UTF-8 and shows as U+FFFD.
        return np.where(ids < self.vocab_size, ids, 0xFF).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        text = [None if byte == self.eos_token_id else bytes([byte]) for byte in range(256)]
        return SpecialTokens(cls=256, sep=257, mask=258, pad=259), WordBoundaries.from_bytes([*text, *[None] * 4])


class NumberTokenizer:
    """Token ids as decimal numbers separated by spaces, for synthetic data."""

    vocab_size = 2**32
    eos_token_id: int | None = None
    bos_token_id: int | None = None

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], np.uint32)
        except (ValueError, OverflowError):
            raise DataError(
                f"prompt {text!r:.60}: a model of synthetic data reads token ids, as in --prompt '3 1 4'."
            ) from None

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise self._no_words()

    def decode(self, ids: ArrayLike) -> str:
        return " ".join(str(token) for token in np.asarray(ids).tolist())

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        raise self._no_words()

    def _no_words(self) -> ConfigError:
        return ConfigError(
            "data.source=synthetic: its tokens form no words. Use data.source=python-stdlib, "
            "or objective.kind=causal_lm with model.kind=gpt."
        )


def make_tokenizer(data: Data | Synthetic) -> Tokenizer:
    """Raises DataError for a vocabulary that is missing or damaged."""
    if isinstance(data, Synthetic):
        return NumberTokenizer()
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    from spmd_lm.data.tokenizers.subwords import load_tokenizer

    return load_tokenizer(data.tokenizer)
