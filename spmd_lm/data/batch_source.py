"""What all loaders share: batches are a pure function of (seed, step), placed on devices shard by shard.

There is no state to save: to resume is to ask for the next step.  Each process reads only the rows of its own devices.

A loader has two parents.  One builds rows (`CausalLMSource`, `MaskedLMSource`, ...); the other, `TrainLoader` or
`ValidationLoader`, chooses which examples a step has.  An example is what an epoch shuffles: a window of text, a
labelled text, or all choices of one question.

Shape suffixes: R rows, M microbatches, B rows per microbatch, T context."""

import abc
import dataclasses
import functools

import jax
import numpy as np

from spmd_lm.batch import PER_ROW, Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.shuffle import fold_in, permute

# Independent random streams of one seed: the order of an epoch, where its windows start, and how its rows are masked.
ORDER_STREAM, OFFSET_STREAM, ROW_STREAM = 0, 1, 2


class BatchSource(abc.ABC):
    """One split of a data set as batches."""

    split: str  # training or validation, as messages name it
    rows_per_example: int = 1  # consecutive rows; divides batch_size

    def __init__(self, config: RunConfig):
        self.context, self.seed = config.model.context, config.train.seed
        self.batch_size, self.microbatches = config.train.batch, config.parallel.microbatches
        assert self.batch_size % self.microbatches == 0

    @abc.abstractmethod
    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start..stop-1 of a step, on the host: fields are [R, T], those of PER_ROW [R]."""

    def batch(self, step: int, shardings: Batch) -> Batch:
        """A step's batch on devices: fields are [M, B, T], those of PER_ROW [M, B].

        shardings: a Batch of jax.sharding.Sharding.  A field whose sharding is None is left out."""
        per_microbatch = self.batch_size // self.microbatches
        read = functools.cache(functools.partial(self.rows, step))  # devices with the same rows share one read

        def place(field: str, sharding: jax.sharding.Sharding) -> jax.Array:
            def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # as the type of jax's callback allows
                start, stop, _ = index[1].indices(per_microbatch)
                firsts = [m * per_microbatch for m in range(*index[0].indices(self.microbatches))]
                parts = [getattr(read(first + start, first + stop), field) for first in firsts]
                assert all(part is not None for part in parts), f"rows have no {field}"
                return np.stack(parts)[:, :, *index[2:]]

            shape = (self.microbatches, per_microbatch, *(() if field in PER_ROW else (self.context,)))
            return jax.make_array_from_callback(shape, sharding, read_shard)

        fields: dict[str, jax.Array | None] = {}
        for field in dataclasses.fields(Batch):
            sharding = getattr(shardings, field.name)
            fields[field.name] = None if sharding is None else place(field.name, sharding)
        return Batch(**fields)


class TrainLoader(BatchSource):
    """Every example once per epoch, in a new order each epoch."""

    split = "training"
    num_examples: int

    def epochs_and_examples(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The epoch [R] and the example [R] of each of these rows of a step."""
        position_R = (step * self.batch_size + sample_ids_R) // self.rows_per_example
        epoch_R, index_R = np.divmod(position_R, self.num_examples)
        return epoch_R, permute(index_R, self.num_examples, fold_in(self.seed, ORDER_STREAM, epoch_R))


class ValidationLoader(BatchSource):
    """The examples `example_ids`, the same in every evaluation, as `len(self)` batches.

    Rows of weight 0 fill the last batch; they never change a result."""

    split = "validation"
    example_ids: np.ndarray

    def __len__(self) -> int:
        return -(-len(self.example_ids) * self.rows_per_example // self.batch_size)

    def choose_examples(self, available: int, max_batches: int) -> None:
        """Evenly spaced among `available` examples, and no more than `max_batches` hold."""
        count = min(available, self.batch_size * max_batches)
        self.example_ids = np.arange(count) * available // count

    def examples_and_validity(self, step: int, sample_ids_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The example [R] of each of these rows of a step, and whether the row counts [R] or only fills the batch."""
        assert 0 <= step < len(self)
        index_R = (step * self.batch_size + sample_ids_R) // self.rows_per_example
        valid_R = index_R < len(self.example_ids)
        return self.example_ids[np.where(valid_R, index_R, 0)], valid_R
