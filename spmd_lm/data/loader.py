"""The base of all loaders, and the loaders of causal language models and of blends.

Batches are a pure function of (seed, step), so resuming needs no saved state.  They are placed on devices shard by
shard, and each process reads only the rows of its own devices.

Shape suffixes: R rows, M microbatches, B rows per microbatch, T context, S = T + 1."""

import abc
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from spmd_lm.batch import PER_ROW, Batch
from spmd_lm.config.data_sections import Tokens, packs_documents
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.blend import Blend
from spmd_lm.data.shuffle import fold_in, permute
from spmd_lm.data.token_array import TokenArray
from spmd_lm.errors import DataError

SplitName = Literal["training", "validation"]

# Independent random streams of one seed: the order of an epoch, the offset of its windows, the masks of its rows;
# and the seed of each corpus of a blend.
ORDER_STREAM, OFFSET_STREAM, ROW_STREAM, CORPUS_STREAM = range(4)


ORDER_BLOCK = 4096  # indices permuted together, at little more cost than one


class SampleIndices(NamedTuple):
    """The examples of a batch's rows."""

    sample_ids_R: np.ndarray  # index of the row within its step
    example_R: np.ndarray
    epoch_R: np.ndarray | None  # None in validation
    valid_R: np.ndarray  # bool: False for a row that only fills the last batch of validation


