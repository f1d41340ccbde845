"""The loop's guarantees, on a program of one small vector: stopping and resuming equals never stopping."""

import dataclasses
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.batch import abstract_batch
from spmd_lm.checkpoints import storage
from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.config.load import dump, load
from spmd_lm.config.schema import Precision, RunConfig
from spmd_lm.cost_model.flops import Peak, Utilization
from spmd_lm.errors import CheckpointError, ConfigError, DataError, Exit, LayoutError, NonFiniteError
from spmd_lm.models.modules import ModelModules
from spmd_lm.runtime import trackers
from spmd_lm.runtime.xla_options import Option, XlaOptions
from spmd_lm.step.state import TrainState
from spmd_lm.training import loop, run, run_dir
from spmd_lm.training.run import TrainingRun
from tests.data.tokenizers.test_subwords import wordpiece

TREE = {
    "model": {"layers": 1, "width": 8, "heads": 1, "context": 8, "vocab": 16},
    "data": {"source": "synthetic"},
    "optim": {"lr": 0.1},
    "train": {"steps": 12, "batch": 4, "log_every": 2, "eval_every": 4, "eval_batches": 2},
    "checkpoint": {"every": 5, "keep": 2},
}


def make_config(directory, **changes):
    tree = json.loads(json.dumps(TREE)) | {"run": {"dir": str(directory)}}
    for path, value in changes.items():
        section, key = path.split("__")
        tree[section][key] = value
    return RunConfig.model_validate(tree)


UTILIZATION = Utilization(1e6, Peak(1e12, "published"))


class FakeProgram:
    """A state of one vector that remembers every batch it saw.  `at` maps a step to a function called during it."""

    at: dict = {}  # noqa: RUF012 (set by the tests)
    tokens_per_step = 32
    model = SimpleNamespace(modules=ModelModules())
    plan, xla_options = None, XlaOptions([Option("xla_fast", True, "why")], [], {})

    def __init__(self, config, trains=True):
        self.config = config
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.batch_shardings = jax.tree.map(lambda _: sharding, abstract_batch(config))

    def init(self):
        w = jnp.arange(16.0)
        return TrainState(jnp.int32(0), {"w": w}, {"mu": {"w": w * 0}, "nu": {"w": w * 0}})

    def close(self): ...

    def compile(self):
        self.at.get("compile", lambda: None)()
        return 0.25

    def step(self, state, batch):
        step = int(state.step) + 1
        seen = jnp.bincount(batch.tokens.ravel(), length=16) * batch.tokens[..., 0].mean()
        w = state.params["w"] * 0.9 + seen / step
        loss = jnp.sin(w).mean() ** 2 + 1
        if (callback := self.at.get(step)) is not None:
            loss = loss * callback()
        return TrainState(state.step + 1, {"w": w}, state.opt_state), {"loss": loss, "grad_norm": loss, "lr": loss}

    def evaluate(self, params, batch):
        return {"causal_lm": (params["w"].mean() * batch.loss_weights.sum(), jnp.zeros(()), batch.loss_weights.sum())}

    def canonical(self, state):
        return state

    from_canonical = saved_part = to_save = canonical

    def initial_params(self, paths):
        return {}

    def initial_canonical(self, params):
        return dataclasses.replace(self.init(), params=params)

    def abstract_canonical(self):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.init())


PLAN_REPORT = SimpleNamespace(describe=lambda config, plan: {}, summary=lambda description: "one device")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(loop, "Program", FakeProgram)
    monkeypatch.setattr(TrainingRun, "utilization", UTILIZATION)
    monkeypatch.setattr(loop, "plan_report", PLAN_REPORT)
    monkeypatch.setattr(FakeProgram, "at", {})


def kill_at(step, number):
    FakeProgram.at = {step: lambda: os.kill(os.getpid(), number) or 1}


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def status(directory):
    return json.loads((directory / "status.json").read_text())


