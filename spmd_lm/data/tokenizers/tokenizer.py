"""Between text and token ids: the Tokenizer protocol, and the tokenizers of bytes, of numbers and of vocabulary files.

The rest of the program knows only `Tokenizer`, so another one costs a class here and a key in the configuration."""

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import ArrayLike

from spmd_lm.config.data_sections import Data, Synthetic
from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens, WordBoundaries
from spmd_lm.data.tokenizers import vocabulary
from spmd_lm.errors import ConfigError, DataError

METASPACE = "\u2581"  # SentencePiece's mark of the beginning of a word
NO_WORDS = """data.source=synthetic: its tokens form no words. Use data.source=python-stdlib, \
or objective.kind=causal_lm with model.kind=gpt."""


class Tokenizer(Protocol):
    vocab_size: int  # every id that `encode` returns is below it
    eos_token_id: int | None  # between documents; a text has it only by its name; None if documents are not separated
    bos_token_id: int | None  # before a prompt; None if nothing is put there

    @property
    def bytes_per_token(self) -> np.ndarray | None:
        """The bytes of text that each id spells [vocab_size], 0 for special tokens; None if ids do not spell text out,
        byte by byte."""

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
    bytes_per_token = np.array([0] + [1] * 255)

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
    bytes_per_token = None

    def encode(self, text: str | bytes) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], np.uint32)
        except (ValueError, OverflowError):
            problem = "a model of synthetic data reads token ids, as in --prompt '3 1 4'"
            raise DataError(f"prompt {text!r:.60}: {problem}.") from None

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        raise ConfigError(NO_WORDS)

    def decode(self, ids: ArrayLike) -> str:
        return " ".join(str(token) for token in np.asarray(ids).tolist())

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        raise ConfigError(NO_WORDS)


class VocabularyTokenizer:
    """What tokenizers of vocabulary files share.  name: of data.tokenizer.  row_tokens: those of masked rows."""

    def __init__(self, name: str, token_to_id: dict[str, int]):
        self.name, self.token_to_id = name, token_to_id
        self.vocab_size = max(token_to_id.values()) + 1
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.eos_token_id = self._first_id(vocabulary.EOS_TOKENS)
        self.bos_token_id = self._first_id(vocabulary.BOS_TOKENS)
        spellings = vocabulary.BERT_TOKENS, vocabulary.ROBERTA_TOKENS
        self.row_tokens = min(spellings, key=lambda tokens: len(self._missing(tokens)))  # of which it has more

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        if missing := self._missing(self.row_tokens):
            raise ConfigError(
                f"data.tokenizer={self.name}: it has no {', '.join(missing)}. "
                "Use data.tokenizer=bytes or a BERT's, or objective.kind=causal_lm with model.kind=gpt."
            )
        return SpecialTokens(*(self.token_to_id[token] for token in self.row_tokens)), self._words

    @functools.cached_property
    def _words(self) -> WordBoundaries:
        raise NotImplementedError

    def _first_id(self, candidates: Sequence[str]) -> int | None:
        return next((self.token_to_id[token] for token in candidates if token in self.token_to_id), None)

    def _missing(self, tokens: Sequence[str]) -> list[str]:
        return [token for token in tokens if token not in self.token_to_id]


