"""The Tokenizer protocol, and the tokenizers of bytes, of numbers and of vocabulary files.

The rest of the program knows only `Tokenizer`, so another one takes a class here and a key in the configuration."""

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import tokenizers
from numpy.typing import ArrayLike

from spmd_lm.config.data_sections import RULES, Data, Synthetic
from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens, WordBoundaries
from spmd_lm.data.tokenizers import vocabulary
from spmd_lm.errors import ConfigError, DataError

METASPACE = "\u2581"  # SentencePiece's mark of the beginning of a word
OTHER = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))  # every text is one token
NO_WORDS = """data.source=synthetic: its tokens form no words. Use data.source=python-stdlib, \
or objective.kind=causal_lm with model.kind=gpt."""

BosBefore = Literal["documents and prompts", "prompts", "nothing"]


class Tokenizer(Protocol):
    vocab_size: int  # every id that `encode` returns is below it
    required_vocab: int  # ids that a model must have; higher ones are of added tokens, which a text may contain
    eos_token_id: int | None  # between documents; None if they are not separated; in a text only if spelled out
    bos_token_id: int | None  # begins a text
    bos_before: BosBefore

    @property
    def bytes_per_token(self) -> np.ndarray | None:
        """Bytes of text per id [vocab_size], 0 for special tokens; None if ids do not spell out text byte by byte."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of `text`, 1-D, in the narrowest unsigned type for the vocabulary, without special tokens."""

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of `text`, and the range of characters of each: int32 [N, 2], past-the-end."""

    def decode(self, ids: ArrayLike) -> str:
        """Text of any ids that a model may emit.  Never raises: half a character is common in samples."""

    def has_text(self, count: int) -> np.ndarray:
        """Mask of the ids below `count` that are tokens of text, bool [count]."""

    def own_bos(self, always: bool) -> int | None:
        """The token that begins every text by the vocabulary's own files; with `always`, even if they add none."""

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        """Special tokens and word boundaries for masked or labelled rows.  Raises ConfigError if the vocabulary lacks
        them."""


def begin(tokenizer: Tokenizer, ids: np.ndarray, *, prompt: bool = False, document: bool = False) -> np.ndarray:
    """`ids` with the token that begins a text, if one belongs here and is missing.
    document: one of several, so a token that separates them is not added as well."""
    bos, where = tokenizer.bos_token_id, tokenizer.bos_before
    if bos is None or where == "nothing" or (where == "prompts" and not prompt) or (len(ids) and ids[0] == bos):
        return ids
    return ids if document and bos == tokenizer.eos_token_id else np.concatenate([np.array([bos], ids.dtype), ids])


def utf8(text: str | bytes) -> bytes:
    """UTF-8 bytes of a text.  Command-line bytes that are not UTF-8 are restored; other lone surrogates, which JSON and
    YAML allow, become U+FFFD."""
    if isinstance(text, bytes):
        return text
    return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text).encode("utf-8", "surrogateescape")


