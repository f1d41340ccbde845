"""Rows of conversations: packed or not, the same losses; a pure function of the step."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.batch import Batch
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.instructions.loader import InstructionLoader, pack_best_fit
from tests.chat_files import write_lines
from tests.helpers import LAYOUTS, make_config, program

CONTEXT, ROWS, COUNT = 32, 4, 23


@pytest.fixture
def path(tmp_path):
    """Completions of 3 to 31 bytes, each with its own end."""
    rng = np.random.default_rng(0)
    lines = [
        {"prompt": f"{chr(65 + n)} " + "p" * int(rng.integers(0, 15)), "completion": "c" * int(rng.integers(0, 13))}
        for n in range(COUNT)
    ]
    return write_lines(tmp_path / "a.jsonl", *lines)


def config(path, pack=True, parallel="one", **train) -> RunConfig:
    data = {"source": "instructions", "path": path, "validation_path": path, "pack": pack}
    model = {"context": CONTEXT, "vocab": 256, "dropout": 0.0, "attention_dropout": 0.0}
    return make_config(data=data, model=model, parallel=LAYOUTS[parallel], train={"batch": ROWS, "steps": 10} | train)


def loader(run: RunConfig, split="training") -> InstructionLoader:
    made = make_loader(run, load_data(run.data, 0, run.model.vocab, context=CONTEXT), split)
    assert isinstance(made, InstructionLoader)
    return made


def all_rows(loader: InstructionLoader, steps: range) -> Batch:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *(loader.rows(step, 0, ROWS) for step in steps))


def texts(batch: Batch) -> list[tuple[bytes, bytes]]:
    """The conversations of all rows: what is read, and what is learned."""
    found = []
    for row in range(len(batch.tokens)):
        for segment in range(1, batch.segments[row].max() + 1):
            (columns,) = np.nonzero(batch.segments[row] == segment)
            assert (batch.positions[row, columns] == np.arange(len(columns))).all(), "positions begin at 0"
            first, past = columns[0], columns[-1] + 1
            assert (batch.targets[row, first : past - 1] == batch.tokens[row, first + 1 : past]).all()
            learned = batch.targets[row, columns][batch.loss_weights[row, columns] > 0]
            found.append((bytes(batch.tokens[row, columns].tolist()), bytes(learned.tolist())))
    return found


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 90))
def test_every_conversation_is_in_one_row_that_holds_it(lengths, capacity):
    packed = pack_best_fit(np.array(lengths), capacity)
    assert sorted(index for row in packed for index in row) == [*range(len(lengths))]
    used = [sum(lengths[index] for index in row) for row in packed]
    assert max(used) <= capacity
    assert len(packed) <= 1 + 2 * sum(lengths) // capacity, "no two rows would fit into one"


def test_best_fit():
    assert pack_best_fit(np.array([3, 7, 5, 2, 5, 8]), 10) == [[5, 3], [1, 0], [2, 4]]


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_has_every_conversation_once(path, pack):
    made = loader(config(path, pack))
    assert made.num_examples == COUNT if not pack else made.num_examples < COUNT / 1.5
    rows = all_rows(made, range(made.num_examples))  # as many epochs as a step has rows
    found = [text for text, _ in texts(rows)]
    assert len(found) == ROWS * COUNT and len({*found}) == COUNT
    assert sorted(found[:COUNT]) != found[:COUNT], "shuffled"
    assert all(text.startswith(b"\0") and learned == b"c" * text.count(b"c") + b"\0" for text, learned in texts(rows))
    epochs = [rows.tokens[n : n + made.num_examples].tolist() for n in (0, made.num_examples)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]), "the same rows in another order"


def test_a_batch_is_a_function_of_the_step(path):
    """The rows asked for do not matter, nor the process, nor a restart."""
    whole, other = loader(config(path)), loader(config(path))
    for step in (7, 2):
        parts = [other.rows(step, start, start + 2) for start in (2, 0)]
        for name, field in vars(whole.rows(step, 0, ROWS)).items():
            if field is not None:
                np.testing.assert_array_equal(np.concatenate([vars(part)[name] for part in parts[::-1]]), field)
    seeded = loader(config(path, seed=9)).rows(2, 0, ROWS)
    assert (seeded.tokens != whole.rows(2, 0, ROWS).tokens).any()


def test_validation_pads_its_last_batch(path):
    made = loader(config(path, pack=False, eval_batches=100), "validation")
    rows = all_rows(made, range(len(made)))
    assert len(made) == 6 and len(rows.tokens) == 24 and (rows.loss_weights[COUNT:] == 0).all()
    assert len({text for text, _ in texts(rows)}) == COUNT


@pytest.mark.parametrize("layout", ["one", pytest.param("data2-model4-sequence-zero1", marks=pytest.mark.slow)])
def test_packed_losses_are_those_of_conversations_by_themselves(x64, path, layout):
    def losses(pack: bool, change=lambda batch: batch) -> np.ndarray:
        run = config(path, pack, layout)
        made, total = loader(run, "validation"), np.zeros(3)
        laid_out = program(run)
        params = program(config("never opened", True, layout)).init().params
        for step in range(len(made)):
            batch = change(made.rows(step, 0, ROWS))
            abstract = laid_out.abstract_batch()
            fields = {name: vars(batch)[name][None] for name, leaf in vars(abstract).items() if leaf is not None}
            placed = jax.device_put(dataclasses.replace(abstract, **fields), laid_out.batch_shardings)
            total += np.array(laid_out.evaluate(params, placed)["causal_lm"])  # loss, correct, weight
        return total

    separate, packed = losses(pack=False), losses(pack=True)
    np.testing.assert_allclose(packed, separate, rtol=1e-12)
    mixed = losses(True, lambda batch: dataclasses.replace(batch, segments=np.ones_like(batch.segments)))
    assert abs(mixed[0] - packed[0]) > 1e-3
