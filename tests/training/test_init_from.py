"""A run that starts as another: what it takes, what is born, and which origins are refused."""

import dataclasses
from contextlib import closing

import jax
import numpy as np
import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.training.init_from import Origin, paths
from tests.helpers import FLOAT32, JUDGED, ORIGINAL, canonical, make_config, program

BERT = ORIGINAL | {"vocab": 64}
TASK = JUDGED["classification"] | {"precision": FLOAT32}
HEAD = {"head.output", "head.output_bias"}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A run trained on hidden words and their order, on eight devices; and its parameters by path, on the host."""
    directory = tmp_path_factory.mktemp("origin")
    layout = {"data": 4, "model": 2, "zero": 3}
    config = make_config(model=BERT, objective={"kind": "masked_lm"}, parallel=layout, precision=FLOAT32)
    p = program(config)
    state = p.init()
    moved = jax.tree.map(lambda x: x + 1, state.params)
    with closing(Checkpointer(directory / "checkpoints", asynchronous=False)) as saves:
        state = p.canonical(dataclasses.replace(state, params=moved))
        saves.save(7, state, make_meta(config.model_dump(by_alias=True), samples=112, fingerprint=""))
    return directory, {name: np.asarray(leaf) for name, leaf in paths(state.params).items()}


def begun(directory, model=BERT, **sections):
    config = make_config(model=model, **TASK | sections)
    p = program(config)
    origin = Origin.of(p, directory)
    return p, origin.state(p), origin.describe(p)


@pytest.mark.parametrize("parallel", [{"data": 1}, {"pipe": 2, "model": 2, "microbatches": 2}], ids=str)
def test_all_but_the_head_is_taken_under_any_layout_and_the_rest_is_born(origin, parallel):
    directory, theirs = origin
    p, state, told = begun(directory, parallel=parallel)
    ours, born = paths(canonical(p, state).params), paths(canonical(p, p.init()).params)
    taken = ours.keys() - HEAD
    assert {"head.pooler", "head.pooler_bias"} <= taken < theirs.keys()
    for name in taken:
        np.testing.assert_array_equal(ours[name], theirs[name])
        assert (ours[name] != born[name]).any(), name
    for name in HEAD:
        np.testing.assert_array_equal(ours[name], born[name])
    assert int(state.step) == 0 and not any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state))
    assert told.startswith(f"starting as {directory} was after step 7, with a new head.output, head.output_bias")
    assert "without its head.binary" in told


def test_what_has_no_pooler_leaves_it_there(origin):
    directory, _ = origin
    p, state, told = begun(directory, **JUDGED["span"])
    ours = paths(canonical(p, state).params)
    assert {name for name in ours if name.startswith("head")} == HEAD and "head.pooler" in told


@pytest.mark.parametrize(("kind", "born"), [("classification", set()), ("multiple choice", HEAD)])
def test_a_head_is_taken_by_its_own_objective_alone(origin, tmp_path, kind, born):
    """One output here, two there: of other shapes as well, but a span's and two classes' are alike."""
    p, state, _ = begun(origin[0])
    given = jax.tree.map(lambda x: x + 1, state.params)
    with closing(Checkpointer(tmp_path / "checkpoints", asynchronous=False)) as saves:
        meta = make_meta(p.config.model_dump(by_alias=True), samples=16, fingerprint="")
        saves.save(1, p.canonical(dataclasses.replace(state, params=given)), meta)
    sections = JUDGED[kind] | {"precision": FLOAT32}
    other = program(make_config(model=BERT, **sections))
    assert {name for name in paths(other.plan.shapes) if name not in Origin.of(other, tmp_path).taken} == born
    spans = program(make_config(model=BERT, **JUDGED["span"] | {"precision": FLOAT32}))
    assert not HEAD & Origin.of(spans, tmp_path).taken


def test_another_vocabulary_is_refused(origin, tmp_path):
    directory, _ = origin
    p = program(make_config(model=BERT, **TASK))
    meta = Checkpointer(directory / "checkpoints").meta(7)
    meta["config"]["data"] = {"source": "python-stdlib", "tokenizer": "bytes", "validation_fraction": 0.1}
    with closing(Checkpointer(tmp_path / "checkpoints", asynchronous=False)) as saves:
        saves.save(7, p.canonical(p.init()), meta)
    other = p.config.data.model_copy(update={"tokenizer": "vocab.txt"})
    p = program(p.config.model_copy(update={"data": other}))
    with pytest.raises(ConfigError, match=r"data\.tokenizer=vocab.txt is not the vocabulary of .* Use .*=bytes"):
        Origin.of(p, tmp_path)


def test_shorter_rows_take_the_first_positions(origin):
    directory, theirs = origin
    p, state, _ = begun(directory, BERT | {"context": 8})
    ours = paths(canonical(p, state).params)
    np.testing.assert_array_equal(ours["embedding.positions"], theirs["embedding.positions"][:8])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"context": 32}, "model.context: 16 -> 32"),
        ({"heads": 4}, "model.heads: 8 -> 4"),  # of the same shapes
        ({"mlp_width": 64}, "model.mlp_width: None -> 64"),
    ],
)
def test_another_model_is_refused_with_what_differs(origin, model, message):
    directory, _ = origin
    with pytest.raises(CheckpointError, match=r"run\.init_from=.* is another model") as told:
        begun(directory, BERT | model)
    assert message in str(told.value) and "Leave these keys out" in str(told.value)


def test_how_it_is_computed_and_regularized_is_free(origin):
    directory, _ = origin
    begun(directory, BERT | {"dropout": 0.0, "scan": False})


def test_an_origin_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"run\.init_from=.*holds no checkpoint\. Train it first"):
        begun(tmp_path)
