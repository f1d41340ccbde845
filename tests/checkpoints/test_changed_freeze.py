"""A run resumes with other parameters frozen: kept moments continue, others start at zero, and the log says so."""

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import optax
import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.checkpoints.storage import OrbaxStorage, ShardStorage
from spmd_lm.cli import main
from spmd_lm.errors import CheckpointError
from spmd_lm.parallel.trees import exclude, leaves_by_path
from spmd_lm.resolve import enable_float64
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from tests import reference
from tests.helpers import assert_close, assert_equal, canonical, device_batch, host_batch, make_config, program

BEFORE = {"data": 4, "model": 2, "zero": 3}
AFTER = {"pipe": 2, "data": 1, "microbatches": 2}
SOME = "embedding.* *.mlp.up *norm?.bias blocks.0.attention.query head.norm.scale"
SAVED, STEPS = 5, 2  # steps done before the checkpoint, and after it

GOES_ON = "start at zero, while the step count for bias correction goes on"
NEW = "{}: the moments of {} newly trained parameters " + GOES_ON + ": {}."
UNREAD = "{}: the moments of {} frozen parameters are neither read nor kept: {}."
NAMES = "blocks.mlp.up, blocks.norm1.bias, blocks.norm2.bias, embedding.positions, embedding.tokens, head.norm.scale"


@pytest.fixture
def wide():
    """float64 in all threads, those too in which orbax reads; the fixture x64 is its own thread's."""
    enable_float64(make_config())


def program_of(freeze: str, parallel: dict[str, int] = BEFORE, **optim: Any) -> Program:
    return program(make_config(parallel=parallel, optim={"freeze": freeze} | optim))


@functools.cache
def state_of(freeze: str) -> TrainState:
    """A state after SAVED steps, with random moments."""
    p, r = program_of(freeze), np.random.default_rng(len(freeze))
    state, place = p.canonical(p.init()), functools.partial(jax.tree.map, jax.device_put)
    mu = jax.tree.map(lambda x: 1e-3 * r.normal(size=x.shape), state.opt_state.mu)
    nu = jax.tree.map(lambda x: r.uniform(1e-7, 1e-5, x.shape), state.opt_state.nu)
    moved = TrainState(np.int32(SAVED), state.params, optax.ScaleByAdamState(np.int32(SAVED), mu, nu))
    return place(moved, jax.tree.map(lambda x: x.sharding, state))


def save(directory, state: TrainState, storage=None) -> None:
    saver = Checkpointer(directory, storage=storage)
    saver.save(SAVED, state, make_meta({}, 0, ""))
    saver.close()


def by_hand(freeze: str, saved: TrainState) -> tuple[Any, Any]:
    """Moments of all parameters: kept if the parameter is trained now and had some, else zero."""
    params = jax.tree.map(np.asarray, saved.params)
    trained = leaves_by_path(reference.trained_part(freeze.split(), params, params))

    def moments(tree: Any) -> Any:
        kept = {path: np.asarray(x) for path, x in leaves_by_path(tree).items() if path in trained}
        leaves = [kept.get(path, np.zeros(x.shape)) for path, x in leaves_by_path(params).items()]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    return moments(saved.opt_state.mu), moments(saved.opt_state.nu)


@pytest.mark.parametrize("storage", [pytest.param(OrbaxStorage, marks=pytest.mark.slow), ShardStorage])
@pytest.mark.parametrize(("then", "now"), [("", SOME), (SOME, ""), (SOME, SOME)], ids=["more", "less", "the same"])
@pytest.mark.slow
def test_a_run_goes_on_with_other_parameters_frozen_on_another_mesh(tmp_path, wide, storage, then, now):
    saved, p, log = state_of(then), program_of(now, AFTER), []
    save(tmp_path, saved, storage())
    restored = Checkpointer(tmp_path, storage=storage(), log=log.append).restore(SAVED, p.abstract_canonical())
    path = tmp_path / str(SAVED)
    told = [] if then == now else [UNREAD.format(path, 6, NAMES)] if now else [NEW.format(path, 6, NAMES)]
    assert sorted(log) == told
    missing = {*leaves_by_path(p.abstract_canonical())} - {*leaves_by_path(restored)}
    assert len(missing) == (12 if then and not now else 0)  # what is new is made once it is known where

    state = p.from_canonical(restored)
    mu, nu = by_hand(now, saved)
    own = [reference.trained_part(now.split(), mu, moment) for moment in (mu, nu)]
    expected = TrainState(np.int32(SAVED), saved.params, optax.ScaleByAdamState(np.int32(SAVED), *own))
    assert_equal(canonical(p, state), jax.tree.map(np.asarray, expected))
    described = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (state, p.abstract_state()))
    assert described[0] == described[1]

    params = jax.tree.map(np.asarray, saved.params)
    for step in range(SAVED, SAVED + STEPS):
        state, _ = p.step(state, device_batch(p, step))
        grads = gradients(params, step)
        params, mu, nu, _ = reference.adamw(p.config.optim, p.config.train.steps, step, params, mu, nu, grads)
    last = canonical(p, state)
    assert_close(last.params, params, 1e-11)
    for got, moment in zip((last.opt_state.mu, last.opt_state.nu), (mu, nu), strict=True):
        assert_close(got, reference.trained_part(now.split(), params, moment), 1e-11)


