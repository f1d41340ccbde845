"""Vocabularies of files, through the `tokenizers` library.

data.tokenizer names one of these, or a directory that has one, searched for in this order:
  tokenizer.json   as Hugging Face writes it
  vocab.txt        BERT's WordPiece, one piece a line
  vocab.json       GPT-2's byte-level BPE, its merges.txt beside it
What the last two leave open, a tokenizer_config.json beside them says: do_lower_case, strip_accents,
tokenize_chinese_chars; add_prefix_space."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import ArrayLike
from tokenizers import decoders, models, normalizers, pre_tokenizers

from spmd_lm.data.masked_lm.word_boundaries import Special, Words, of_bytes, of_pieces
from spmd_lm.data.tokenizers.vocabulary import find
from spmd_lm.errors import ConfigError, DataError

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # what parts documents, the first there is
BEGINS = ("<s>", "<|begin_of_text|>", "<bos>")  # what a prompt begins with; where there is none, what parts documents
MARKS = (("[CLS]", "[SEP]", "[MASK]", "[PAD]"), ("<s>", "</s>", "<mask>", "<pad>"))  # of masked rows
WORD_MARK = "\u2581"  # SentencePiece begins a word with it


class SubwordTokenizer:
    """A vocabulary of the library.  What a text says of [MASK] is text where there is a [MASK]."""

    def __init__(self, name: str, library: tokenizers.Tokenizer):
        library.no_truncation()
        library.no_padding()
        self.name, self.library = name, library
        self.ids: dict[str, int] = library.get_vocab(with_added_tokens=True)
        self.vocab = max(self.ids.values()) + 1
        self.dtype = np.min_scalar_type(self.vocab - 1)
        first = lambda marks: next((self.ids[mark] for mark in marks if mark in self.ids), None)  # noqa: E731
        self.end, self.begin = first(ENDS), first((*BEGINS, *ENDS))
        library.encode_special_tokens = not self._missing()

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        text = data.decode("utf-8", "replace")  # a document is UTF-8; of a command line, what is not shows as U+FFFD
        (encoding,) = self.library.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def located(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        (encoding,) = self.library.encode_batch([text], add_special_tokens=False)  # the fast one tells no offsets
        return np.array(encoding.ids, self.dtype), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def decode(self, ids: ArrayLike) -> str:
        """Special tokens by their names; an id of the padding of the vocabulary has no text."""
        ids = np.asarray(ids)
        return self.library.decode(ids[ids < self.vocab].tolist(), skip_special_tokens=False)

    def masking(self) -> tuple[Special, Words]:
        if missing := self._missing():
            raise ConfigError(
                f"data.tokenizer={self.name}: it has no {', '.join(missing)}. "
                "Use data.tokenizer=bytes or a BERT's, or objective.kind=causal_lm with model.kind=gpt."
            )
        marks = next(marks for marks in MARKS if all(mark in self.ids for mark in marks))
        return Special(*(self.ids[mark] for mark in marks)), self._words

    def _missing(self) -> list[str]:
        """Marks of masked rows that the vocabulary has not, of the spelling that it has most of."""
        return min(([mark for mark in marks if mark not in self.ids] for marks in MARKS), key=len)

    @functools.cached_property
    def _words(self) -> Words:
        pieces: list[str | None] = [None] * self.vocab
        for piece, number in self.ids.items():
            pieces[number] = piece
        added = self.library.get_added_tokens_decoder()
        for number, token in added.items():
            pieces[number] = None if token.special else token.content
        plan = json.loads(self.library.to_str())
        if plan["model"]["type"] == "WordPiece":
            inside = plan["model"]["continuing_subword_prefix"]
            return of_pieces(pieces, [piece is not None and not piece.startswith(inside) for piece in pieces])
        kinds = _kinds(plan["pre_tokenizer"]) | _kinds(plan["decoder"])
        if "ByteLevel" in kinds:
            byte = {letter: number for number, letter in enumerate(_letters())}
            spelled = lambda piece: bytes(byte[letter] for letter in piece)  # noqa: E731
            plain = lambda number, piece: piece.encode() if number in added else spelled(piece)  # noqa: E731
            return of_bytes([None if piece is None else plain(number, piece) for number, piece in enumerate(pieces)])
        if "Metaspace" in kinds:
            return of_pieces(pieces, [piece is not None and piece.startswith(WORD_MARK) for piece in pieces])
        raise ConfigError(
            f"data.tokenizer={self.name}: its {plan['model']['type']} pieces do not say "
            "where words begin. Use data.tokenizer=bytes, or a WordPiece, byte-level or SentencePiece vocabulary."
        )


def _kinds(part: Any) -> set[str]:
    """The types of a part of a tokenizer.json, nested ones too."""
    if isinstance(part, list):
        return set().union(*map(_kinds, part))
    if isinstance(part, dict):
        return {part["type"]} | _kinds([*part.values()]) if "type" in part else _kinds([*part.values()])
    return set()


def _letters() -> list[str]:
    """How byte-level vocabularies spell each byte: as itself where it is printable, else as a letter from U+0100 on."""
    spelled = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in spelled else next(others)) for byte in range(256)]


# --- files ------------------------------------------------------------------------------------------------------------


def read(name: str) -> SubwordTokenizer:
    """The vocabulary at the path `name`, of a file or a directory.  DataError says what is wrong with it."""
    path = find(name)
    return SubwordTokenizer(name, _wordpiece(path) if path.suffix == ".txt" else _of_json(path))


def _of_json(path: Path) -> tokenizers.Tokenizer:
    tree = _json(path)
    if not isinstance(tree.get("model"), dict):  # GPT-2 has a piece of this name
        return _byte_level(path, tree)
    try:
        return tokenizers.Tokenizer.from_str(_text(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"{path}: tokenizers {tokenizers.__version__} does not read this tokenizer.json: {error}. "
            "Mend it, or write it again with the library."
        ) from None


def _wordpiece(path: Path) -> tokenizers.Tokenizer:
    pieces = _text(path).removesuffix("\n").split("\n")  # not splitlines: other ends of lines are pieces
    pieces = [piece.removesuffix("\r") for piece in pieces]
    first: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        if not piece or (before := first.setdefault(piece, number)) != number:
            what = f"{piece!r} stands in line {before + 1} already" if piece else "is empty"
            raise DataError(f"{path}: line {number + 1}: {what}. A vocabulary has one piece a line, each once.")
    if "[UNK]" not in first:
        raise DataError(
            f"{path}: there is no [UNK] among its {len(first)} lines. Add it: words need it that have no pieces."
        )
    says = _config(path)
    library = tokenizers.Tokenizer(models.WordPiece(first, unk_token="[UNK]", max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=says.get("tokenize_chinese_chars", True),
        strip_accents=says.get("strip_accents"),
        lowercase=says.get("do_lower_case", True),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    library.add_special_tokens([mark for mark in ("[UNK]", *MARKS[0]) if mark in first])
    return library


def _byte_level(path: Path, ids: dict[str, Any]) -> tokenizers.Tokenizer:
    if not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise DataError(
            f"{path}: neither a tokenizer.json, which has a `model`, nor pieces with their numbers. Mend it."
        )
    if len(set(ids.values())) < len(ids):
        raise DataError(f"{path}: {len(ids)} pieces have {len(set(ids.values()))} numbers. Give each its own.")
    unknown = "<unk>" if "<unk>" in ids else None
    if not unknown and (lost := [letter for letter in _letters() if letter not in ids]):
        raise DataError(
            f"{path}: {len(lost)} of the 256 bytes have no piece, the first {lost[0]!r}, and there is no <unk>. "
            "Add them, or text would be lost."
        )
    beside = path.with_name("merges.txt")
    lines = _text(beside).split("\n")
    merges = []
    for line in (line for line in lines if line and not line.startswith("#version")):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= ids.keys():
            raise DataError(
                f"{beside}: {line!r} is no pair of pieces that {path.name} has, with what they make. "
                "Use the two files of one vocabulary."
            )
        merges.append((left, right))
    library = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=_config(path).get("add_prefix_space", False))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([mark for mark in (*ENDS, *MARKS[1]) if mark in ids])
    return library


def _config(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a vocabulary; empty if there is none."""
    beside = path.with_name("tokenizer_config.json")
    return _json(beside) if beside.exists() else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}. Mend it, or fetch the file again.") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(tree).__name__}. Fetch the file again.")
    return tree


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8. Fetch the file again.") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. A vocab.json needs its merges.txt beside it.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Mend its permissions.") from None