def saved(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


def metrics(directory):
    """The metrics of a run without those that depend on time."""
    return [
        {k: v for k, v in r.items() if k not in ("tokens_per_second", "mfu", "seconds")} for r in records(directory)
    ]


def snapshot(directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing interrupted; not to be written to."""
    directory = tmp_path_factory.mktemp("runs") / "reference"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", FakeProgram)
        patch.setattr(TrainingRun, "utilization", UTILIZATION)
        patch.setattr(loop, "plan_report", PLAN_REPORT)
        assert loop.train(make_config(directory)) is Exit.DONE
    return directory


@pytest.mark.parametrize("stopped", [False, True])
def test_a_program_is_executed_for_the_first_time_while_no_thread_uses_devices(stopped, tmp_path, monkeypatch):
    """The train step in step 1, or where a run resumes, and evaluation after it; later ones may overlap."""
    if stopped:
        kill_at(5, signal.SIGTERM)
        assert loop.train(make_config(tmp_path)) is Exit.PREEMPTED
        FakeProgram.at = {}
    running, put_during, make = [], [], jax.make_array_from_callback

    def put(*arguments):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.005)
            put_during.extend(running)
        return make(*arguments)

    def slow(name):
        method, calls = getattr(FakeProgram, name), itertools.count(1)

        def execute(*arguments):
            running.append((name, next(calls)))
            time.sleep(0.02)
            result = method(*arguments)
            running.pop()
            return result

        monkeypatch.setattr(FakeProgram, name, execute)

    slow("step")
    slow("evaluate")
    monkeypatch.setattr(jax, "make_array_from_callback", put)
    assert loop.train(make_config(tmp_path)) is Exit.DONE
    assert ("step", 2) in put_during
    assert ("step", 1) not in put_during and ("evaluate", 1) not in put_during


def test_a_run_leaves_its_files(reference):
    assert [r["step"] for r in records(reference)] == [2, 4, 6, 8, 10, 12]
    keys = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "seconds"]
    assert all(list(record)[: len(keys)] == keys for record in records(reference))
    assert [r["step"] for r in records(reference) if "eval_loss" in r] == [4, 8, 12]
    last = records(reference)[-1]
    assert last["tokens"] == 12 * 32
    assert last["eval_perplexity"] == pytest.approx(np.exp(last["eval_loss"]))
    assert last["mfu"] == pytest.approx(1e6 / last["seconds"] / 1e12)
    assert saved(reference) == [10, 12]
    goodput = status(reference)["goodput"]
    trained = sum(2 * record["seconds"] for record in records(reference))
    assert trained == pytest.approx(goodput["step"] + goodput["data"], rel=0.05)
    assert load(reference / "config.yaml") == make_config(reference)
    assert (reference / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((reference / "tensorboard").iterdir())
    final = status(reference)
    assert (final["state"], final["step"], final["exit_code"], final["restarts"]) == ("done", 12, 0, 0)
    assert set(goodput) == {"init", "compile", "step", "eval", "checkpoint", "data", "other", "lost", "idle"}
    assert all(goodput[bucket] > 0 for bucket in ("init", "step", "eval", "checkpoint", "data"))


def test_options_of_the_compiler_are_shown(tmp_path, capsys):
    loop.train(make_config(tmp_path, train__steps=1))
    assert "xla     xla_fast=True: why" in capsys.readouterr().out


@pytest.mark.parametrize(("stops_at", "traced"), [pytest.param(None, 5, marks=pytest.mark.slow), (4, 4), (1, None)])
def test_some_steps_are_traced(tmp_path, capsys, stops_at, traced):
    """Steps 3 to 5; a run that stops among them has a trace of those that it took."""
    if stops_at:
        kill_at(stops_at, signal.SIGTERM)
    config = make_config(tmp_path, train__profile={"steps": [3, 5]})
    assert loop.train(config) == (Exit.PREEMPTED if stops_at else Exit.DONE)
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(traces) == (traced is not None)
    assert (f"traced until step {traced}: xprof --logdir" in capsys.readouterr().out) == (traced is not None)
    if stops_at == 4:  # what is left of them cannot be traced
        FakeProgram.at = {}
        loop.train(config)
        assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1


def test_losses_are_written_to_the_last_bit(reference):
    program = FakeProgram(make_config(reference))
    corpus = loop.load_data(program.config.data, 0, 16)
    state, batches = program.init(), loop.make_loader(program.config, corpus, "training")
    for step in range(2):
        state, metrics = program.step(state, batches.batch(step, program.batch_shardings))
    assert records(reference)[0]["loss"] == float(metrics["loss"])


def test_a_finished_run_is_left_alone(reference, capsys):
    before = snapshot(reference)
    assert loop.train(make_config(reference)) is Exit.DONE
    assert snapshot(reference) == before
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, Exit.PREEMPTED), (signal.SIGINT, Exit.INTERRUPTED)], ids=["SIGTERM", "Ctrl-C"]
)
@pytest.mark.parametrize("step", [1, 5, 7, 11])
def test_stopping_by_signal_and_resuming_equals_never_having_stopped(tmp_path, reference, number, code, step):
    config = make_config(tmp_path / "run")
    kill_at(step, number)
    assert loop.train(config) is code
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["exit_code"]) == ("preempted", int(code))
    assert status(tmp_path / "run")["step"] == max(saved(tmp_path / "run")) == step
    FakeProgram.at = {}
    assert loop.train(config) is Exit.DONE
    assert metrics(tmp_path / "run") == metrics(reference)
    assert status(tmp_path / "run")["restarts"] == 1


def test_a_start_that_is_refused_is_no_restart(tmp_path, capsys):
    """The data is not the run's: status.json says that it failed, and lists the attempts that took steps."""
    config = make_config(tmp_path)
    kill_at(3, signal.SIGTERM)
    loop.train(config)
    FakeProgram.at = {}
    with pytest.raises(DataError):
        loop.train(make_config(tmp_path, data__branching=8))
    refused = status(tmp_path)
    assert (refused["state"], refused["exit_code"], refused["restarts"]) == ("failed", int(Exit.DATA), 0)
    assert len(refused["lives"]) == 1 and refused["lives"][0]["exit_code"] == int(Exit.PREEMPTED)
    assert loop.train(config) is Exit.DONE
    assert status(tmp_path)["restarts"] == 1 and "in total with 1 restart" in capsys.readouterr().out


def test_every_start_is_recorded_with_what_it_ran_on(tmp_path):
    """The three starts: stopped by a signal, cut short by the machine's end, and finished."""
    config = make_config(tmp_path)
    kill_at(3, signal.SIGTERM)
    loop.train(config)
    FakeProgram.at = {}
    cut = status(tmp_path)
    cut["lives"][-1]["exit_code"] = None
    (tmp_path / "status.json").write_text(json.dumps(cut | {"state": "running", "exit_code": None}))
    loop.train(config)
    first, second = status(tmp_path)["lives"]
    assert (first["first_step"], first["last_step"], first["exit_code"]) == (1, 3, None)
    assert (second["first_step"], second["last_step"], second["exit_code"]) == (4, config.train.steps, 0)
    assert second["devices"] == jax.device_count() and second["platform"] == "cpu" and second["processes"] == 1
    assert second["peak_bytes"] is None  # a CPU counts none
    assert 0 < second["recovery"] == status(tmp_path)["recovery"]["p50"]
    goodput = status(tmp_path)["goodput"]
    spent = sum(goodput.values()) - goodput["idle"]
    assert first["seconds"] + second["seconds"] == pytest.approx(spent, rel=0.05)


def test_the_last_starts_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "MAX_ATTEMPTS", 2)
    for steps in (1, 2, 3):
        loop.train(make_config(tmp_path, train__steps=steps))
    assert [life["first_step"] for life in status(tmp_path)["lives"]] == [2, 3]


def test_a_failure_is_recorded_with_its_start(tmp_path, monkeypatch):
    blow_up(monkeypatch, 3, "params")
    with pytest.raises(NonFiniteError):
        loop.train(make_config(tmp_path))
    (life,) = status(tmp_path)["lives"]
    assert life["exit_code"] == Exit.NON_FINITE and life["seconds"] > 0


def test_an_exception_and_resuming_from_before_it_equals_never_having_stopped(tmp_path, reference):
    FakeProgram.at = {9: lambda: 1 / 0}
    with pytest.raises(ZeroDivisionError):
        loop.train(make_config(tmp_path / "run"))
    assert (status(tmp_path / "run")["state"], status(tmp_path / "run")["exit_code"]) == ("failed", 1)
    assert records(tmp_path / "run")[-1]["step"] == 8  # beyond the checkpoint of step 5: dropped and trained again
    FakeProgram.at = {}
    assert loop.train(make_config(tmp_path / "run")) is Exit.DONE
    assert metrics(tmp_path / "run") == metrics(reference)


def test_a_signal_while_compiling_stops_before_the_first_step(tmp_path, capsys):
    kill_at("compile", signal.SIGTERM)
    assert loop.train(make_config(tmp_path)) is Exit.PREEMPTED
    assert "nothing was done, so nothing was saved" in capsys.readouterr().out
    assert status(tmp_path)["step"] == 0
    assert records(tmp_path) == []
    FakeProgram.at = {}
    assert loop.train(make_config(tmp_path)) is Exit.DONE


def test_a_signal_before_compiling_does_not_wait_for_it(tmp_path, monkeypatch):
    first_state, compiled = FakeProgram.init, []
    monkeypatch.setattr(FakeProgram, "init", lambda self: [first_state(self), os.kill(os.getpid(), signal.SIGTERM)][0])
    FakeProgram.at = {"compile": lambda: compiled.append(True)}
    assert loop.train(make_config(tmp_path)) is Exit.PREEMPTED
    assert not compiled and status(tmp_path)["state"] == "preempted"


@pytest.mark.parametrize(
    "step, saved_steps, message",
    [("compile", [], "nothing was saved."), (3, [], "nothing was saved."), (7, [5], "nothing since step 5 was saved.")],
)
def test_a_second_interrupt_ends_at_once_without_a_save_and_says_so(tmp_path, capsys, step, saved_steps, message):
    FakeProgram.at = {step: lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]}
    with pytest.raises(KeyboardInterrupt):
        loop.train(make_config(tmp_path))
    assert Checkpointer(tmp_path / "checkpoints").steps() == saved_steps
    assert f"stopped at once: {message}" in capsys.readouterr().out
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 130)


