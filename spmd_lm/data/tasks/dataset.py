"""A task's examples, tokenized: what a `Corpus` is for plain text.

A text that several examples share, such as an article or a premise, is stored once.  `features` makes rows of them."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable

import numpy as np

from spmd_lm.config.schema import Task
from spmd_lm.data.tasks.examples import Example, SquadExample
from spmd_lm.data.tasks.files import read_examples
from spmd_lm.data.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenizedTexts:
    """X texts, concatenated: K tokens in all."""

    tokens: np.ndarray  # unsigned [K]
    bounds: np.ndarray  # int64 [X + 1]: text x is tokens[bounds[x] : bounds[x + 1]]
    offset_mapping: np.ndarray | None  # int32 [K, 2]: each token's characters, start and end; None if not needed

    @classmethod
    def from_texts(cls, texts: Iterable[str], tokenizer: Tokenizer, with_offsets: bool) -> "TokenizedTexts":
        offset_mapping = None
        if with_offsets:
            ids, offsets = zip(*(tokenizer.encode_with_offsets(text) for text in texts), strict=True)
            offset_mapping = np.concatenate(offsets)
        else:
            ids = tuple(tokenizer.encode(text) for text in texts)
        bounds = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        return cls(np.concatenate(ids), bounds, offset_mapping)

    def tokens_of(self, text: int) -> slice:
        return slice(self.bounds[text], self.bounds[text + 1])


@dataclasses.dataclass(frozen=True)
class Split:
    """The training or the validation examples: E of them, with `pairs_per_example` text pairs each, P in all."""

    texts: TokenizedTexts
    text_pairs: np.ndarray  # int64 [P, 2]: indices of texts; -1 for a second text that is missing
    labels: np.ndarray  # int32 [E]: the class, or the index of the correct choice
    questions: tuple[SquadExample, ...]  # the examples of SQuAD, whose answers are scored as text; else empty
    max_label_location: str  # where an example with the highest label stands
    skipped_lines: int

    @classmethod
    def from_examples(cls, examples: list[Example], skipped_lines: int, tokenizer: Tokenizer) -> "Split":
        index_of: dict[str, int] = {}  # insertion order: each text where it first occurs
        text_pairs = []
        for example in examples:
            for text, text_pair in example.text_pairs:
                first = index_of.setdefault(text, len(index_of))
                second = -1 if text_pair is None else index_of.setdefault(text_pair, len(index_of))
                text_pairs.append((first, second))
        questions = tuple(example for example in examples if isinstance(example, SquadExample))
        return cls(
            texts=TokenizedTexts.from_texts(index_of, tokenizer, with_offsets=bool(questions)),
            text_pairs=np.array(text_pairs, np.int64),
            labels=np.array([example.label for example in examples], np.int32),
            questions=questions,
            max_label_location=max(examples, key=lambda example: example.label).location,
            skipped_lines=skipped_lines,
        )

    @property
    def pairs_per_example(self) -> int:
        return len(self.text_pairs) // len(self.labels)

    def digest(self) -> bytes:
        """SHA-256 of the tokens, the labels and the answers."""
        digest = hashlib.sha256()
        texts = self.texts
        for array in (texts.tokens, texts.bounds, texts.offset_mapping, self.text_pairs, self.labels):
            if array is not None:
                digest.update(f"{array.dtype.str}:{array.shape} ".encode())
                digest.update(np.ascontiguousarray(array).data)
        for question in self.questions:
            digest.update(json.dumps([question.answers, question.is_impossible]).encode())
        return digest.digest()


@dataclasses.dataclass(frozen=True)
class TaskDataset:
    """Both splits of a task."""

    name: str
    train: Split
    validation: Split
    tokenizer: Tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of both splits, in hex: two runs with the same one saw the same examples."""
        return hashlib.sha256(self.train.digest() + self.validation.digest()).hexdigest()

    def describe(self) -> str:
        """One line: sizes and fingerprint."""
        splits = self.train, self.validation
        skipped = sum(split.skipped_lines for split in splits)
        tokens = sum(split.texts.tokens.size for split in splits)
        return (
            f"{self.name}: {self.train.labels.size:,} training examples, {self.validation.labels.size:,} validation "
            f"examples, {f'{skipped:,} lines skipped, ' if skipped else ''}{tokens:,} tokens, "
            f"sha256 {self.fingerprint[:12]}"
        )


def load(data: Task, tokenizer: Tokenizer) -> TaskDataset:
    """Reads and tokenizes both splits.  Raises DataError for missing or malformed files."""
    train = Split.from_examples(*read_examples(data.task, data.paths, "data.path"), tokenizer)
    validation = Split.from_examples(
        *read_examples(data.task, data.validation_paths, "data.validation_path"), tokenizer
    )
    return TaskDataset(f"{data.task}, {', '.join(data.paths)}", train, validation, tokenizer)
