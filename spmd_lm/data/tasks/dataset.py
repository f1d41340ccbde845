"""A task's examples, tokenised: what stands for a task where a `sources.Corpus` stands for text.

Texts that several examples share, an article or a premise, are there once.  Rows are made of them in `examples`."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable

import numpy as np

from spmd_lm.config.schema import Task
from spmd_lm.data.tasks import files
from spmd_lm.data.tasks.files import Example, Question
from spmd_lm.data.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Texts:
    """X texts, end to end, of K tokens together."""

    tokens: np.ndarray  # unsigned [K]
    bounds: np.ndarray  # int64 [X + 1]: text x is tokens[bounds[x] : bounds[x + 1]]
    offsets: np.ndarray | None  # int32 [K, 2]: the characters that a token is of; None where nobody asks

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: Tokenizer, located: bool) -> "Texts":
        if located:
            ids, offsets = zip(*(tokenizer.encode_with_offsets(text) for text in texts), strict=True)
        else:
            ids, offsets = tuple(tokenizer.encode(text) for text in texts), ()
        bounds = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return cls(np.concatenate(ids), bounds, np.concatenate(offsets) if located else None)

    def within(self, text: int) -> slice:
        return slice(self.bounds[text], self.bounds[text + 1])


@dataclasses.dataclass(frozen=True)
class Side:
    """Examples to train on, or to be judged by; each of `together` pairs, P of E."""

    texts: Texts
    pairs: np.ndarray  # int64 [P, 2]: numbers of texts; -1 in place of a second that is not there
    labels: np.ndarray  # int32 [E]: the class, or the choice that is right
    questions: tuple[Question, ...]  # whose answers stand in the second text; of other tasks none
    highest: str  # where an example with the highest label stands
    left_out: int  # lines that are no example

    @classmethod
    def of(cls, examples: list[Example], left_out: int, tokenizer: Tokenizer) -> "Side":
        number: dict[str, int] = {}

        def known(text: str | None) -> int:
            return -1 if text is None else number.setdefault(text, len(number))

        pairs = np.array([[known(text) for text in pair] for each in examples for pair in each.pairs], np.int64)
        questions = tuple(each for each in examples if isinstance(each, Question))
        return cls(
            texts=Texts.of(number, tokenizer, located=bool(questions)),
            pairs=pairs,
            labels=np.array([each.label for each in examples], np.int32),
            questions=questions,
            highest=max(examples, key=lambda each: each.label).where,
            left_out=left_out,
        )

    @property
    def together(self) -> int:
        return len(self.pairs) // len(self.labels)

    def digest(self) -> bytes:
        """SHA-256 of the tokens and of what is asked of them."""
        digest = hashlib.sha256()
        texts = self.texts
        for array in (texts.tokens, texts.bounds, texts.offsets, self.pairs, self.labels):
            if array is not None:
                digest.update(f"{array.dtype.str}:{array.shape} ".encode())
                digest.update(np.ascontiguousarray(array).data)
        for each in self.questions:
            digest.update(json.dumps([each.answers, each.impossible]).encode())
        return digest.digest()


@dataclasses.dataclass(frozen=True)
class Labelled:
    name: str
    train: Side
    validation: Side
    tokenizer: Tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both sides, in hex: two runs with the same one saw the same examples."""
        return hashlib.sha256(self.train.digest() + self.validation.digest()).hexdigest()

    def describe(self) -> str:
        sides = self.train, self.validation
        left_out = sum(side.left_out for side in sides)
        return (
            f"{self.name}: {self.train.labels.size:,} examples to train on, {self.validation.labels.size:,} held out, "
            f"{f'{left_out:,} lines left out, ' if left_out else ''}"
            f"{sum(side.texts.tokens.size for side in sides):,} tokens, sha256 {self.fingerprint[:12]}"
        )


def load(data: Task, tokenizer: Tokenizer) -> Labelled:
    """Raises DataError for files that are missing or malformed."""
    train = Side.of(*files.read(data.task, data.paths, "data.path"), tokenizer)
    validation = Side.of(*files.read(data.task, data.held_out, "data.validation_path"), tokenizer)
    return Labelled(f"{data.task}, {', '.join(data.paths)}", train, validation, tokenizer)