@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_terminations_during_a_save_wait_for_it_and_save_once_more(tmp_path, monkeypatch, reference, count):
    """Step 5 is still being saved when they come."""
    start_save = storage.OrbaxStorage.save

    class Slow:
        def __init__(self, response):
            self.response = response

        def result(self, timeout=None):
            time.sleep(0.5)
            return self.response.result(timeout)

    monkeypatch.setattr(storage.OrbaxStorage, "save", lambda *arguments: Slow(start_save(*arguments)))
    FakeProgram.at = {6: lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(count)] and 1}
    assert loop.train(make_config(tmp_path)) is Exit.PREEMPTED
    assert Checkpointer(tmp_path / "checkpoints").intact_steps() == [5, 6]
    FakeProgram.at = {}
    assert loop.train(make_config(tmp_path)) is Exit.DONE and metrics(tmp_path) == metrics(reference)


QUIET = {"train__log_every": 100, "train__eval_every": 0}  # only the save at step 5 reads metrics early


@pytest.mark.parametrize("step", [4, 5, 7])
def test_a_state_whose_loss_is_not_finite_is_never_saved(tmp_path, step):
    FakeProgram.at = {step: lambda: float("nan")}
    with pytest.raises(NonFiniteError, match=f"step {step}: loss nan") as error:
        loop.train(make_config(tmp_path, **QUIET))
    assert (tmp_path / "checkpoints" / "5").exists() == (step == 7)
    assert ("resume from step 5, the last good checkpoint" if step == 7 else "start from step 0") in str(error.value)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 6)