def gradients(params: Any, step: int) -> Any:
    config = make_config()
    dropout = reference.Dropout((config.train.seed, step), (batch := host_batch(config, step)).sample_ids)
    return jax.grad(reference.loss)(params, config, batch, dropout)


@pytest.mark.slow
def test_another_optimizer_is_refused_whatever_is_frozen(tmp_path, wide):
    adamw, lion = program_of(""), program_of(SOME, kind="lion")
    save(tmp_path / "adamw", state_of(""))
    save(tmp_path / "lion", lion.canonical(lion.init()))
    complaints = {
        ("adamw", lion): [
            "opt_state.nu.blocks.attention.query: saved float64[2, 32, 32], expected nothing",
            "opt_state.mu.embedding.tokens: saved float64[61, 32], expected nothing",
        ],
        ("lion", program_of(SOME)): ["opt_state.nu.blocks.attention.query: saved nothing, expected float64[2, 32, 32]"],
        ("lion", adamw): ["opt_state.nu.embedding.tokens: saved nothing, expected float64[61, 32]"],
    }
    for (saved, p), expected in complaints.items():
        with pytest.raises(CheckpointError, match="different state") as error:
            Checkpointer(tmp_path / saved).restore(SAVED, p.abstract_canonical())
        assert all(complaint in str(error.value) for complaint in expected)


TOKENS = {"embedding": {"tokens": None}}


@pytest.mark.parametrize(
    ("change", "complaints"),
    [
        (
            lambda s: s.map_params(lambda tree: exclude(tree, TOKENS)),
            [
                "params.embedding.tokens: saved nothing",
                "mu.embedding.tokens: saved nothing",
                "nu.embedding.tokens: saved",
            ],
        ),
        (
            lambda s: dataclasses.replace(s, opt_state=s.opt_state._replace(nu=exclude(s.opt_state.nu, TOKENS))),
            ["nu.embedding.tokens: saved nothing"],
        ),
        (
            lambda s: dataclasses.replace(s, opt_state=jax.tree.map(np.float32, s.opt_state)),
            ["mu.embedding.tokens: saved float32[61, 32], expected float64[61, 32]"],
        ),
        (
            lambda s: s.map_params(lambda tree: tree | {"embedding": jax.tree.map(lambda x: x[:8], tree["embedding"])}),
            ["params.embedding.tokens: saved float64[8, 32]", "nu.embedding.tokens: saved float64[8, 32]"],
        ),
    ],
    ids=["a parameter", "half of its moments", "a dtype", "a shape"],
)
def test_what_else_differs_is_refused_as_before(tmp_path, wide, change, complaints):
    save(tmp_path, jax.tree.map(jax.numpy.asarray, change(state_of(""))))
    with pytest.raises(CheckpointError, match="different state") as error:
        Checkpointer(tmp_path).restore(SAVED, program_of("").abstract_canonical())
    assert all(complaint in str(error.value) for complaint in complaints)


@pytest.mark.slow
def test_the_log_of_a_run_tells_once_and_a_replay_computes_the_same(tmp_path, capsys):
    """Moments are kept in checkpoints of the run's directory and in local ones."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    tree = {
        "run": {"name": "r", "dir": str(run), "trackers": []},
        "model": {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocab": 64},
        "data": {"source": "synthetic"},
        "parallel": {"data": 8},
        "optim": {"lr": 1e-3, "warmup": 1, "decay": "constant"},
        "train": {"steps": 2, "batch": 8, "log_every": 1},
        "checkpoint": {"every": 2, "keep": 9, "local": {"dir": str(memory), "every": 1}},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(tree))

    def train(freeze: str, steps: int) -> list[str]:
        """Lines of the log about optim.freeze and moments."""
        assert main(["train", str(config), f"optim.freeze={freeze}", f"train.steps={steps}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return [line.strip() for line in lines if "moments of" in line or "optim.freeze" in line]

    first, second, third = "embedding.* head.*", "*.tokens", "*.tokens head.*"
    assert train(first, steps=2) == []
    names = "embedding.positions, head.norm.bias, head.norm.scale"
    assert train(second, steps=4) == [
        f"optim.freeze: {first} -> {second}",
        NEW.format(run / "checkpoints" / "2", 3, names),
    ]
    assert main(["ckpt", "verify", str(run)]) == 0
    capsys.readouterr()

    (run / "checkpoints" / "4").rename(tmp_path / "gone")
    (local,) = memory.rglob("4")
    assert train(third, steps=5) == [
        f"optim.freeze: {second} -> {third}",
        UNREAD.format(local, 2, "head.norm.bias, head.norm.scale"),
    ]
    assert train(third, steps=5) == []
    (tmp_path / "gone").rename(run / "checkpoints" / "4")
    assert main(["replay", str(run), "4", f"optim.freeze={second}"]) == 0
    assert "step 4, from the checkpoint of step 2: the same bits" in capsys.readouterr().out
