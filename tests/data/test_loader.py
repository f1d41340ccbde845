import threading
import time
import weakref
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.loader import CausalLMLoader, batches_ahead
from spmd_lm.data.token_array import TokensInMemory
from spmd_lm.errors import DataError

TOKENS = np.arange(1000, dtype=np.uint16)  # a token is its own offset
FIELDS = ("tokens", "targets", "loss_weights", "positions", "sample_ids")


def config(context: int = 16, batch: int = 8, microbatches: int = 2, **train: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"layers": 1, "width": 8, "heads": 1, "context": context, "vocab": 1000},
            "data": {"source": "synthetic"},
            "optim": {"lr": 0.1},
            "parallel": {"microbatches": microbatches},
            "train": {"steps": 1, "batch": batch, "seed": 5, **train},
        }
    )


def loader(tokens: np.ndarray = TOKENS, **changes: int) -> CausalLMLoader:
    return CausalLMLoader(TokensInMemory(tokens, None), config(**changes), "training")


def validation_loader(tokens: np.ndarray, batch: int, max_batches: int) -> CausalLMLoader:
    run = config(batch=batch, microbatches=1, eval_batches=max_batches)
    return CausalLMLoader(TokensInMemory(tokens, None), run, "validation")


def assert_same(actual: Batch, expected: Batch) -> None:
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field), err_msg=field)


@given(step=st.integers(0, 10**9), cuts=st.sets(st.integers(1, 7)))
def test_rows_do_not_depend_on_the_ranges_they_are_read_in(step, cuts):
    whole = loader().rows(step, 0, 8)
    edges = [0, *sorted(cuts), 8]
    parts = [loader().rows(step, start, stop) for start, stop in pairwise(edges)]
    assert_same(jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), whole)


def test_targets_are_the_next_tokens():
    rows = loader().rows(3, 2, 6)
    assert (rows.tokens == rows.tokens[:, :1] + np.arange(16)).all() and (rows.targets == rows.tokens + 1).all()
    assert (rows.loss_weights == 1).all() and (rows.positions == np.arange(16)).all()
    assert rows.sample_ids.tolist() == [2, 3, 4, 5] and rows.segments is None
    dtypes = {field: str(getattr(rows, field).dtype) for field in FIELDS}
    assert dtypes == dict.fromkeys(FIELDS, "int32") | {"loss_weights": "float32"}