def blow_up(monkeypatch, step, tree):
    """The update of this step leaves a state with an infinity in it; its loss is of the state before."""
    take = FakeProgram.step

    def update(self, state, batch):
        after, metrics = take(self, state, batch)
        if after.step == step:
            lost = {"w": after.params["w"].at[3].set(jnp.inf)}
            moments = after.opt_state | ({tree: lost} if tree != "params" else {})
            params = lost if tree == "params" else after.params
            after = dataclasses.replace(after, params=params, opt_state=moments)
        return after, metrics

    monkeypatch.setattr(FakeProgram, "step", update)


@pytest.mark.parametrize("tree", ["params", "mu", "nu"])
@pytest.mark.parametrize("step, last", [(5, "start from step 0"), (10, "resume from step 5, the last good checkpoint")])
def test_a_state_that_its_update_made_non_finite_is_never_saved(tmp_path, monkeypatch, tree, step, last):
    blow_up(monkeypatch, step, tree)
    with pytest.raises(NonFiniteError, match=rf"state after step {step} is not finite. .*{last}"):
        loop.train(make_config(tmp_path, **QUIET, checkpoint__keep=1))
    assert Checkpointer(tmp_path / "checkpoints").steps() == ([] if step == 5 else [5])
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 6)


def overflow(monkeypatch, steps, scale):
    """Skips these steps, at this scale."""
    take = FakeProgram.step

    def step(self, state, batch):
        number = int(state.step) + 1
        after, metrics = take(self, state, batch)
        skipped = number in steps
        scaling = {"loss_scale": jnp.float32(scale), "skipped": jnp.bool_(skipped), "skipped_steps": jnp.int32(0)}
        if skipped:
            after, metrics = dataclasses.replace(state, step=after.step), metrics | {"grad_norm": jnp.float32(jnp.nan)}
        return after, metrics | scaling

    monkeypatch.setattr(FakeProgram, "step", step)


def scaled(directory, **changes):
    precision = Precision(compute="float16", loss_scale="dynamic")
    return make_config(directory, **changes).model_copy(update={"precision": precision})


def test_skipped_steps_are_normal_above_the_smallest_scale(tmp_path, monkeypatch, capsys):
    overflow(monkeypatch, range(1, 13), 2.0)
    assert loop.train(scaled(tmp_path)) is Exit.DONE
    last = records(tmp_path)[-1]
    assert (last["skipped"], last["skipped_steps"], last["loss_scale"], last["grad_norm"]) == (True, 0, 2.0, None)
    out = capsys.readouterr().out
    assert "scale 2^1 (0 skipped)" in out and "smaller scale" not in out


def test_an_overflow_at_the_smallest_scale_is_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "MAX_OVERFLOWS", 3)
    overflow(monkeypatch, (2, 3, 5, 6), 1.0)
    assert loop.train(scaled(tmp_path)) is Exit.DONE
    logged = re.findall(
        r"^step (\d+): gradients overflow float16 at precision\.min_scale=1: ", capsys.readouterr().out, re.M
    )
    assert logged == ["2", "3", "5", "6"]


def test_too_many_overflows_at_the_smallest_scale_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MAX_OVERFLOWS", 3)
    overflow(monkeypatch, range(7, 13), 1.0)
    what = r"steps 7 to 9: gradients overflow float16 at precision\.min_scale=1\. .* step 5, the last good checkpoint"
    with pytest.raises(NonFiniteError, match=what) as error:
        loop.train(scaled(tmp_path))
    assert "precision.compute=float32 precision.loss_scale=none" in str(error.value)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 6)


def test_a_step_that_is_not_skipped_has_a_finite_loss_under_loss_scaling_too(tmp_path, monkeypatch):
    overflow(monkeypatch, (2, 3), 2.0)
    FakeProgram.at = {4: lambda: float("nan")}
    with pytest.raises(NonFiniteError, match="step 4: loss nan"):
        loop.train(scaled(tmp_path))


def test_a_signal_does_not_save_a_non_finite_state(tmp_path, monkeypatch):
    blow_up(monkeypatch, 7, "params")
    kill_at(7, signal.SIGTERM)
    with pytest.raises(NonFiniteError, match="state after step 7 is not finite"):
        loop.train(make_config(tmp_path))
    assert saved(tmp_path) == [5]


def test_a_saved_state_that_leads_to_a_non_finite_loss_is_named(tmp_path):
    """Resuming from it, at whatever learning rate, would fail in the same way."""
    kill_at(7, signal.SIGTERM)
    loop.train(make_config(tmp_path))
    FakeProgram.at = {8: lambda: float("nan")}
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="step 8: loss nan") as error:
            loop.train(make_config(tmp_path))
        assert f"Move {tmp_path}/checkpoints/7 away" in str(error.value) and "resume from step 5" in str(error.value)
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    with pytest.raises(NonFiniteError, match=r"checkpoints/7 away.*start from step 0"):
        loop.train(make_config(tmp_path))