class ByteTokenizer:
    """UTF-8 bytes.  NUL separates documents: no text file has it.  [CLS], [SEP], [MASK] and [PAD] follow the bytes."""

    vocab_size = 256
    required_vocab = 0
    eos_token_id: int | None = 0
    bos_token_id: int | None = 0
    bos_before: BosBefore = "prompts"
    bytes_per_token = np.array([0] + [1] * 255)

    def has_text(self, count: int) -> np.ndarray:
        return np.arange(count) < self.vocab_size

    def own_bos(self, always: bool) -> int | None:
        return self.bos_token_id if always else None

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8)

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
    required_vocab = 0
    eos_token_id: int | None = None
    bos_token_id: int | None = None
    bos_before: BosBefore = "prompts"
    bytes_per_token = None

    def has_text(self, count: int) -> np.ndarray:
        return np.ones(count, bool)

    def own_bos(self, always: bool) -> None:
        return None

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
    """The base of tokenizers with a vocabulary file.

    name: value of data.tokenizer.
    row_tokens: special tokens of masked rows."""

    def __init__(self, name: str, token_to_id: dict[str, int]):
        self.name, self.token_to_id = name, token_to_id
        self.vocab_size = self.required_vocab = max(token_to_id.values()) + 1
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.eos_token_id = self._first_id(vocabulary.EOS_TOKENS)
        self.bos_token_id = self._first_id(vocabulary.BOS_TOKENS)
        self.bos_before: BosBefore = "prompts"
        spellings = vocabulary.BERT_TOKENS, vocabulary.ROBERTA_TOKENS
        self.row_tokens = min(spellings, key=lambda tokens: len(self._missing(tokens)))  # the more complete set

    def has_text(self, count: int) -> np.ndarray:
        return np.isin(np.arange(count), [*self.token_to_id.values()])

    def own_bos(self, always: bool) -> int | None:
        adds_bos, declared = vocabulary.bos_settings(self.name)
        if not (adds_bos or always):
            return None
        if declared and declared not in self.token_to_id:
            problem = f"its tokenizer_config.json declares bos_token {declared!r:.40}, which it has not"
            raise DataError(f"data.tokenizer={self.name}: {problem}. Correct that file.")
        return self.token_to_id[declared] if declared else self.bos_token_id

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
        """trained: the tokenizer that this run trained; otherwise data.tokenizer=name is loaded."""
        self.backend = trained or vocabulary.load_vocabulary(name)
        self.trained_json = trained.to_str(pretty=True) if trained else None
        self.backend.no_truncation()
        self.backend.no_padding()
        super().__init__(name, self.backend.get_vocab(with_added_tokens=True))
        # Gemma 3's has <image_soft_token>, which its text models lack.
        put = {self.token_to_id[token] for token in vocabulary.put_by_name(self.token_to_id)}
        optional = self.backend.get_added_tokens_decoder().keys() - put
        self.required_vocab = 1 + max({*self.token_to_id.values()} - optional, default=-1)  # more if data.bos puts one
        self.backend.encode_special_tokens = not self._missing(self.row_tokens)

    def encode(self, text: str | bytes) -> np.ndarray:
        text = utf8(text).decode("utf-8", "replace")  # documents are UTF-8; invalid bytes of a prompt show as U+FFFD
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {text[:40]!r}"):
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Encodes UTF-8 texts in the library's threads."""
        decoded = [text.decode() for text in texts]
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {decoded[:1]!r:.40}"):
            encodings = self.backend.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {text[:40]!r}"):
            (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)  # the fast one has no offsets
        return np.array(encoding.ids, self.dtype), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def encode_markup(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        decoded = [utf8(text).decode("utf-8", "replace") for text in texts]
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot encode {decoded[:1]!r:.40}"):
            encodings = self._markup_backend.encode_batch(decoded, add_special_tokens=False)
        return [
            (np.array(each.ids, self.dtype), np.array(each.offsets, np.int32).reshape(-1, 2)[:, 0])
            for each in encodings
        ]

    @functools.cached_property
    def _markup_backend(self) -> tokenizers.Tokenizer:
        """A tokenizer that reads special tokens by name, with offsets that include a token's leading spaces."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = False
        backend.post_processor = None  # it would trim offsets
        return backend

    def decode(self, ids: ArrayLike) -> str:
        """Special tokens appear by name; the ids of a padded vocabulary beyond the tokens have no text."""
        ids = np.asarray(ids)
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot decode {ids[:10]}"):
            return self.backend.decode(ids[ids < self.vocab_size].tolist(), skip_special_tokens=False)

    def own_bos(self, always: bool) -> int | None:
        """Reads the post-processor of a tokenizer.json, unless it builds masked rows: [CLS] begins no text.  Raises
        DataError for an id without a token, ConfigError if several tokens begin a text."""
        if self.trained_json:
            return self.bos_token_id if always else None
        with vocabulary.library_errors(f"data.tokenizer={self.name}: cannot add special tokens to a text"):
            encoding = self.backend.post_process(OTHER.encode("a"))  # a real text may have no token in this vocabulary
        added = encoding.special_tokens_mask
        before = dict.fromkeys(encoding.ids[: added.index(0)] if self._missing(self.row_tokens) else [])
        if unknown := before.keys() - self.token_to_id.values():
            problem = f"its post-processor begins a text with the id {min(unknown)}, which no token has"
            raise DataError(f"data.tokenizer={self.name}: {problem}. Correct its tokenizer.json.")
        if len(before) == 1:
            return next(iter(before))
        if before and not always:
            tokens = ", ".join(map(str, map(self.backend.id_to_token, before)))
            problem = f"its post-processor begins a text with {tokens}, and only one token can be put"
            raise ConfigError(f"data.tokenizer={self.name}: {problem}. Set data.bos to true or false (prepare: bos).")
        return super().own_bos(always) if always or not any(added) else None

    @functools.cached_property
    def bytes_per_token(self) -> np.ndarray | None:
        spelled = self._bytes_of_tokens()
        return None if spelled is None else np.array([len(each or b"") for each in spelled])

    def _bytes_of_tokens(self) -> list[bytes | None] | None:
        """The bytes of each token of a byte-level vocabulary; None for special ones, and for other vocabularies."""
        config, added = json.loads(self.backend.to_str()), self.backend.get_added_tokens_decoder()
        components = json.dumps([config["pre_tokenizer"], config["decoder"]])
        if '"type": "ByteLevel"' not in components or config["model"]["type"] == "WordPiece":
            return None
        byte_of = {letter: byte for byte, letter in enumerate(vocabulary.bytes_to_unicode())}
        spelled: list[bytes | None] = [None] * self.vocab_size
        for token, token_id in self.token_to_id.items():
            if token_id not in added and byte_of.keys() >= {*token}:
                spelled[token_id] = bytes(byte_of[letter] for letter in token)
            elif token_id not in added or not added[token_id].special:
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


def encode_markup(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids of each text, with special tokens spelled out in it, and the first character of each id."""
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer.encode_markup(texts)
    encoded = (tokenizer.encode_with_offsets(text) for text in texts)
    return [(ids, offsets[:, 0]) for ids, offsets in encoded]


def put_bos(
    tokenizer: Tokenizer, choice: Literal["auto"] | bool, rules: int = RULES, key: str = "data.bos"
) -> Tokenizer:
    """Sets the token that begins a text by `choice`, the value of `key`; auto leaves it to the vocabulary.
    rules: a version, at most RULES.  Raises ConfigError if the tokenizer has no such token."""
    if choice is False:
        tokenizer.bos_before = "nothing"
    elif choice is True or rules >= RULES:
        bos = tokenizer.own_bos(always=choice is True)
        if choice is True and bos is None:
            names = ", ".join(vocabulary.BOS_TOKENS)
            raise ConfigError(
                f"{key}=true, but the tokenizer has no token that begins a text: {names}. Use {key}=auto."
            )
        if bos is not None:
            tokenizer.bos_token_id, tokenizer.bos_before = bos, "documents and prompts"
            tokenizer.required_vocab = max(tokenizer.required_vocab, bos + 1)
    return tokenizer


def make_tokenizer(data: Data | Synthetic, rules: int = RULES) -> Tokenizer:
    """Raises DataError for a missing or damaged vocabulary, ConfigError for one without the token that data.bos needs.
    rules: a version, at most RULES."""
    if isinstance(data, Synthetic):
        return NumberTokenizer()
    return put_bos(open_tokenizer(data.tokenizer), data.bos, rules)


def fitting_tokenizer(data: Data | Synthetic, vocab: int, rules: int = RULES) -> Tokenizer:
    """`make_tokenizer` for a model of `vocab` ids.  Raises ConfigError if the tokenizer requires more."""
    tokenizer = make_tokenizer(data, rules)
    if isinstance(data, Data) and tokenizer.required_vocab > vocab:
        raise ConfigError(
            f"model.vocab={vocab} is less than the {tokenizer.required_vocab} tokens of "
            f"data.tokenizer={data.tokenizer}. Use model.vocab={tokenizer.required_vocab} or more."
        )
    return tokenizer


def check_ids(ids: np.ndarray, vocab: int, location: str) -> None:
    """Raises DataError, which begins with `location`, for an id that a model of `vocab` ids lacks."""
    if ids.max(initial=0) >= vocab:
        problem = f"token {ids.max()} is not below model.vocab={vocab}"
        raise DataError(f"{location}: {problem}. Correct the text, or use a run with a larger vocabulary.")


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of bytes, or of a vocabulary's path.  Raises DataError for one that is missing or damaged."""
    if name == "bytes":
        return ByteTokenizer()
    if vocabulary.is_sentencepiece(name):
        from spmd_lm.data.tokenizers.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(name)
    return SubwordTokenizer(name)


def hash_of_vocabulary(tokenizer: Tokenizer, name: str) -> str:
    """Hash of the vocabulary of data.tokenizer=name, or of the file that the run keeps if it trained the tokenizer."""
    trained = tokenizer.trained_json if isinstance(tokenizer, SubwordTokenizer) else None
    return hashlib.sha256(trained.encode()).hexdigest() if trained else vocabulary.vocabulary_hash(name)


def keep_vocabulary(tokenizer: Tokenizer, name: str, directory: Path) -> None:
    """Copies the files of data.tokenizer=name into `directory`, or writes the trained one."""
    if isinstance(tokenizer, SubwordTokenizer) and tokenizer.trained_json:
        vocabulary.write_vocabulary(tokenizer.trained_json, directory)
    else:
        vocabulary.copy_vocabulary(name, directory, with_model=True)