@given(
    length=st.integers(5, 400),
    context=st.integers(1, 40),
    batch=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 50),
)
def test_every_epoch_has_each_window_once(length, context, batch, seed, epoch):
    if length <= context:
        return
    cut = loader(tokens=TOKENS[:length], context=context, batch=batch, microbatches=1, seed=seed)
    first, last = epoch * cut.num_examples, (epoch + 1) * cut.num_examples
    steps = [cut.rows(step, 0, batch).tokens[:, 0] for step in range(first // batch, (last - 1) // batch + 1)]
    starts = np.concatenate(steps)[first % batch :][: cut.num_examples]
    assert np.array_equal(np.sort(starts), starts.min() + context * np.arange(cut.num_examples))
    # What no epoch reaches is the room for its offset: less than two windows.
    assert length - cut.num_examples * context < 2 * context or cut.num_examples == 1


def test_every_offset_occurs_and_every_token_is_seen():
    cut = loader()
    starts = np.concatenate([cut.rows(step, 0, 8).tokens[:, 0] for step in range(200 * cut.num_examples // 8)])
    assert set(starts % 16) == set(range(16))
    seen = np.unique(starts[:, None] + np.arange(17))
    assert seen[0] == 0 and seen[-1] >= 990 and len(seen) == seen[-1] + 1


def test_every_epoch_and_seed_has_its_own_order():
    def order(seed, epoch):
        cut = loader(seed=seed, batch=61, microbatches=1)  # one epoch is one step
        assert cut.num_examples == 61
        return cut.rows(epoch, 0, 61).tokens[:, 0].argsort().tolist()

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(each) for each in orders}) == 9 and sorted(range(61)) not in orders


def test_reading_one_step_equals_running_up_to_it():
    running = loader()
    for step in range(40):
        rows = running.rows(step, 0, 8)
    assert_same(loader().rows(39, 0, 8), rows)


def test_microbatches_do_not_change_what_a_step_reads():
    assert_same(loader(microbatches=8).rows(4, 0, 8), loader(microbatches=1).rows(4, 0, 8))


def test_a_memory_map_reads_the_same(tmp_path):
    TOKENS.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", TOKENS.dtype, mode="r")
    assert_same(loader(tokens=mapped).rows(7, 0, 8), loader().rows(7, 0, 8))


def test_the_shortest_text_is_one_window():
    cut = loader(tokens=TOKENS[:17])
    assert (cut.rows(100, 0, 8).tokens == np.arange(16)).all()


@pytest.mark.parametrize("split", ["training", "validation"])
def test_too_short_a_text_is_an_error_with_its_sizes(split):
    with pytest.raises(DataError, match=f"{split} text: 16 tokens.*model.context=16.*need 17.*Add text"):
        CausalLMLoader(TokensInMemory(TOKENS[:16], None), config(), split)


SPECS = {
    "replicated": (P(), P()),
    "rows over data": (P(None, "data"), P(None, "data")),
    "rows over both": (P(None, ("data", "model")), P(None, ("data", "model"))),
    "microbatches over data": (P("data"), P("data")),
    "rows and time": (P(None, "data", "model"), P(None, "data")),
    "all three": (P("data", "model", "time"), P("data", "model")),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_sharded_batch_equals_the_rows_on_the_host(name):
    """The mesh (2, 2, 2): 16 samples in 4 microbatches divide along any of its axes."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "time"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    long, short = (NamedSharding(mesh, spec) for spec in SPECS[name])
    cut = loader(batch=16, microbatches=4)
    batch = cut.batch(9, Batch(long, long, long, long, None, short))
    expected = jax.tree.map(lambda leaf: leaf.reshape(4, 4, *leaf.shape[1:]), cut.rows(9, 0, 16))
    assert_same(batch, expected)
    assert batch.tokens.sharding == long and batch.sample_ids.sharding == short and batch.segments is None
    for shard in batch.targets.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected.targets[shard.index])


def test_devices_that_share_rows_share_a_read(monkeypatch):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "data"))
    cut, reads = loader(), []
    read_rows = cut.read_rows
    monkeypatch.setattr(cut, "read_rows", lambda step, rows: reads.append((step, *rows)) or read_rows(step, rows))
    cut.batch(1, Batch(sharding, sharding, sharding, sharding, None, sharding))
    assert reads == [(1, *range(8))]


def test_validation_is_evenly_spaced_and_fixed():
    held_out = validation_loader(TOKENS, 4, max_batches=3)  # 12 of the 62 windows
    starts = np.concatenate([held_out.rows(step, 0, 4).tokens[:, 0] for step in range(len(held_out))])
    assert len(held_out) == 3 and starts[0] == 0 and (starts % 16 == 0).all()
    assert set(np.diff(starts) // 16) == {5, 6}


def test_validation_pads_its_end_with_weight_0():
    held_out = validation_loader(TOKENS[:97], 4, max_batches=8)  # 6 windows exactly
    assert len(held_out) == 2
    both = [held_out.rows(step, 0, 4) for step in range(2)]
    starts = np.concatenate([rows.tokens[:, 0] for rows in both])
    weights = np.concatenate([rows.loss_weights for rows in both])
    assert starts[:6].tolist() == [0, 16, 32, 48, 64, 80]
    assert (weights[:6] == 1).all() and (weights[6:] == 0).all()


@given(batch=st.integers(1, 12), length=st.integers(17, 1000))
def test_the_same_windows_are_validated_at_any_batch_size(batch, length):
    held_out = validation_loader(TOKENS[:length], batch, max_batches=1000)
    rows = [held_out.rows(step, 0, batch) for step in range(len(held_out))]
    starts = np.concatenate([each.tokens[each.loss_weights[:, 0] > 0, 0] for each in rows])
    assert starts.tolist() == list(range(0, length - 16, 16))


def test_batches_are_made_ahead_in_order_and_what_goes_wrong_is_raised_at_its_step():
    made = []

    class Numbers:
        def batch(self, step, shardings):
            made.append(step)
            if step == 5:
                raise DataError("the file is gone")
            return step, shardings

    loader = Numbers()
    with batches_ahead(loader, "shardings", range(3, 9)) as batches:
        assert next(batches) == (3, "shardings")
        assert next(batches) == (4, "shardings")
        with pytest.raises(DataError, match="the file is gone"):
            next(batches)
    assert made == [3, 4, 5]
    with batches_ahead(loader, None, range(7, 8)) as batches:
        assert [*batches] == [(7, None)]
    with batches_ahead(loader, None, range(7, 7)) as batches:
        assert not [*batches]


def test_during_some_steps_no_batch_is_made():
    made = []

    class Numbers:
        def batch(self, step, shardings):
            made.append((step, threading.current_thread() is threading.main_thread()))
            return step

    with batches_ahead(Numbers(), None, range(3, 9), alone={3, 6}) as batches:
        for step in range(3, 9):
            assert next(batches) == step
            if step in (3, 6):
                time.sleep(0.05)
                assert made[-1][0] == step
    assert made == [(step, False) for step in range(3, 9)]
    with batches_ahead(Numbers(), None, range(3, 4), alone={3}) as batches:
        assert [*batches] == [3]


def test_only_the_caller_holds_a_batch():
    """The last batch is freed when the caller drops it, not while it waits for the next one."""

    class Made:
        pass

    class OfObjects:
        def batch(self, step, shardings):
            return Made()

    with batches_ahead(OfObjects(), None, range(4), alone={1}) as batches:
        for _ in range(4):
            batch = next(batches)
            held = weakref.ref(batch)
            del batch
            assert held() is None


def test_a_process_reads_the_rows_of_its_own_devices(monkeypatch):
    """Two devices hold rows 3 and 4 of 8 in both microbatches."""

    class OfOneProcess:
        def addressable_devices_indices_map(self, shape):
            return {
                device: (slice(None), slice(2 + device, 3 + device), slice(None))[: len(shape)] for device in (0, 1)
            }

    def shards(shape, sharding, read_shard):
        return [read_shard(index) for index in sharding.addressable_devices_indices_map(shape).values()]

    monkeypatch.setattr(jax, "make_array_from_callback", shards)
    cut, mine = loader(batch=16), OfOneProcess()
    batch, rows = cut.batch(9, Batch(mine, mine, mine, mine, None, mine)), cut.rows(9, 0, 16)
    for field in FIELDS:
        for device, shard in enumerate(getattr(batch, field)):
            np.testing.assert_array_equal(shard[:, 0], getattr(rows, field)[[2 + device, 10 + device]])