def test_the_host_runs_at_most_two_steps_ahead(tmp_path, monkeypatch):
    read, ahead = [], []
    advance, device_get = TrainingRun.advance, jax.device_get

    def advance_and_count(*arguments):
        advance(*arguments)
        ahead.append(len(read))

    monkeypatch.setattr(TrainingRun, "advance", advance_and_count)
    monkeypatch.setattr(jax, "device_get", lambda arrays: read.append(arrays) or device_get(arrays))
    loop.train(make_config(tmp_path, train__log_every=100, train__eval_every=0, checkpoint__every=0))
    assert ahead == [0, 0, *range(1, 11)]


def test_without_periodic_saves_only_a_signal_saves(tmp_path, capsys):
    config = make_config(tmp_path / "a", checkpoint__every=0)
    assert loop.train(config) is Exit.DONE
    assert not (tmp_path / "a" / "checkpoints").exists()
    out = capsys.readouterr().out
    assert out.index("checkpoint.every=0: nothing will be saved") < out.index("starting; 12 steps to go")
    assert "Nothing was saved (checkpoint.every=0)" in out
    config = make_config(tmp_path / "b", checkpoint__every=0)
    kill_at(7, signal.SIGTERM)
    assert loop.train(config) is Exit.PREEMPTED
    assert saved(tmp_path / "b") == [7]
    FakeProgram.at = {}
    capsys.readouterr()
    assert loop.train(config) is Exit.DONE
    assert "Nothing was saved since step 7 (checkpoint.every=0)" in capsys.readouterr().out
    assert loop.train(config) is Exit.DONE
    assert "Raise train.steps to continue from step 7." in capsys.readouterr().out


def test_a_finished_run_says_whether_more_steps_can_follow(tmp_path, reference, capsys):
    assert loop.train(make_config(reference)) is Exit.DONE
    assert "nothing to do. Raise train.steps to continue.\n" in capsys.readouterr().out
    directory = finished_without_checkpoints(tmp_path / "run")
    assert "Nothing was saved" not in capsys.readouterr().out.split("done:")[0]
    assert loop.train(make_config(directory)) is Exit.DONE
    out = capsys.readouterr().out
    assert "nothing to do" in out and "Raise train.steps" not in out
    assert "has no checkpoint" in out and "another run.dir with checkpoint.every" in out
    shutil.copytree(reference, tmp_path / "lost", ignore=shutil.ignore_patterns("checkpoints"))
    assert loop.train(make_config(tmp_path / "lost")) is Exit.DONE
    out = capsys.readouterr().out
    assert "12 steps were done, and saved, and no checkpoint is left" in out and "starting again" not in out


def test_a_finished_run_refuses_another_batch(reference):
    with pytest.raises(CheckpointError, match=r"Restore train\.batch="):
        loop.train(make_config(reference, train__batch=16))


def test_another_model_is_refused_and_nothing_changes(reference):
    before = snapshot(reference)
    with pytest.raises(CheckpointError, match=r"model\.width: 8 -> 16"):
        loop.train(make_config(reference, model__width=16, train__steps=20))
    assert snapshot(reference) == before


def test_a_finished_run_continues_with_more_steps_and_says_what_changed(tmp_path, reference, capsys):
    shutil.copytree(reference, tmp_path / "run")
    reference = tmp_path / "run"
    assert loop.train(make_config(reference, train__steps=14)) is Exit.DONE
    out = capsys.readouterr().out
    assert "train.steps: 12 -> 14" in out
    assert "resuming after step 12" in out
    assert [r["step"] for r in records(reference)] == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__steps": 24}, "step 13 was to be 0, and is 0.05. To keep the old schedule, set optim.decay_steps=12."),
        ({"train__steps": 14, "optim__lr": 0.2, "optim__decay_steps": 12}, "optim.lr=0.1."),
        ({"train__steps": 14, "optim__min_lr": 0.05, "optim__decay_steps": 12}, "was to be 0, and is 0.05"),
        ({"train__steps": 14, "optim__decay": "constant"}, "is 0.1. To keep the old schedule, set optim.decay=cosine"),
        (
            {"train__steps": 14, "optim__warmup": 13, "optim__decay_steps": 100},
            "set optim.warmup=0 optim.decay_steps=12.",
        ),
        (
            {"train__steps": 14, "optim__decay_start": 13, "optim__decay_steps": 14},
            "and is 0.1. To keep the old schedule, set optim.decay_start=null optim.decay_steps=12.",
        ),
        ({"train__steps": 14, "optim__decay_steps": 12}, ""),
        ({"train__steps": 14, "optim__decay_steps": 12, "train__log_every": 3}, ""),
    ],
)
def test_a_changed_schedule_is_told_with_the_next_rates(tmp_path, reference, capsys, changes, said):
    shutil.copytree(reference, tmp_path / "run")
    assert loop.train(make_config(tmp_path / "run", **changes)) is Exit.DONE
    (*_, told) = [line for line in capsys.readouterr().out.splitlines() if "learning rate" in line] or [""]
    assert (said in told) if said else not told


