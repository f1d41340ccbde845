"""A run's text: where it comes from, and what of it is held out.

A document goes to validation by a hash of its name, so that adding files moves no other one between the two sides,
and no document is ever on both."""

import dataclasses
import functools
import hashlib
import math
import platform
from typing import Protocol

import numpy as np

from spmd_lm.config.schema import PythonStdlib, Synthetic, Task, Text
from spmd_lm.data.shuffle import fold, permute
from spmd_lm.data.tasks import dataset
from spmd_lm.data.text_files import Document, standard_library, text_files
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, make
from spmd_lm.errors import ConfigError, DataError

SYNTHETIC_TRAIN = 2**20
SYNTHETIC_VALIDATION = 2**16


class Source(Protocol):
    """What a run says of its data, be it a `Corpus` or `dataset.TaskDataset`."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex, the same of the same data."""
        ...

    def describe(self) -> str:
        """One line, with its figures."""
        ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    name: str
    train: np.ndarray  # tokens, 1-D, unsigned
    validation: np.ndarray
    documents: int
    bytes: int  # of text; of tokens where there is no text
    tokenizer: Tokenizer  # tells where words begin, and what parts documents

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both sides, in hex: two runs with the same one saw the same tokens."""
        sides = self.train, self.validation
        digest = hashlib.sha256(" ".join(f"{side.dtype.str}:{side.size}" for side in sides).encode())
        for side in sides:
            digest.update(np.ascontiguousarray(side).data)
        return digest.hexdigest()

    def describe(self) -> str:
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents"
        return (
            f"{self.name}: {documents}, {self.bytes / 1e6:.2f} MB, {self.train.size:,} tokens to train on, "
            f"{self.validation.size:,} held out, sha256 {self.fingerprint[:12]}"
        )


def load(data: PythonStdlib | Text | Task | Synthetic, seed: int, vocab: int) -> Corpus | dataset.TaskDataset:
    """The tokens of a run, or its examples.  `seed` matters to synthetic data alone.

    Raises DataError for text that is missing, empty, unreadable or not UTF-8, for malformed examples, for a damaged
    vocabulary, and for a token not below `vocab`; ConfigError for a vocabulary of a file that is larger than that."""
    if isinstance(data, Synthetic):
        return _markov(data, seed % 2**64, vocab)
    tokenizer = make(data)
    if data.tokenizer != "bytes" and tokenizer.vocab > vocab:  # of bytes, the ones there are decide
        raise ConfigError(
            f"model.vocab={vocab} is less than the {tokenizer.vocab} tokens of data.tokenizer={data.tokenizer}. "
            f"Use model.vocab={tokenizer.vocab} or more."
        )
    if isinstance(data, Task):
        return dataset.load(data, tokenizer)
    if isinstance(data, PythonStdlib):
        name, documents = f"Python {platform.python_version()} standard library", standard_library()
    else:
        name, documents = ", ".join(data.paths), text_files(data.paths)
    return _corpus(name, documents, tokenizer, data.validation_fraction, vocab)


def _corpus(name: str, documents: list[Document], tokenizer: Tokenizer, fraction: float, vocab: int) -> Corpus:
    encoded = [tokenizer.encode(document.text) for document in documents]
    for document, tokens in zip(documents, encoded, strict=True):
        _check(document, tokens, vocab)
    if len(documents) == 1:
        cut = int((1 - fraction) * len(encoded[0]))
        train, validation = encoded[0][:cut], encoded[0][cut:]
    else:
        held_out = hold_out([document.name for document in documents], fraction)
        train = _join([tokens for tokens, held in zip(encoded, held_out, strict=True) if not held], tokenizer.end)
        validation = _join([tokens for tokens, held in zip(encoded, held_out, strict=True) if held], tokenizer.end)
    return Corpus(name, train, validation, len(documents), sum(len(each.text) for each in documents), tokenizer)


def hold_out(names: list[str], fraction: float) -> list[bool]:
    """Which of two or more documents are for validation: about `fraction` of them, each by its name alone.

    Where that would leave a side empty, the nearest document moves there."""
    draws = [_uniform(name) for name in names]
    held_out = [draw < fraction for draw in draws]
    held_out[draws.index(min(draws))] = True
    held_out[len(draws) - 1 - draws[::-1].index(max(draws))] = False  # the last of equals: two of one name still part
    return held_out


def _uniform(name: str) -> float:
    """A number in [0, 1) that is `name`'s own."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6]) / 2**48


def _check(document: Document, tokens: np.ndarray, vocab: int) -> None:
    if tokens.max(initial=0) >= vocab:
        offset = int(np.argmax(tokens >= vocab))
        raise DataError(
            f"{document.path}: token {tokens[offset]} at offset {offset} is not below model.vocab={vocab}. "
            f"Use model.vocab={int(tokens.max()) + 1} or more, or mend the text."
        )


def _join(pieces: list[np.ndarray], end: int | None) -> np.ndarray:
    """One array, `end` between the pieces where there is one."""
    separator = np.array([] if end is None else [end], pieces[0].dtype)
    return np.concatenate([part for piece in pieces for part in (separator, piece)][1:])


def _markov(data: Synthetic, seed: int, vocab: int) -> Corpus:
    """A chain in which each token has `branching` equally likely successors, and as many predecessors.

    State c steps to (branching * c + draw + 1) mod vocab, a de Bruijn graph: any token follows any other within
    log(vocab) / log(branching) steps, and all are equally frequent.  A permutation then hides the arithmetic, so that a
    model must learn a table.  The recurrence is linear, hence a scan of log2(length) passes and no loop over tokens."""
    branching = data.branching
    if branching > vocab:
        raise ConfigError(
            f"data.branching={branching}: no token has more successors than model.vocab={vocab} has tokens. "
            f"Use data.branching={min(4, vocab)}, or a larger model.vocab."
        )
    length = SYNTHETIC_TRAIN + SYNTHETIC_VALIDATION
    states = (fold(seed, 1, np.arange(length)) % branching + 1).astype(np.int64)
    reach, factor = 1, branching
    while reach < length:
        states[reach:] = (states[reach:] + factor * states[:-reach]) % vocab
        reach, factor = 2 * reach, factor * factor % vocab
    names = permute(np.arange(vocab), vocab, fold(seed, 0)).astype(np.min_scalar_type(vocab - 1))
    tokens = names[states % vocab]
    name = f"Markov chain of {math.log(branching):.4f} nat per token"
    return Corpus(name, tokens[:SYNTHETIC_TRAIN], tokens[SYNTHETIC_TRAIN:], 1, tokens.nbytes, make(data))
