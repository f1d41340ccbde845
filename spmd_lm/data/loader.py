"""Which loader a configuration gets, and the loaders of causal language models.

Masked text is in `masked_lm.rows`, labelled examples are in `tasks.loader`.

Shape suffixes: R rows, T context, S = T + 1."""

import abc

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.data.batch_source import OFFSET_STREAM, BatchSource, TrainLoader, ValidationLoader
from spmd_lm.data.corpus import Corpus
from spmd_lm.data.masked_lm.rows import MaskedLMTrainLoader, MaskedLMValidationLoader
from spmd_lm.data.shuffle import fold_in
from spmd_lm.data.tasks.dataset import TaskDataset
from spmd_lm.data.tasks.loader import TaskLoader, TaskValidationLoader
from spmd_lm.errors import DataError


def make_train_loader(config: RunConfig, data: Corpus | TaskDataset) -> TrainLoader:
    """The batches of every training step.

    Raises DataError for too little text and for a label out of range, ConfigError if the vocabulary lacks the special
    tokens of the objective."""
    if isinstance(data, TaskDataset):
        return TaskLoader(data.train, data.tokenizer, config)
    if isinstance(config.objective, MaskedLM):
        return MaskedLMTrainLoader(data.train, data.tokenizer, config)
    return CausalLMTrainLoader(data.train, config)


def make_validation_loader(config: RunConfig, data: Corpus | TaskDataset) -> ValidationLoader:
    """The batches of every evaluation: at most train.eval_batches of text, all labelled examples.

    Raises the same errors as `make_train_loader`."""
    if isinstance(data, TaskDataset):
        return TaskValidationLoader(data.validation, data.tokenizer, config)
    if isinstance(config.objective, MaskedLM):
        return MaskedLMValidationLoader(data.validation, data.tokenizer, config)
    return CausalLMValidationLoader(data.validation, config)


class CausalLMSource(BatchSource):
    """Windows of one long array of token ids, which may be a np.memmap; targets are the tokens one position later."""

    def __init__(self, tokens: np.ndarray, config: RunConfig):
        super().__init__(config)
        assert tokens.ndim == 1
        self.tokens = tokens
        if len(tokens) < self.context + 1:
            raise DataError(
                f"{self.split} text: {len(tokens)} tokens, but a row of model.context={self.context} and its last "
                f"target need {self.context + 1}. Add text, change data.validation_fraction, or lower model.context."
            )

    @abc.abstractmethod
    def offsets_and_weights(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each row's first token, and the weight of the row."""

    def rows(self, step: int, start: int, stop: int) -> Batch:
        assert 0 <= start <= stop <= self.batch_size
        sample_ids_R = np.arange(start, stop)
        offset_R, weight_R = self.offsets_and_weights(step, sample_ids_R)
        tokens_RS = self.tokens[offset_R[:, None] + np.arange(self.context + 1)].astype(np.int32)
        shape = (stop - start, self.context)
        return Batch(
            tokens=tokens_RS[:, :-1],
            targets=tokens_RS[:, 1:],
            loss_weights=np.broadcast_to(weight_R[:, None], shape).astype(np.float32),
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), shape),
            segments=None,
            sample_ids=sample_ids_R.astype(np.int32),
        )


class CausalLMTrainLoader(CausalLMSource, TrainLoader):
    """Every window once per epoch.  All windows of an epoch are shifted by one random offset."""

    def __init__(self, tokens: np.ndarray, config: RunConfig):
        super().__init__(tokens, config)
        # One context of text is left for the offset; a text too short for that has one window, and what it leaves.
        self.num_examples = max(1, len(tokens) // self.context - 1)
        self.num_offsets = min(self.context, len(tokens) - self.num_examples * self.context)

    def offsets_and_weights(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epoch_R, window_R = self.epochs_and_examples(step, sample_ids_R)
        offset_R = (fold_in(self.seed, OFFSET_STREAM, epoch_R) % self.num_offsets).astype(np.int64)
        return window_R * self.context + offset_R, np.ones(len(sample_ids_R))


class CausalLMValidationLoader(CausalLMSource, ValidationLoader):
    """At most train.eval_batches batches, evenly spaced over the validation text."""

    def __init__(self, tokens: np.ndarray, config: RunConfig):
        super().__init__(tokens, config)
        self.choose_examples((len(tokens) - 1) // self.context, config.train.eval_batches)

    def offsets_and_weights(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        window_R, valid_R = self.examples_and_validity(step, sample_ids_R)
        return np.where(valid_R, window_R * self.context, 0), valid_R