def test_data_that_changed_is_refused_unless_that_is_allowed(tmp_path, reference, capsys):
    shutil.copytree(reference, tmp_path / "run")
    before = saved(tmp_path / "run"), metrics(tmp_path / "run")
    with pytest.raises(DataError, match=r"sha256 [0-9a-f]{12} then, [0-9a-f]{12} now \(Markov.*data.allow_change=true"):
        loop.train(make_config(tmp_path / "run", train__steps=14, data__branching=3))
    assert (saved(tmp_path / "run"), metrics(tmp_path / "run")) == before
    capsys.readouterr()
    changed = {"train__steps": 14, "data__branching": 3}
    assert loop.train(make_config(tmp_path / "run", **changed, data__allow_change=True)) is Exit.DONE
    assert "It goes on with what is there now: data.allow_change=true." in capsys.readouterr().out
    assert (
        loop.train(make_config(tmp_path / "run", **changed | {"train__steps": 16})) is Exit.DONE
    )  # it is the data now


@pytest.mark.parametrize("kept, missing", [(3, "8 to 11"), (0, "2 to 11"), (5, None)])
def test_records_lost_before_the_checkpoint_are_logged(tmp_path, capsys, kept, missing):
    kill_at(11, signal.SIGTERM)
    loop.train(make_config(tmp_path))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 2 * n + 2}) + "\n" for n in range(kept)))
    FakeProgram.at = {}
    capsys.readouterr()
    assert loop.train(make_config(tmp_path, train__log_every=1)) is Exit.DONE  # every step, but only from here on
    out = capsys.readouterr().out
    assert (
        (f"{tmp_path}/metrics.jsonl lacks the records of steps {missing}" in out) if missing else ("lacks" not in out)
    )


def test_the_elapsed_time_counts_all_starts(tmp_path, capsys):
    assert loop.train(make_config(tmp_path)) is Exit.DONE
    assert re.search(r"^done: step 12 .*  in [\d.]+s$", capsys.readouterr().out, re.MULTILINE)
    text = json.loads((tmp_path / "status.json").read_text())
    text["goodput"]["step"] += 7200
    (tmp_path / "status.json").write_text(json.dumps(text))
    assert loop.train(make_config(tmp_path, train__steps=14)) is Exit.DONE
    assert re.search(
        r"^done: step 14 .*  in [\d.]+s, 2h00m in total with 1 restart$", capsys.readouterr().out, re.MULTILINE
    )


def cut_short(directory):
    """A run that failed before its first save."""
    FakeProgram.at = {3: lambda: 1 / 0}
    with pytest.raises(ZeroDivisionError):
        loop.train(make_config(directory))
    FakeProgram.at = {}
    return directory


def finished_without_checkpoints(directory):
    assert loop.train(make_config(directory, checkpoint__every=0)) is Exit.DONE
    return directory


@pytest.mark.parametrize("run", [cut_short, finished_without_checkpoints])
def test_without_a_checkpoint_the_saved_config_defines_the_model(tmp_path, run):
    directory = run(tmp_path / "run")
    before = snapshot(directory)
    with pytest.raises(CheckpointError, match=r"model\.width: 8 -> 16"):
        loop.train(make_config(directory, model__width=16))
    assert snapshot(directory) == before
    (directory / "config.yaml").write_bytes(b"model: \xff")
    with pytest.raises(CheckpointError, match=r"does not define the model:\n.*config\.yaml.*\nFix"):
        loop.train(make_config(directory))


def test_a_run_cut_short_before_its_first_save_starts_again_and_says_so(tmp_path, reference, capsys):
    directory = cut_short(tmp_path / "run")
    assert loop.train(make_config(directory)) is Exit.DONE
    assert "saved no checkpoint: starting again from step 0" in capsys.readouterr().out
    assert metrics(directory) == metrics(reference)


def test_a_finished_run_without_checkpoints_is_not_trained_over(tmp_path):
    directory = finished_without_checkpoints(tmp_path / "run")
    before = snapshot(directory)
    with pytest.raises(CheckpointError, match=r"finished its 12 steps without a checkpoint"):
        loop.train(make_config(directory, checkpoint__every=0, train__steps=20))
    assert snapshot(directory) == before


def test_another_batch_size_is_refused(tmp_path):
    kill_at(7, signal.SIGTERM)
    loop.train(make_config(tmp_path))
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"train\.batch=4, not 8: .* Restore train\.batch=4"):
        loop.train(make_config(tmp_path, train__batch=8))
    assert snapshot(tmp_path) == before


def test_a_second_run_in_the_directory_is_refused_and_harms_nothing(tmp_path):
    before = {}

    def intrude():
        before.update(snapshot(tmp_path))
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on \S+ since \S+ is writing there"):
            loop.train(make_config(tmp_path, train__steps=20))
        assert snapshot(tmp_path) == before
        return 1

    FakeProgram.at = {7: intrude}
    assert loop.train(make_config(tmp_path, checkpoint__every=0)) is Exit.DONE  # no save writes meanwhile
    assert before


def test_the_directory_is_read_under_the_lock(tmp_path, monkeypatch, capsys):
    """Another run of the directory, from start to end, just before this one locks it."""
    lock_directory = run_dir.lock_directory

    def lock_late(*arguments):
        monkeypatch.setattr(run_dir, "lock_directory", lock_directory)
        assert loop.train(make_config(tmp_path)) is Exit.DONE
        before.update(snapshot(tmp_path))
        return lock_directory(*arguments)

    before = {}
    monkeypatch.setattr(run_dir, "lock_directory", lock_late)
    assert loop.train(make_config(tmp_path)) is Exit.DONE
    assert before and snapshot(tmp_path) == before
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, text", [("config.yaml", "base: ../mine.yaml  # by hand\n"), ("metrics.jsonl", '{"step": 1}\n')]
)
def test_foreign_files_are_not_overwritten(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=rf"run\.dir={tmp_path}: .*{name}.* to no run.*Move it .*another run\.dir"):
        loop.train(make_config(tmp_path))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["config.yaml", "loss.png", "samples.txt", ".lock"])
