"""Loaders: what a config's objective reads of a corpus, in training and in validation.

Causal rows are here; those of masked text are in `pieces`, those of labelled examples in `examples`.
R rows, T the context."""

import abc

import numpy as np

from spmd_lm.batch import Batch
from spmd_lm.config.schema import MaskedLM, RunConfig
from spmd_lm.data.batch_source import SHIFT, HeldOut, Rows, Shuffled
from spmd_lm.data.corpus import Corpus
from spmd_lm.data.masked_lm.rows import MaskedLoader, MaskedValidation
from spmd_lm.data.shuffle import fold
from spmd_lm.data.tasks.dataset import TaskDataset
from spmd_lm.data.tasks.loader import TaskLoader, TaskValidationLoader
from spmd_lm.errors import DataError


def training(config: RunConfig, corpus: Corpus | TaskDataset) -> Rows:
    """The batches of every step of this config.

    Raises DataError for too little text and for a label that is no class, ConfigError for an objective that the
    vocabulary has no tokens for."""
    model, t, microbatches = config.model, config.train, config.parallel.microbatches
    if isinstance(corpus, TaskDataset):
        return TaskLoader(corpus.train, corpus.tokenizer, config)
    if isinstance(config.objective, MaskedLM):
        of = corpus.train, corpus.tokenizer, model, config.objective
        return MaskedLoader(*of, t.batch, microbatches, t.seed)
    return Loader(corpus.train, model.context, t.batch, microbatches, t.seed)


def validation(config: RunConfig, corpus: Corpus | TaskDataset) -> HeldOut:
    """The batches that every evaluation of this config looks at, always the same; of labelled examples all.  Raises
    what `training` does."""
    model, t, microbatches = config.model, config.train, config.parallel.microbatches
    if isinstance(corpus, TaskDataset):
        return TaskValidationLoader(corpus.validation, corpus.tokenizer, config)
    if isinstance(config.objective, MaskedLM):
        of = corpus.validation, corpus.tokenizer, model, config.objective
        return MaskedValidation(*of, t.batch, microbatches, t.eval_batches)
    return ValidationLoader(corpus.validation, model.context, t.batch, microbatches, t.eval_batches)


class Windows(Rows):
    """Rows cut from one long array of tokens, a np.memmap as well.  A subclass says where each row of a step begins."""

    def __init__(self, tokens: np.ndarray, context: int, batch: int, microbatches: int):
        assert tokens.ndim == 1 and batch % microbatches == 0
        if len(tokens) < context + 1:
            raise DataError(
                f"{self.side} text: {len(tokens)} tokens, but a sequence of model.context={context} and its target "
                f"take {context + 1}. Add text, change data.validation_fraction, or lower model.context."
            )
        self.tokens, self.context, self.microbatches = tokens, context, microbatches
        self.batch_size = batch

    @abc.abstractmethod
    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each row's first token, and the weight of the row."""

    def rows(self, step: int, start: int, stop: int) -> Batch:
        assert 0 <= start <= stop <= self.batch_size
        samples_R = np.arange(start, stop)
        offsets_R, weights_R = self.locate(step, samples_R)
        span_RT1 = self.tokens[offsets_R[:, None] + np.arange(self.context + 1)].astype(np.int32)
        shape = (stop - start, self.context)
        return Batch(
            tokens=span_RT1[:, :-1],
            targets=span_RT1[:, 1:],
            weights=np.broadcast_to(weights_R[:, None], shape).astype(np.float32),
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), shape),
            segments=None,
            samples=samples_R.astype(np.int32),
        )


class Loader(Windows, Shuffled):
    """The training text: each of its `windows` once per epoch, in an order and at an offset of the epoch's own."""

    def __init__(self, tokens: np.ndarray, context: int, batch: int, microbatches: int, seed: int):
        super().__init__(tokens, context, batch, microbatches)
        self.seed = seed % 2**64
        # One context of text is room for the offset; a text too short for that has one window and the room it leaves.
        self.windows = max(1, len(tokens) // context - 1)
        self.shifts = min(context, len(tokens) - self.windows * context)

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epoch, window = self.turn(step, samples_R)
        shift = (fold(self.seed, SHIFT, epoch) % self.shifts).astype(np.int64)
        return window * self.context + shift, np.ones(len(samples_R))


class ValidationLoader(Windows, HeldOut):
    """At most `count` batches, evenly spaced over the held-out text."""

    def __init__(self, tokens: np.ndarray, context: int, batch: int, microbatches: int, count: int):
        super().__init__(tokens, context, batch, microbatches)
        self.take((len(tokens) - 1) // context, count)

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        window, real = self.turn(step, samples_R)
        return np.where(real, window * self.context, 0), real
