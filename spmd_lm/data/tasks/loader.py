"""Batches of a task's features, in training and in validation.  R rows of a batch, T the context.

A window is what the shuffle moves as one: a feature, or all the features of one multiple-choice question."""

import abc

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import Classification, RunConfig
from spmd_lm.data.batch_source import BatchSource, TrainLoader, ValidationLoader
from spmd_lm.data.tasks.dataset import Split
from spmd_lm.data.tasks.features import Features
from spmd_lm.data.tokenizers.tokenizer import Tokenizer
from spmd_lm.errors import DataError


class TaskRows(BatchSource):
    """Rows of a split's features.

    Raises ConfigError for a vocabulary without [CLS] and [SEP], DataError for a label that is not a class."""

    def __init__(self, split: Split, tokenizer: Tokenizer, config: RunConfig):
        super().__init__(config)
        self.special, _ = tokenizer.special_tokens_and_words()
        objective = config.objective
        if isinstance(objective, Classification) and (max_label := int(split.labels.max())) >= objective.classes:
            raise DataError(
                f"{split.max_label_location}: label {max_label} is not below objective.classes={objective.classes}. "
                f"Use objective.classes={max_label + 1}, or fix the label."
            )
        self.task_split, self.objective, self.has_token_types = split, objective, config.model.token_types > 0
        self.rows_per_example = objective.rows_per_example
        self.features = Features.from_split(split, self.context, objective)
        self.num_windows = len(self.features.example) // self.rows_per_example
        assert self.batch_size % self.rows_per_example == 0

    def rows(self, step: int, start: int, stop: int) -> Batch:
        assert 0 <= start <= stop <= self.batch_size
        samples_R = np.arange(start, stop)
        window_R, valid_R = self.windows_and_validity(step, samples_R)
        choice_R = samples_R % self.rows_per_example
        rows_R = window_R * self.rows_per_example + choice_R
        encoded = self.features.encode(rows_R, self.task_split.texts.tokens, self.special, self.context)
        end_positions = self.features.end_positions
        return Batch(
            tokens=encoded.tokens,
            targets=None,
            loss_weights=None,
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), encoded.tokens.shape),
            segments=encoded.attention_mask,
            sample_ids=samples_R.astype(np.int32),
            token_type_ids=encoded.token_types if self.has_token_types else None,
            labels=self.features.labels[rows_R],
            end_positions=None if end_positions is None else end_positions[rows_R],
            label_weights=(valid_R & (choice_R == 0)).astype(np.float32),
        )

    @abc.abstractmethod
    def windows_and_validity(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The window of each row, int [R]; and whether it counts, bool [R]."""


class TaskLoader(TaskRows, TrainLoader):
    """Training batches: each window once per epoch, shuffled."""

    def __init__(self, split: Split, tokenizer: Tokenizer, config: RunConfig):
        super().__init__(split, tokenizer, config)
        self.num_examples = self.num_windows

    def windows_and_validity(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, window_R = self.epochs_and_examples(step, sample_ids_R)
        return window_R, np.ones(len(window_R), bool)


class TaskValidationLoader(TaskRows, ValidationLoader):
    """Validation batches: the whole split, in order."""

    def __init__(self, split: Split, tokenizer: Tokenizer, config: RunConfig):
        super().__init__(split, tokenizer, config)
        self.example_ids = np.arange(self.num_windows)

    def windows_and_validity(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.examples_and_validity(step, sample_ids_R)

    @property
    def num_examples(self) -> int:
        """Of the split; a long one may have several windows."""
        return len(self.task_split.labels)
