"""A task's tokenized examples, which `loader` turns into rows."""

import dataclasses
import functools
import hashlib
import json

import numpy as np

from spmd_lm.config.data_sections import Task
from spmd_lm.data.tasks.files import Example, Question, read_examples
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, check_ids


@dataclasses.dataclass(frozen=True)
class Split:
    """E training or validation examples, each with the same number of text pairs, P in all.

    A text that several examples share, such as an article or a premise, is stored once: X texts, K tokens in all."""

    tokens: np.ndarray  # unsigned [K]: all texts
    bounds: np.ndarray  # int64 [X + 1]: text x is tokens[bounds[x] : bounds[x + 1]]
    offset_mapping: np.ndarray | None  # int32 [K, 2]: each token's characters, start and end; None without questions
    text_pairs: np.ndarray  # int64 [P, 2]: indices of texts; -1 for a second text that is missing
    labels: np.ndarray  # int32 [E]: the class, or the index of the correct choice
    questions: tuple[Question, ...]  # SQuAD's; empty for other tasks
    max_label_location: str  # file and line of an example with the highest label
    skipped_lines: int

    @classmethod
    def from_examples(
        cls, examples: list[Example], skipped_lines: int, tokenizer: Tokenizer, vocab_size: int
    ) -> "Split":
        questions = tuple(example.question for example in examples if example.question)
        pairs = [pair for example in examples for pair in example.text_pairs]
        texts = dict.fromkeys(text for pair in pairs for text in pair if text is not None)  # in order of occurrence
        index_of = {text: index for index, text in enumerate(texts)}
        offset_mapping = None
        if questions:
            ids, offsets = zip(*(tokenizer.encode_with_offsets(text) for text in texts), strict=True)
            offset_mapping = np.concatenate(offsets)
        else:
            ids = tuple(tokenizer.encode(text) for text in texts)
        if tokenizer.vocab_size > vocab_size:
            ids_of = dict(zip(texts, ids, strict=True))
            for example in examples:
                for text in (text for pair in example.text_pairs for text in pair if text is not None):
                    check_ids(ids_of[text], vocab_size, example.location)
        return cls(
            tokens=np.concatenate(ids),
            bounds=np.cumsum([0, *map(len, ids)], dtype=np.int64),
            offset_mapping=offset_mapping,
            text_pairs=np.array([(index_of[a], -1 if b is None else index_of[b]) for a, b in pairs], np.int64),
            labels=np.array([example.label for example in examples], np.int32),
            questions=questions,
            max_label_location=max(examples, key=lambda example: example.label).location,
            skipped_lines=skipped_lines,
        )

    def digest(self) -> bytes:
        digest = hashlib.sha256()
        for array in (self.tokens, self.bounds, self.offset_mapping, self.text_pairs, self.labels):
            if array is not None:
                digest.update(f"{array.dtype.str}:{array.shape} ".encode())
                digest.update(np.ascontiguousarray(array).data)
        for question in self.questions:
            answers = [(answer.text, answer.answer_start) for answer in question.answers]
            digest.update(json.dumps([answers, question.is_impossible]).encode())
        return digest.digest()


@dataclasses.dataclass(frozen=True)
class TaskDataset:
    name: str
    train: Split
    validation: Split
    tokenizer: Tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.train.digest() + self.validation.digest()).hexdigest()

    def describe(self) -> str:
        splits = self.train, self.validation
        skipped = sum(split.skipped_lines for split in splits)
        tokens = sum(split.tokens.size for split in splits)
        return (
            f"{self.name}: {self.train.labels.size:,} training examples, {self.validation.labels.size:,} validation "
            f"examples, {f'{skipped:,} lines skipped, ' if skipped else ''}{tokens:,} tokens, "
            f"sha256 {self.fingerprint[:12]}"
        )


def load_task(data: Task, tokenizer: Tokenizer, vocab_size: int) -> TaskDataset:
    """Reads and tokenizes both splits.  Raises DataError for missing or malformed files, and for a token id not below
    `vocab_size`."""
    sources = (data.paths, "data.path"), (data.validation_paths, "data.validation_path")
    train, validation = (
        Split.from_examples(*read_examples(data.task, *source), tokenizer, vocab_size) for source in sources
    )
    return TaskDataset(f"{data.task}, {', '.join(data.paths)}", train, validation, tokenizer)
