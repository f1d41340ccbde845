"""Tokenizers of vocabulary files, through Hugging Face's `tokenizers` library.

data.tokenizer is the path of one of these files, or of a directory that has one, searched for in this order:
  tokenizer.json   as Hugging Face writes it
  vocab.txt        BERT's WordPiece, one token per line
  vocab.json       GPT-2's byte-level BPE, with its merges.txt beside it
For the last two, a tokenizer_config.json beside them may set do_lower_case, strip_accents and tokenize_chinese_chars,
or add_prefix_space."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import ArrayLike
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spmd_lm.data.masked_lm.word_boundaries import SpecialTokens, WordBoundaries
from spmd_lm.data.tokenizers.vocabulary import find_vocabulary, read_json, read_text, standard_name
from spmd_lm.errors import ConfigError, DataError

# Of each kind, the first that a vocabulary has is used.
EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>", *EOS_TOKENS)

# Tokens of masked rows, in the order of `SpecialTokens`.
BERT_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
ROBERTA_TOKENS = ("<s>", "</s>", "<mask>", "<pad>")
METASPACE = "\u2581"  # SentencePiece's mark of the beginning of a word


class SubwordTokenizer:
    """A tokenizer of the library.  If it has all tokens of masked rows, '[MASK]' in a text is encoded as plain text."""

    def __init__(self, name: str, backend: tokenizers.Tokenizer):
        backend.no_truncation()
        backend.no_padding()
        self.name, self.backend = name, backend
        self.token_to_id: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.token_to_id.values()) + 1
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.eos_token_id, self.bos_token_id = self._first_id(EOS_TOKENS), self._first_id(BOS_TOKENS)
        # The spelling of which the vocabulary has more.
        self.row_tokens = min((BERT_TOKENS, ROBERTA_TOKENS), key=lambda tokens: len(self._missing(tokens)))
        backend.encode_special_tokens = not self._missing(self.row_tokens)

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        text = data.decode("utf-8", "replace")  # documents are UTF-8; what is not, in a prompt, shows as U+FFFD
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)  # the fast one has no offsets
        return np.array(encoding.ids, self.dtype), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def decode(self, ids: ArrayLike) -> str:
        """Special tokens appear by name; the ids of a padded vocabulary beyond the tokens have no text."""
        ids = np.asarray(ids)
        return self.backend.decode(ids[ids < self.vocab_size].tolist(), skip_special_tokens=False)

    def special_tokens_and_words(self) -> tuple[SpecialTokens, WordBoundaries]:
        if missing := self._missing(self.row_tokens):
            raise ConfigError(
                f"data.tokenizer={self.name}: it has no {', '.join(missing)}. "
                "Use data.tokenizer=bytes or a BERT's, or objective.kind=causal_lm with model.kind=gpt."
            )
        return SpecialTokens(*(self.token_to_id[token] for token in self.row_tokens)), self._words

    def _first_id(self, candidates: Sequence[str]) -> int | None:
        return next((self.token_to_id[token] for token in candidates if token in self.token_to_id), None)

    def _missing(self, tokens: Sequence[str]) -> list[str]:
        return [token for token in tokens if token not in self.token_to_id]

    @functools.cached_property
    def _words(self) -> WordBoundaries:
        config, added = json.loads(self.backend.to_str()), self.backend.get_added_tokens_decoder()
        model, components = config["model"], json.dumps([config["pre_tokenizer"], config["decoder"]])
        is_wordpiece = model["type"] == "WordPiece"
        if '"type": "ByteLevel"' in components and not is_wordpiece:
            byte_of = {letter: byte for byte, letter in enumerate(bytes_to_unicode())}
            spelled: list[bytes | None] = [None] * self.vocab_size
            for token, token_id in self.token_to_id.items():
                if token_id not in added:
                    spelled[token_id] = bytes(byte_of[letter] for letter in token)
                elif not added[token_id].special:
                    spelled[token_id] = token.encode()
            return WordBoundaries.from_bytes(spelled)
        if not is_wordpiece and '"type": "Metaspace"' not in components:
            raise ConfigError(
                f"data.tokenizer={self.name}: its {model['type']} tokens do not show where words begin. "
                "Use data.tokenizer=bytes, or a WordPiece, byte-level or SentencePiece vocabulary."
            )
        tokens: list[str | None] = [None] * self.vocab_size
        starts = [False] * self.vocab_size
        for token, token_id in self.token_to_id.items():
            if token_id not in added or not added[token_id].special:
                tokens[token_id] = token
                continued = is_wordpiece and token.startswith(model["continuing_subword_prefix"])
                starts[token_id] = not continued if is_wordpiece else token.startswith(METASPACE)
        return WordBoundaries.from_marked(tokens, starts)


def bytes_to_unicode() -> list[str]:
    """GPT-2's letter for each byte: the byte itself where it is printable, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_tokenizer(name: str) -> SubwordTokenizer:
    """The tokenizer of data.tokenizer=name.  Raises DataError for a vocabulary that is missing or damaged."""
    path = find_vocabulary(name)
    load = {"tokenizer.json": _load_tokenizer_json, "vocab.txt": _load_wordpiece, "vocab.json": _load_byte_level}
    return SubwordTokenizer(name, load[standard_name(path)](path))


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(read_text(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"{path}: tokenizers {tokenizers.__version__} cannot read this tokenizer.json: {error}. "
            "Fix it, or save it again with the library."
        ) from None


def _load_wordpiece(path: Path) -> tokenizers.Tokenizer:
    lines = read_text(path).removesuffix("\n").split("\n")  # not splitlines: other line breaks are tokens
    token_to_id: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.removesuffix("\r")
        first = token_to_id.setdefault(token, number)
        if not token or first != number:
            problem = f"{token!r} is on line {first + 1} already" if token else "is empty"
            raise DataError(f"{path}: line {number + 1}: {problem}. A vocabulary has one token per line, each once.")
    if "[UNK]" not in token_to_id:
        raise DataError(
            f"{path}: there is no [UNK] among its {len(token_to_id)} lines. Add it: it stands for unknown words."
        )
    config = _tokenizer_config(path)
    tokenizer = tokenizers.Tokenizer(models.WordPiece(token_to_id, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in ("[UNK]", *BERT_TOKENS) if token in token_to_id])
    return tokenizer


def _load_byte_level(path: Path) -> tokenizers.Tokenizer:
    token_to_id = read_json(path)
    if not token_to_id or not all(type(token_id) is int and token_id >= 0 for token_id in token_to_id.values()):
        raise DataError(f"{path}: neither a tokenizer.json, which has a `model`, nor tokens with their ids. Fix it.")
    num_ids = len(set(token_to_id.values()))
    if num_ids < len(token_to_id):
        raise DataError(f"{path}: {len(token_to_id)} tokens share {num_ids} ids. Give each token an id of its own.")
    unknown = "<unk>" if "<unk>" in token_to_id else None
    missing = [letter for letter in bytes_to_unicode() if letter not in token_to_id]
    if missing and not unknown:
        raise DataError(
            f"{path}: {len(missing)} of the 256 bytes have no token, the first {missing[0]!r}, and there is no <unk>. "
            "Add them, or text would be lost."
        )
    merges, merges_path = [], path.with_name("merges.txt")
    for line in read_text(merges_path).split("\n"):
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= token_to_id.keys():
            raise DataError(
                f"{merges_path}: {line!r} is not a pair of tokens of {path.name} that merge into a third. "
                "Use the two files of one vocabulary."
            )
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(token_to_id, merges, unk_token=unknown))
    add_prefix_space = _tokenizer_config(path).get("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in (*EOS_TOKENS, *ROBERTA_TOKENS) if token in token_to_id])
    return tokenizer


def _tokenizer_config(vocabulary: Path) -> dict:
    """The tokenizer_config.json beside a vocabulary; empty if there is none."""
    path = vocabulary.with_name("tokenizer_config.json")
    return read_json(path) if path.exists() else {}
