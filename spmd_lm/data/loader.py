"""Batches as a function of (seed, step, sample) alone.

There is no state to save: resuming is asking for the next step, and each process reads only the rows its devices hold.

R rows, T the context, M microbatches, B rows of each."""

import abc
import functools

import jax
import numpy as np

from spmd_lm.data.batch import Batch
from spmd_lm.data.shuffle import fold, permute
from spmd_lm.errors import DataError

ORDER, SHIFT = 0, 1  # what an epoch draws


class Windows(abc.ABC):
    """Rows cut from one long array of tokens, a np.memmap as well.  A subclass says where each row of a step begins."""

    side: str

    def __init__(self, tokens: np.ndarray, context: int, batch: int, microbatches: int):
        assert tokens.ndim == 1 and batch % microbatches == 0
        if len(tokens) < context + 1:
            raise DataError(
                f"{self.side} text: {len(tokens)} tokens, but a sequence of model.context={context} and its target "
                f"take {context + 1}. Add text, change data.validation, or lower model.context."
            )
        self.tokens, self.context, self.microbatches = tokens, context, microbatches
        self.batch_size = batch

    @abc.abstractmethod
    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The offset of each row's first token, and the weight of the row."""

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Samples start..stop-1 of a step, on the host: fields are [R, T], samples [R]."""
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

    def batch(self, step: int, shardings: Batch) -> Batch:
        """A step on the devices of `shardings`, a Batch of jax.sharding.Sharding: fields [M, B, T], samples [M, B]."""
        per = self.batch_size // self.microbatches
        read = functools.cache(functools.partial(self.rows, step))  # devices with the same rows share one read

        def place(field: str, *rest: int) -> jax.Array:
            def shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # as jax's own type of a callback allows
                first, stop, _ = index[1].indices(per)
                microbatches = range(*index[0].indices(self.microbatches))
                parts = [read(m * per + first, m * per + stop) for m in microbatches]
                return np.stack([getattr(part, field) for part in parts])[:, :, *index[2:]]

            return jax.make_array_from_callback((self.microbatches, per, *rest), getattr(shardings, field), shard)

        long = {name: place(name, self.context) for name in ("tokens", "targets", "weights", "positions")}
        return Batch(**long, segments=None, samples=place("samples"))


class Loader(Windows):
    """The training text: each of its `windows` once per epoch, in an order and at an offset of the epoch's own."""

    side = "training"

    def __init__(self, tokens: np.ndarray, context: int, batch: int, microbatches: int, seed: int):
        super().__init__(tokens, context, batch, microbatches)
        self.seed = seed % 2**64
        # One context of text is room for the offset; a text too short for that has one window and the room it leaves.
        self.windows = max(1, len(tokens) // context - 1)
        self.shifts = min(context, len(tokens) - self.windows * context)

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epoch, index = np.divmod(step * self.batch_size + samples_R, self.windows)
        window = permute(index, self.windows, fold(self.seed, ORDER, epoch))
        shift = (fold(self.seed, SHIFT, epoch) % self.shifts).astype(np.int64)
        return window * self.context + shift, np.ones(len(samples_R))


class ValidationLoader(Windows):
    """At most `count` batches, evenly spaced over the held-out text, always the same; `len` says how many there are.

    Where the text ends before the last batch is full, rows of weight 0 fill it: they never change a result."""

    side = "validation"

    def __init__(self, tokens: np.ndarray, context: int, batch: int, microbatches: int, count: int):
        super().__init__(tokens, context, batch, microbatches)
        available = (len(tokens) - 1) // context
        taken = min(available, batch * count)
        self.offsets = np.arange(taken) * available // taken * context

    def __len__(self) -> int:
        return -(-len(self.offsets) // self.batch_size)

    def locate(self, step: int, samples_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert 0 <= step < len(self)
        index = step * self.batch_size + samples_R
        real = index < len(self.offsets)
        return np.where(real, self.offsets[np.where(real, index, 0)], 0), real