class SubwordTokenizer(VocabularyTokenizer):
    """A tokenizer of Hugging Face's library.  If it has all tokens of masked rows, '[MASK]' in a text is plain text."""

    def __init__(self, name: str, trained: tokenizers.Tokenizer | None = None):
        """trained: by this run; otherwise data.tokenizer=name is loaded."""
        self.backend = trained or vocabulary.load_vocabulary(name)
        self.trained_json = trained.to_str(pretty=True) if trained else None
        self.backend.no_truncation()
        self.backend.no_padding()
        super().__init__(name, self.backend.get_vocab(with_added_tokens=True))
        self.backend.encode_special_tokens = not self._missing(self.row_tokens)

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        text = data.decode("utf-8", "replace")  # documents are UTF-8; what is not, in a prompt, shows as U+FFFD
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {text[:40]!r}"):
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """As `encode`, of UTF-8 texts, which the library divides among its threads."""
        decoded = [text.decode() for text in texts]
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {decoded[:1]!r:.40}"):
            encodings = self.backend.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {text[:40]!r}"):
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)  # the fast one has no offsets
        return np.array(encoding.ids, self.dtype), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def decode(self, ids: ArrayLike) -> str:
        """Special tokens appear by name; the ids of a padded vocabulary beyond the tokens have no text."""
        ids = np.asarray(ids)
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot decode {ids[:10]}"):
            return self.backend.decode(ids[ids < self.vocab_size].tolist(), skip_special_tokens=False)

    @functools.cached_property
    def bytes_per_token(self) -> np.ndarray | None:
        spelled = self._bytes_of_tokens()
        return None if spelled is None else np.array([len(each or b"") for each in spelled])

    def _bytes_of_tokens(self) -> list[bytes | None] | None:
        """The bytes of each token of a byte-level vocabulary; None for special ones.  None for other vocabularies."""
        config, added = json.loads(self.backend.to_str()), self.backend.get_added_tokens_decoder()
        components = json.dumps([config["pre_tokenizer"], config["decoder"]])
        if '"type": "ByteLevel"' not in components or config["model"]["type"] == "WordPiece":
            return None
        byte_of = {letter: byte for byte, letter in enumerate(vocabulary.bytes_to_unicode())}
        spelled: list[bytes | None] = [None] * self.vocab_size
        for token, token_id in self.token_to_id.items():
            if token_id not in added:
                spelled[token_id] = bytes(byte_of[letter] for letter in token)
            elif not added[token_id].special:
                spelled[token_id] = token.encode()
        return spelled

    @functools.cached_property
    def _words(self) -> WordBoundaries:
        config, added = json.loads(self.backend.to_str()), self.backend.get_added_tokens_decoder()
        model, components = config["model"], json.dumps([config["pre_tokenizer"], config["decoder"]])
        is_wordpiece = model["type"] == "WordPiece"
        if (spelled := self._bytes_of_tokens()) is not None:
            return WordBoundaries.from_bytes(spelled)
        if not is_wordpiece and '"type": "Metaspace"' not in components:
            raise ConfigError(
                f"data.tokenizer={self.name}: its {model['type']} tokens do not show where words begin. "
                "Use data.tokenizer=bytes, or a WordPiece, byte-level or SentencePiece vocabulary."
            )
        mark, mark_starts = (model["continuing_subword_prefix"], False) if is_wordpiece else (METASPACE, True)
        tokens: list[str | None] = [None] * self.vocab_size
        starts = [False] * self.vocab_size
        for token, token_id in self.token_to_id.items():
            if token_id not in added or not added[token_id].special:
                tokens[token_id], starts[token_id] = token, token.startswith(mark) is mark_starts
        return WordBoundaries.from_marked(tokens, starts)


def make_tokenizer(data: Data | Synthetic) -> Tokenizer:
    """Raises DataError for a vocabulary that is missing or damaged."""
    if isinstance(data, Synthetic):
        return NumberTokenizer()
    return open_tokenizer(data.tokenizer)


def open_tokenizer(name: str) -> Tokenizer:
    """That of `bytes`, or of the path of a vocabulary.  Raises DataError for one that is missing or damaged."""
    if name == "bytes":
        return ByteTokenizer()
    if vocabulary.is_sentencepiece(name):
        from spmd_lm.data.tokenizers.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(name)
    return SubwordTokenizer(name)


def hash_of_vocabulary(tokenizer: Tokenizer, name: str) -> str:
    """That of data.tokenizer=name, as vocabulary_hash; of one that was trained, of the file that the run keeps."""
    trained = tokenizer.trained_json if isinstance(tokenizer, SubwordTokenizer) else None
    return hashlib.sha256(trained.encode()).hexdigest() if trained else vocabulary.vocabulary_hash(name)


def keep_vocabulary(tokenizer: Tokenizer, name: str, directory: Path) -> None:
    """Copies the files of data.tokenizer=name into `directory`, or writes the one that was trained."""
    if isinstance(tokenizer, SubwordTokenizer) and tokenizer.trained_json:
        vocabulary.write_vocabulary(tokenizer.trained_json, directory)
    else:
        vocabulary.copy_vocabulary(name, directory)