def test_a_directory_where_a_file_belongs_is_refused_before_compiling(tmp_path, name):
    (tmp_path / name).mkdir()
    FakeProgram.at = {"compile": lambda: pytest.fail("compiled")}
    with pytest.raises(ConfigError, match=rf"run\.dir={tmp_path}: {name} is a directory.*Move it"):
        loop.train(make_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints"])
def test_a_file_where_a_directory_belongs_is_refused_before_compiling(tmp_path, name):
    (tmp_path / name).write_text("mine")
    FakeProgram.at = {"compile": lambda: pytest.fail("compiled")}
    with pytest.raises(ConfigError, match=rf"run\.dir={tmp_path}: {name} is a file.*Move it"):
        loop.train(make_config(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_missing_tracker_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = make_config(tmp_path, run__trackers=["wandb"])
    with pytest.raises(ConfigError, match=r"pip install 'spmd-lm\[wandb\]'"):
        loop.train(config)
    assert not list(tmp_path.iterdir())


def test_a_tracker_gets_the_records_of_a_run(tmp_path, monkeypatch, capsys):
    def crash(metrics, step):
        tracked.append(step)
        raise OSError("down")

    tracked = []
    monkeypatch.setattr(loop, "require_packages", lambda names: None)
    opened = trackers.TrackerRun(crash, lambda code: tracked.append(f"exit {code}"), None)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda run: opened)
    assert loop.train(make_config(tmp_path, run__trackers=["wandb"])) is Exit.DONE
    assert tracked == [2, 4, 6, 8, 10, 12, "exit 0"]
    out = capsys.readouterr().out
    assert out.count("wandb: OSError: down") == 1 and "wandb: 6 of 6 records were lost" in out


def test_only_the_first_process_tracks(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "Trackers", lambda *_: pytest.fail("tracks"))
    monkeypatch.setattr(run_dir.jax, "process_index", lambda: 1)
    with run_dir.RunDir.open_files(None, None, None, print) as metrics_log:
        assert metrics_log is None


def test_files_without_foreign_content_may_be_overwritten(tmp_path):
    """A disk that was full when the run started leaves no more than this."""
    (tmp_path / "config.yaml").write_text(dump(make_config(tmp_path)))
    (tmp_path / "metrics.jsonl").write_text("")
    assert loop.train(make_config(tmp_path)) is Exit.DONE


def test_a_checkpoint_alone_identifies_a_run(tmp_path, reference):
    directory = shutil.copytree(reference, tmp_path / "run")
    (directory / "status.json").unlink()
    assert loop.train(make_config(directory, train__steps=14)) is Exit.DONE
    assert records(directory)[-1]["step"] == 14


def test_a_refusal_leaves_no_trace(tmp_path, monkeypatch):
    def impossible(self, config):
        raise LayoutError("no such layout")

    with pytest.raises(DataError):
        loop.train(with_text(make_config(tmp_path / "runs" / "a"), tmp_path / "text", "short"))
    with pytest.raises(DataError, match="validation text"):
        loop.train(with_text(make_config(tmp_path / "runs" / "a"), tmp_path / "text", "long enough " * 5))
    monkeypatch.setattr(FakeProgram, "__init__", impossible)
    with pytest.raises(LayoutError):
        loop.train(make_config(tmp_path / "runs" / "b"))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_state_that_cannot_be_restored_leaves_the_files_of_the_run(tmp_path, monkeypatch):
    kill_at(7, signal.SIGTERM)
    loop.train(make_config(tmp_path))
    files = [tmp_path / "config.yaml", tmp_path / "metrics.jsonl"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 99}\n')  # beyond the checkpoint: a restart drops it
    before = [path.read_bytes() for path in files]
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="different state"):
        patch.setattr(FakeProgram, "abstract_canonical", lambda self: {"w": jax.ShapeDtypeStruct((1,), "int32")})
        loop.train(make_config(tmp_path, train__log_every=3))
    assert [path.read_bytes() for path in files] == before
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 5)


def test_damaged_metrics_are_refused_before_the_config_is_written(tmp_path):
    kill_at(7, signal.SIGTERM)
    loop.train(make_config(tmp_path))
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n")
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 1"):
        loop.train(make_config(tmp_path, train__log_every=3))
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert status(tmp_path)["state"] == "failed"


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(tmp_path, monkeypatch):
    def full(self, clock, **changes):
        raise OSError(28, "No space left on device")

    def fail():
        monkeypatch.setattr(run_dir.Status, "write", full)
        raise ZeroDivisionError

    FakeProgram.at = {3: fail}
    with pytest.raises(ZeroDivisionError):
        loop.train(make_config(tmp_path, train__log_every=100, train__eval_every=0))


