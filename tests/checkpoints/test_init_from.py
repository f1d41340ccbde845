"""Warm starts: which parameters are reused, which are newly initialized, and which pretrained runs are refused."""

import dataclasses
from contextlib import closing

import jax
import numpy as np
import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.checkpoints.init_from import PretrainedRun
from spmd_lm.config.schema import Checkpoint
from spmd_lm.errors import CheckpointError, ConfigError
from spmd_lm.parallel.trees import leaves_by_path
from tests.helpers import FLOAT32, ORIGINAL_BERT, TASKS, canonical, make_config, program

BERT = ORIGINAL_BERT | {"vocab": 64}
TASK = TASKS["classification"] | {"precision": FLOAT32}
HEAD = {"head.output", "head.output_bias"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A run trained on hidden words and their order, on eight devices; and its parameters by path, on the host."""
    directory = tmp_path_factory.mktemp("pretrained")
    layout = {"data": 4, "model": 2, "zero": 3}
    config = make_config(model=BERT, objective={"kind": "masked_lm"}, parallel=layout, precision=FLOAT32)
    p = program(config)
    state = p.init()
    changed = jax.tree.map(lambda x: x + 1, state.params)
    with closing(Checkpointer(directory / "checkpoints", Checkpoint(asynchronous=False))) as checkpoints:
        state = p.canonical(dataclasses.replace(state, params=changed))
        checkpoints.save(7, state, make_meta(config.model_dump(by_alias=True), num_samples=112, fingerprint=""))
    return directory, {name: np.asarray(leaf) for name, leaf in leaves_by_path(state.params).items()}


def warm_start(directory, model=BERT, **sections):
    config = make_config(model=model, **TASK | sections)
    p = program(config)
    run = PretrainedRun(p, directory)
    return p, run.initial_state(), run.describe()


@pytest.mark.parametrize(
    "parallel", [{"data": 1}, pytest.param({"pipe": 2, "model": 2, "microbatches": 2}, marks=pytest.mark.slow)], ids=str
)
def test_all_but_the_head_is_reused_under_any_layout_and_the_rest_is_newly_initialized(pretrained, parallel):
    directory, theirs = pretrained
    p, state, message = warm_start(directory, parallel=parallel)
    ours, new = leaves_by_path(canonical(p, state).params), leaves_by_path(canonical(p, p.init()).params)
    reused = ours.keys() - HEAD
    assert {"head.pooler", "head.pooler_bias"} <= reused < theirs.keys()
    for name in reused:
        np.testing.assert_array_equal(ours[name], theirs[name])
        assert (ours[name] != new[name]).any(), name
    for name in HEAD:
        np.testing.assert_array_equal(ours[name], new[name])
    assert int(state.step) == 0 and not any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state))
    start = f"initialized from {directory} after step 7, newly initialized: head.output, head.output_bias, not used: "
    assert message.startswith(start + "head.binary")


def test_an_objective_without_a_pooler_does_not_use_it(pretrained):
    directory, _ = pretrained
    p, state, message = warm_start(directory, **TASKS["span"])
    ours = leaves_by_path(canonical(p, state).params)
    assert {name for name in ours if name.startswith("head")} == HEAD and "head.pooler" in message


@pytest.mark.parametrize(
    ("kind", "new"), [("classification", set()), pytest.param("multiple choice", HEAD, marks=pytest.mark.slow)]
)
def test_a_head_is_reused_by_its_own_objective_alone(pretrained, tmp_path, kind, new):
    """Heads differ in outputs, and so in shapes; a span's and two classes' shapes are equal."""
    p, state, _ = warm_start(pretrained[0])
    changed = jax.tree.map(lambda x: x + 1, state.params)
    with closing(Checkpointer(tmp_path / "checkpoints", Checkpoint(asynchronous=False))) as checkpoints:
        meta = make_meta(p.config.model_dump(by_alias=True), num_samples=16, fingerprint="")
        checkpoints.save(1, p.canonical(dataclasses.replace(state, params=changed)), meta)
    sections = TASKS[kind] | {"precision": FLOAT32}
    other = program(make_config(model=BERT, **sections))
    assert {
        name for name in leaves_by_path(other.plan.shapes) if name not in PretrainedRun(other, tmp_path).params
    } == new
    spans = program(make_config(model=BERT, **TASKS["span"] | {"precision": FLOAT32}))
    assert not HEAD & PretrainedRun(spans, tmp_path).params.keys()


def test_another_vocabulary_is_refused(pretrained, tmp_path):
    directory, _ = pretrained
    p = program(make_config(model=BERT, **TASK))
    meta = Checkpointer(directory / "checkpoints").meta(7)
    meta["config"]["data"] = {"source": "python-stdlib", "tokenizer": "bytes", "validation_fraction": 0.1}
    with closing(Checkpointer(tmp_path / "checkpoints", Checkpoint(asynchronous=False))) as checkpoints:
        checkpoints.save(7, p.canonical(p.init()), meta)
    other = p.config.data.model_copy(update={"tokenizer": "vocab.txt"})
    p = program(p.config.model_copy(update={"data": other}))
    with pytest.raises(ConfigError, match=r"data\.tokenizer=vocab.txt is not the vocabulary of .* Use .*=bytes"):
        PretrainedRun(p, tmp_path)


def test_a_shorter_context_reuses_the_first_positions(pretrained):
    directory, theirs = pretrained
    p, state, _ = warm_start(directory, BERT | {"context": 8})
    ours = leaves_by_path(canonical(p, state).params)
    np.testing.assert_array_equal(ours["embedding.positions"], theirs["embedding.positions"][:8])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"context": 32}, "model.context: 16 -> 32"),
        ({"heads": 4}, "model.heads: 8 -> 4"),  # of the same shapes
        ({"mlp_width": 64}, "model.mlp_width: None -> 64"),
    ],
)
def test_another_model_is_refused_with_its_differences(pretrained, model, message):
    directory, _ = pretrained
    with pytest.raises(CheckpointError, match=r"run\.init_from=.* is another model") as error:
        warm_start(directory, BERT | model)
    assert message in str(error.value) and "Remove these keys" in str(error.value)


def test_computation_and_regularization_may_differ(pretrained):
    directory, _ = pretrained
    warm_start(directory, BERT | {"dropout": 0.0, "scan": False})


def test_a_pretrained_run_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"run\.init_from=.*holds no checkpoint\. Train it first"):
        warm_start(tmp_path)
    with pytest.raises(CheckpointError, match=r"run\.init_from=.*/none: no such run\. Train it first"):
        warm_start(tmp_path / "none")
