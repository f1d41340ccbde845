"""What every loader is: rows as a function of (seed, step, sample) alone, put on devices a shard at a time.

There is no state to save: resuming is asking for the next step, and each process reads only the rows its devices hold.

R rows, T the context, M microbatches, B rows of each."""

import abc
import dataclasses
import functools

import jax
import numpy as np

from spmd_lm.batch import PER_ROW, Batch
from spmd_lm.data.shuffle import fold, permute

ORDER, SHIFT, DRAWS = 0, 1, 2  # what an epoch draws


class Rows(abc.ABC):
    """One side of a text as batches.  A subclass says what a row is, another in which order they come."""

    side: str  # of the text: training or validation
    context: int
    batch_size: int  # rows of a step
    microbatches: int
    together: int = 1  # rows of one window, which follow each other; they divide batch_size

    @abc.abstractmethod
    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Samples start..stop-1 of a step, on the host: fields are [R, T], those of PER_ROW [R]."""

    def batch(self, step: int, shardings: Batch) -> Batch:
        """A step on the devices of `shardings`, a Batch of jax.sharding.Sharding: fields [M, B, T], PER_ROW [M, B].

        A field without a sharding is left out."""
        per = self.batch_size // self.microbatches
        read = functools.cache(functools.partial(self.rows, step))  # devices with the same rows share one read

        def place(field: str, sharding: jax.sharding.Sharding) -> jax.Array:
            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # as jax's own type of a callback allows
                first, stop, _ = index[1].indices(per)
                microbatches = range(*index[0].indices(self.microbatches))
                parts = [getattr(read(m * per + first, m * per + stop), field) for m in microbatches]
                assert all(part is not None for part in parts), f"rows have no {field}"
                return np.stack(parts)[:, :, *index[2:]]

            shape = (self.microbatches, per, *(() if field in PER_ROW else (self.context,)))
            return jax.make_array_from_callback(shape, sharding, shard)

        wanted = {field.name: getattr(shardings, field.name) for field in dataclasses.fields(Batch)}
        return Batch(**{name: None if sharding is None else place(name, sharding) for name, sharding in wanted.items()})


class Shuffled(Rows):
    """Training: each of `windows` stretches of text once per epoch, in an order of the epoch's own."""

    side = "training"
    windows: int
    seed: int  # below 2**64

    def turn(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The epoch of each row, and its window."""
        epoch, index = np.divmod((step * self.batch_size + samples_R) // self.together, self.windows)
        return epoch, permute(index, self.windows, fold(self.seed, ORDER, epoch))


class HeldOut(Rows):
    """Validation: `taken` windows, evenly spaced and always the same, as `len` batches.

    Where they end before the last batch is full, rows of weight 0 fill it: they never change a result."""

    side = "validation"
    taken: np.ndarray

    def __len__(self) -> int:
        return -(-len(self.taken) * self.together // self.batch_size)

    def take(self, available: int, count: int) -> None:
        """At most `count` batches of `available` windows."""
        taken = min(available, self.batch_size * count)
        self.taken = np.arange(taken) * available // taken

    def turn(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The window of each row, and whether it counts."""
        assert 0 <= step < len(self)
        index = (step * self.batch_size + samples_R) // self.together
        real = index < len(self.taken)
        return self.taken[np.where(real, index, 0)], real