def test_without_a_published_peak_there_is_no_mfu(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingRun, "utilization", UTILIZATION._replace(peak=None))
    assert loop.train(make_config(tmp_path)) is Exit.DONE
    assert {record["mfu"] for record in records(tmp_path)} == {None}


@pytest.mark.parametrize("case", ["a file in its path", "a read-only file system"])
def test_an_unwritable_directory_is_refused_before_compiling(tmp_path, case):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "run" if case == "a file in its path" else "/proc/run"
    FakeProgram.at = {"compile": lambda: pytest.fail("compiled")}
    with pytest.raises(
        ConfigError, match=r"run.dir=\S+: (cannot be written: .*belongs to \w+|\S+/file is no directory)"
    ):
        loop.train(make_config(directory))


def test_a_failed_save_fails_the_run(tmp_path, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.ocp, "save_checkpointables_async", full_disk)
    with pytest.raises(CheckpointError, match=r"5 was not saved: .*No space left on device"):
        loop.train(make_config(tmp_path))
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 5)


def with_text(config, path, text):
    path.write_text(text)
    tree = config.model_dump(by_alias=True) | {"data": {"source": "text", "path": str(path)}}
    tree["model"]["vocab"] = 256
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize("side, text, every", [("training", "short", 0), ("validation", "long enough " * 5, 4)])
def test_too_little_text_is_refused_before_compiling(tmp_path, side, text, every):
    FakeProgram.at = {"compile": lambda: pytest.fail("compiled")}
    config = make_config(tmp_path / "run", train__eval_every=every)
    with pytest.raises(DataError, match=f"{side} text"):
        loop.train(with_text(config, tmp_path / "text", text))


def test_without_evaluation_no_held_out_text_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "sample", lambda run: "")
    config = make_config(tmp_path / "run", train__eval_every=0)
    assert loop.train(with_text(config, tmp_path / "text", "long enough " * 5)) is Exit.DONE


def test_text_runs_leave_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "generate_text", lambda *_: ["one", "two"])
    config = with_text(make_config(tmp_path / "run"), tmp_path / "text", "to be or not to be, " * 50)
    assert loop.train(config) is Exit.DONE
    assert (tmp_path / "run" / "samples.txt").read_text().splitlines() == ["one", "-" * 80, "two"]


def vocabulary(directory):
    directory.mkdir()
    return wordpiece(directory)


def test_a_run_keeps_its_vocabulary_and_continues_with_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "sample", lambda run: "")
    (tmp_path / "corpus.txt").write_text("wanted a want. " * 200)
    first, same, other = (vocabulary(tmp_path / name) for name in ("first", "same", "other"))
    other.write_text("\n".join(reversed(first.read_text().split())))
    text = {"source": "text", "path": str(tmp_path / "corpus.txt")}

    def config(tokenizer, **changes):
        made = make_config(tmp_path / "run", **changes)
        return RunConfig.model_validate(made.model_dump(by_alias=True) | {"data": text | {"tokenizer": str(tokenizer)}})

    assert loop.train(config(first)) == Exit.DONE
    kept = tmp_path / "run" / "tokenizer"
    assert (kept / "vocab.txt").read_bytes() == first.read_bytes()
    before = snapshot(tmp_path / "run")
    for tokenizer in (other, "bytes"):
        with pytest.raises(ConfigError, match=rf"^data\.tokenizer={tokenizer} is not the vocabulary of {kept.parent}"):
            loop.train(config(tokenizer, train__steps=14, model__vocab=256 if tokenizer == "bytes" else 16))
    assert snapshot(tmp_path / "run") == before
    assert loop.train(config(same, train__steps=14)) == Exit.DONE
    assert loop.train(config(kept, train__steps=16)) == Exit.DONE


FIGURES = [(5, 0.2), (1, 0.1), (1, 0.3), (4, 0.3), (7, math.nan), (6, 0.2)]  # loss and accuracy after each step


@pytest.mark.parametrize(("figure", "best"), [("eval_loss", 2), ("eval_accuracy", 3)])
def test_the_best_checkpoint_is_kept(tmp_path, monkeypatch, figure, best):
    """Restarts do not matter; of equal ones the first is kept."""
    evaluations = ({"eval_loss": loss, "eval_accuracy": accuracy} for loss, accuracy in FIGURES)
    monkeypatch.setattr(run, "validation_metrics", lambda *given: (next(evaluations), 1))
    every_step = {"train__eval_every": 1, "train__log_every": 1, "checkpoint__every": 1, "checkpoint__keep": 2}
    for steps in (4, 6):
        loop.train(make_config(tmp_path, train__steps=steps, checkpoint__keep_best=figure, **every_step))
        assert saved(tmp_path) == sorted({best, steps - 1, steps})
    loop.train(make_config(tmp_path, train__steps=7, **every_step | {"train__eval_every": 0}))
    assert saved(tmp_path) == [6, 7]


def test_a_figure_that_is_not_logged_is_refused_once_it_should_be_there(tmp_path):
    changes = {"train__steps": 4, "checkpoint__every": 4}
    with pytest.raises(ConfigError, match=r"keep_best=eval_los: step 4 has no such figure\. Did you mean eval_loss\?"):
        loop.train(make_config(tmp_path, checkpoint__keep_best="eval_los", **changes))
    assert saved(tmp_path) == [4], "nothing is lost"