class Loader(abc.ABC):
    """One split of a data set as batches.  Epochs shuffle examples: windows of text, or questions with all choices.

    Training shows every example once per epoch, in a new order each epoch.  Validation shows the same `num_validated`
    examples in every evaluation, evenly spaced, as `len(self)` batches: at most train.eval_batches for text, all for a
    task.  Rows of weight 0 fill the last batch; they never change a result.

    bytes_per_token: bytes of text per target id [vocabulary]; None if some targets are not text."""

    bytes_per_token: np.ndarray | None = None

    def __init__(
        self, config: RunConfig, split: SplitName, num_examples: int, rows_per_example: int = 1, seed: int | None = None
    ):
        """rows_per_example: consecutive rows; divides the batch size.  seed: for the order; default train.seed."""
        self.context, self.seed = config.model.context, config.train.seed if seed is None else seed
        self.batch_size, self.microbatches = config.train.batch, config.parallel.microbatches
        assert self.batch_size % self.microbatches == self.batch_size % rows_per_example == 0
        self.split, self.num_examples, self.rows_per_example = split, num_examples, rows_per_example
        self.order_of_block = functools.lru_cache(maxsize=2)(self._compute_order)
        max_text = self.batch_size * config.train.eval_batches
        self.num_validated = min(num_examples, max_text) if config.objective.predicts_tokens else num_examples

    @functools.cached_property
    def target_bytes(self) -> float | None:
        """Bytes of text in the targets of one evaluation; None if tokens do not spell out text."""
        if self.bytes_per_token is None:
            return None
        batches = (self.rows(step, 0, self.batch_size) for step in range(len(self)))
        return math.fsum(float((self.bytes_per_token[batch.targets] * batch.loss_weights).sum()) for batch in batches)

    def __len__(self) -> int:
        """Batches of one evaluation."""
        return -(-self.num_validated * self.rows_per_example // self.batch_size)

    @abc.abstractmethod
    def read(self, indices: SampleIndices) -> Batch:
        """Reads these rows on the host: fields are [R, T], or [R] if in PER_ROW."""

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start..stop-1 of a step, on the host."""
        assert 0 <= start <= stop <= self.batch_size
        return self.read_rows(step, np.arange(start, stop))

    def read_rows(self, step: int, sample_ids_R: np.ndarray) -> Batch:
        assert self.split == "training" or 0 <= step < len(self)
        return self.read_examples((step * self.batch_size + sample_ids_R) // self.rows_per_example, sample_ids_R)

    def read_examples(self, index_R: np.ndarray, sample_ids_R: np.ndarray) -> Batch:
        """The examples at these indices of the run, or of an evaluation, on the host."""
        if self.split == "training":
            example_R = self._order(index_R)
            return self.read(
                SampleIndices(sample_ids_R, example_R, index_R // self.num_examples, np.ones(len(index_R), bool))
            )
        valid_R = index_R < self.num_validated
        example_R = np.where(valid_R, index_R, 0) * self.num_examples // max(self.num_validated, 1)
        return self.read(SampleIndices(sample_ids_R, example_R, None, valid_R))

    def _order(self, index_R: np.ndarray) -> np.ndarray:
        """Maps indices of the run to examples [R]."""
        block_R, place_R = np.divmod(index_R, ORDER_BLOCK)
        example_R = np.empty_like(index_R)
        for block in np.unique(block_R).tolist():
            rows = block_R == block
            example_R[rows] = self.order_of_block(block)[place_R[rows]]
        return example_R

    def _compute_order(self, block: int) -> np.ndarray:
        """Examples at the indices of a block [ORDER_BLOCK]."""
        epoch, index = np.divmod(np.arange(block * ORDER_BLOCK, (block + 1) * ORDER_BLOCK), self.num_examples)
        return permute(index, self.num_examples, fold_in(self.seed, ORDER_STREAM, epoch))

    def batch(self, step: int, shardings: Batch) -> Batch:
        """A step's batch on devices: fields are [M, B, T], or [M, B] if in PER_ROW.
        shardings: a Batch of jax.sharding.Sharding; fields with None are left out."""
        rows_MB = np.arange(self.batch_size).reshape(self.microbatches, -1)
        present = {name: sharding for name, sharding in vars(shardings).items() if sharding is not None}
        shapes = {name: rows_MB.shape + (() if name in PER_ROW else (self.context,)) for name in present}
        indices = [
            index
            for sharding, shape in dict.fromkeys((present[name], shapes[name]) for name in present)
            for index in sharding.addressable_devices_indices_map(shape).values()
        ]
        local_R = np.unique(np.concatenate([rows_MB[index[:2]].ravel() for index in indices]))
        local = self.read_rows(step, local_R)  # once, even if several devices hold a row

        def place(name: str) -> jax.Array:
            field_R = getattr(local, name)
            assert field_R is not None, f"rows have no {name}"

            def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None  # only the type of jax's callback allows None
                return field_R[np.searchsorted(local_R, rows_MB[index[:2]])][:, :, *index[2:]]

            return jax.make_array_from_callback(shapes[name], present[name], read_shard)

        return Batch(**dict.fromkeys(vars(shardings)) | {name: place(name) for name in present})


@contextlib.contextmanager
def batches_ahead(
    loader: Loader, shardings: Batch, steps: range, alone: Collection[int] = ()
) -> Iterator[Iterator[Batch]]:
    """Yields loader.batch of these steps in order, made by a thread while the caller uses the previous batch.
    alone: steps during which the thread must not touch devices."""

    def batches() -> Iterator[Batch]:
        ahead = None
        for step in steps:
            ahead = ahead or pool.submit(loader.batch, step, shardings)
            made = [ahead.result()]  # before the thread competes with the caller again
            is_next = step + 1 in steps and step not in alone
            ahead = pool.submit(loader.batch, step + 1, shardings) if is_next else None
            yield made.pop()  # leaves the caller the only reference

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        yield batches()


def how_to_add_text(config: RunConfig, split: SplitName) -> str:
    """Advice for a split that is too short."""
    if not isinstance(config.data, Tokens):
        return "Add text, change data.validation_fraction"
    if split == "training":
        return "Prepare more text"
    return "Raise split.validation where it is prepared (data.validation_fraction is of Megatron-LM's files alone)"


class CausalLMLoader(Loader):
    """Windows of token ids; targets are the next tokens.  In training, one random offset shifts all windows of an
    epoch.  With data.pack, tokens attend only within their document's part of the row, with positions from 0, and a
    document's first token is no target."""

    def __init__(self, tokens: TokenArray, config: RunConfig, split: SplitName, seed: int | None = None):
        context, size = config.model.context, tokens.size
        if size < context + 1:
            or_none = ", set train.eval_every=0" if split == "validation" else ""
            raise DataError(
                f"{split} text: {size} tokens, but a row of model.context={context} and its last target need "
                f"{context + 1}. {how_to_add_text(config, split)}{or_none}, or lower model.context."
            )
        # Training leaves one context of text for the offset; a text too short for that has one window.
        num_windows = max(1, size // context - 1) if split == "training" else (size - 1) // context
        super().__init__(config, split, num_windows, seed=seed)
        self.tokens, self.num_offsets = tokens, min(context, size - num_windows * context)
        self.document_starts = tokens.document_starts() if packs_documents(config.data) else None

    def read(self, indices: SampleIndices) -> Batch:
        offset_R = indices.example_R * self.context
        if indices.epoch_R is not None:
            offset_R += (fold_in(self.seed, OFFSET_STREAM, indices.epoch_R) % self.num_offsets).astype(np.int64)
        tokens_RS = self.tokens.read(offset_R, self.context + 1)
        shape = len(offset_R), self.context
        batch = Batch(
            tokens=tokens_RS[:, :-1],
            targets=tokens_RS[:, 1:],
            loss_weights=np.broadcast_to(indices.valid_R[:, None], shape).astype(np.float32),
            positions=np.broadcast_to(np.arange(self.context, dtype=np.int32), shape),
            segments=None,
            sample_ids=indices.sample_ids_R.astype(np.int32),
        )
        return batch if self.document_starts is None else pack(batch, self.document_starts, offset_R)


def pack(batch: Batch, document_starts: np.ndarray, offset_R: np.ndarray) -> Batch:
    """Separates the documents within rows.
    offset: each row's first token, numbered as in document_starts [D + 1]."""
    rows, length = batch.tokens.shape
    # Documents that begin after a row's first token; an empty document begins where the next one does.
    begin_R, end_R = (np.searchsorted(document_starts, offset_R + n, side="right") for n in (0, length))
    count_R = end_R - begin_R
    row = np.repeat(np.arange(rows), count_R)
    document = np.arange(len(row)) + np.repeat(begin_R - np.cumsum(count_R) + count_R, count_R)
    starts_RS = np.zeros((rows, length + 1), bool)
    starts_RS[row, document_starts[document] - offset_R[row]] = True
    column_T = np.arange(length, dtype=np.int32)
    first_RT = np.maximum.accumulate(np.where(starts_RS[:, :-1], column_T, 0), axis=1, dtype=np.int32)
    return dataclasses.replace(
        batch,
        loss_weights=batch.loss_weights * ~starts_RS[:, 1:],
        positions=column_T - first_RT,
        segments=np.cumsum(starts_RS[:, :-1], axis=1, dtype=np.int32) + 1,
    )


class BlendLoader(Loader):
    """Examples of several loaders in proportion to `weights`, each loader in its own order (`blend`).  Validation ends
    where the first loader runs out."""

    def __init__(self, loaders: Sequence[Loader], weights: Sequence[float], config: RunConfig, split: SplitName):
        super().__init__(config, split, sum(loader.num_examples for loader in loaders))
        self.loaders, self.blend = loaders, Blend(weights)
        if split == "validation":
            ends = (self.blend.index_of(i, loader.num_examples) for i, loader in enumerate(loaders))
            self.num_validated = min(self.num_validated, *ends)
            counts = self.blend.counts_before(self.num_validated).tolist()
            for loader, count in zip(loaders, counts, strict=True):
                loader.num_validated = count

    def read_examples(self, index_R: np.ndarray, sample_ids_R: np.ndarray) -> Batch:
        corpus_R, nth_R = self.blend.locate(index_R)
        order = np.argsort(corpus_R, kind="stable")
        parts = [
            self.loaders[i].read_examples(nth_R[rows], sample_ids_R[rows])
            for i in np.unique(corpus_R).tolist()
            for rows in [np.flatnonzero(corpus_R == i)]
        ]

        def merge(*fields_R: np.ndarray) -> np.ndarray:
            sorted_R = np.concatenate(fields_R)
            merged_R = np.empty_like(sorted_R)
            merged_R[order] = sorted_R
            return merged_R

        return jax.tree.map(merge, *parts) if parts else self.loaders[0].read_examples(nth_R, sample_ids_R)

    def read(self, indices: SampleIndices) -> Batch:
        raise NotImplementedError("the loaders of the corpora read their own rows")
