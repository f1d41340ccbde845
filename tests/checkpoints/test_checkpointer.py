"""A checkpoint is restored bit for bit, on any mesh, or refused with a reason."""

import errno
import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.checkpoints.damage import unreadable
from spmd_lm.checkpoints.saved_run import check_compatible, check_saved_config, check_warm_start
from spmd_lm.checkpoints.storage import OrbaxStorage
from spmd_lm.checkpoints.tiers import Tiers
from spmd_lm.config.schema import Checkpoint, RunConfig
from spmd_lm.errors import CheckpointError
from spmd_lm.training.replay import changed_leaves
from tests import processes

META = make_meta({"model": {"layers": 4}}, num_samples=48, fingerprint="abc")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:  # the shape of a TrainState
    step: Any
    params: Any
    mu: Any
    buffers: Any


def make_state(seed=0, mesh=None):
    rng = np.random.default_rng(seed)
    params = {
        "block": {
            "w": rng.normal(size=(4, 16, 8)).astype("float32"),
            "b": rng.normal(size=(8, 8)).astype(jnp.bfloat16),
        },
        "embedding": rng.normal(size=(32, 16)).astype("float32"),
    }
    state = State(jnp.int32(7), params, jax.tree.map(np.square, params), {})
    return jax.tree.map(jax.device_put, state, shardings(state, mesh or make_mesh(4, 2)))


def make_mesh(*sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], (AxisType.Auto,) * len(sizes), devices=devices)


def shardings(state, mesh):
    """Shardings of the last two dims, whatever the mesh's rank."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 2), *mesh.axis_names[: x.ndim])), state
    )


def abstract(state, mesh):
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings(state, mesh)
    )


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (8, 1), (1, 8), (4,), (1,)])
def test_restores_the_same_bits_on_another_mesh(tmp_path, sizes):
    state, mesh = make_state(), make_mesh(*sizes)
    saver = Checkpointer(tmp_path)
    saver.save(7, state, META)
    saver.close()
    restored = Checkpointer(tmp_path).restore(7, abstract(state, mesh))
    assert_same_bits(restored, state)
    assert Checkpointer(tmp_path).meta(7) == META
    assert restored.params["embedding"].sharding == shardings(state, mesh).params["embedding"]
    params = Checkpointer(tmp_path).restore_params(7, abstract(state, mesh).params)
    assert_same_bits(params, state.params)
    assert params["embedding"].sharding == restored.params["embedding"].sharding


def test_keeps_the_newest_and_ignores_other_directories(tmp_path):
    (tmp_path / "9").mkdir()
    (tmp_path / "1.saving.orbax-checkpoint-tmp").mkdir()
    for name in ("notes", "1.saving.bak", "2.deleting-not"):
        (tmp_path / name).write_text("not mine to count")
    saver = Checkpointer(tmp_path, Checkpoint(keep=2))
    assert saver.latest_step() is None
    for step in (1, 2, 3):
        saver.save(step, make_state(step), META)
    saver.wait()
    assert saver.steps() == [2, 3]
    assert (tmp_path / "9").is_dir() and (tmp_path / "notes").exists()
    saver.save(9, make_state(9), META)
    saver.close()
    assert saver.steps() == [3, 9]
    assert (tmp_path / "9.foreign").is_dir() and (tmp_path / "notes").exists()  # moved aside, not deleted
    assert_same_bits(saver.restore(9, abstract(make_state(), make_mesh(8, 1))), make_state(9))


def test_a_step_older_than_the_newest_is_saved_all_the_same(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint(keep=3))
    for step in (8, 4):
        saver.save(step, make_state(step), META)
    saver.close()
    assert saver.steps() == [4, 8]


def test_opening_changes_nothing(tmp_path):
    reader = Checkpointer(tmp_path / "never")
    assert (reader.steps(), reader.latest_step()) == ([], None)
    reader.wait()
    reader.close()
    assert not (tmp_path / "never").exists()


def test_the_state_may_be_donated_while_it_is_saved(tmp_path):
    state = make_state()
    before = jax.tree.map(np.array, state)
    saver = Checkpointer(tmp_path)
    saver.save(1, state, META)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)(state))
    saver.close()
    assert_same_bits(saver.restore(1, abstract(before, make_mesh(8, 1))), before)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            lambda p: {**p, "embedding": p["embedding"][:, :8]},
            "params.embedding: saved float32[32, 16], expected float32[32, 8]",
        ),
        (
            lambda p: {**p, "embedding": p["embedding"].astype(jnp.bfloat16)},
            "params.embedding: saved float32[32, 16], expected bfloat16[32, 16]",
        ),
        (lambda p: {"block": p["block"]}, "params.embedding: saved float32[32, 16], expected nothing"),
        (lambda p: {**p, "extra": p["embedding"]}, "params.extra: saved nothing, expected float32[32, 16]"),
    ],
    ids=["shape", "dtype", "missing", "extra"],
)
def test_another_state_is_refused_by_name(tmp_path, change, complaint):
    state = make_state()
    saver = Checkpointer(tmp_path)
    saver.save(1, state, META)
    saver.close()
    other = State(state.step, change(state.params), state.mu, state.buffers)
    with pytest.raises(CheckpointError, match="different state") as error:
        saver.restore(1, abstract(other, make_mesh(4, 2)))
    assert complaint in str(error.value)
    with pytest.raises(CheckpointError, match="different state") as error:
        saver.restore_params(1, abstract(other, make_mesh(4, 2)).params)
    assert complaint in str(error.value)


def test_a_save_that_fails_in_the_background_surfaces_at_the_next_one(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint(keep=1))
    saver.save(1, make_state(1), META)
    saver.wait()
    with full_disk():
        saver.save(2, {"w": jnp.asarray(np.random.default_rng(0).normal(size=2**18))}, META)
        sentence = r"/2 was not saved: .*\n[\d,]+ bytes are free .*, and it takes up to [\d,]{7,}\. Older .*: 1\."
        with pytest.raises(CheckpointError, match=sentence):
            saver.save(3, make_state(3), META)
    assert saver.steps() == [1]
    assert_same_bits(saver.restore(1, abstract(make_state(), make_mesh(2, 4))), make_state(1))


@pytest.mark.parametrize("removed", ["saving*", "*"])
@pytest.mark.parametrize("when", ["while arrays are written", "once they are written", "once their record is"])
def test_a_save_that_is_removed_while_it_is_written_costs_that_save(tmp_path, monkeypatch, when, removed):
    """Somebody else removes the directory of the save, or that of all checkpoints."""
    told: list[str] = []
    saver = Checkpointer(tmp_path / "checkpoints", Checkpoint(keep=9), log=told.append)
    write = Checkpointer._write_record

    def remove() -> None:
        """Renames at once, whatever else is written there."""
        for path in [*saver.directory.glob("2.saving*")] if removed == "saving*" else [saver.directory]:
            path.rename(tmp_path / f"removed {path.name}")

    class Removed:
        """A save of arrays."""

        def __init__(self, response):
            self.response = response

        def result(self, timeout=None):
            self.response.result(timeout)
            if when != "once their record is":
                remove()
            if when == "while arrays are written":
                raise ValueError("what orbax says then")

    def write_record(self, record, response):
        write(self, record, Removed(response) if record.step == 2 else response)
        if record.step == 2 and when == "once their record is":
            remove()

    monkeypatch.setattr(Checkpointer, "_write_record", write_record)
    saver.save(1, make_state(1), META)
    saver.save(2, make_state(2), META)
    saver.save(3, make_state(3), META)
    saver.close()
    assert saver.steps() == ([1, 3] if removed == "saving*" else [3])
    assert_same_bits(saver.restore(3, abstract(make_state(), make_mesh(2, 4))), make_state(3))
    (message,) = told
    assert "2.saving was removed while it was written" in message
    saver.save(2, make_state(2), META)
    with pytest.raises(CheckpointError, match="/2 was not saved"):
        saver.close()


def test_an_old_checkpoint_that_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    told: list[str] = []
    saver = Checkpointer(tmp_path, Checkpoint(keep=1), log=told.append)
    saver.save(1, {"w": jnp.arange(8.0)}, META)
    saver.wait()

    def rmtree(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    saver.save(2, {"w": jnp.arange(8.0)}, META)
    saver.close()
    assert saver.steps() == [2] and len(told) == 1
    assert "1.deleting cannot be deleted: Permission denied" in told[0]
    monkeypatch.undo()
    saver.save(3, {"w": jnp.arange(8.0)}, META)
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_replay_tells_leaves_that_are_not_there(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint())
    saver.save(1, {"b": jnp.ones(4), "w": jnp.arange(8.0)}, META)
    saver.close()
    assert changed_leaves(saver, 1, {"b": jnp.ones(4), "w": jnp.arange(8.0)}) == []
    assert changed_leaves(saver, 1, {"b": jnp.zeros(4)}) == ["b", "w"]


def test_a_save_counts_where_an_old_checkpoint_cannot_be_moved(tmp_path, monkeypatch):
    told: list[str] = []
    saver = Checkpointer(tmp_path, Checkpoint(keep=1), log=told.append)
    saver.save(1, {"w": jnp.arange(8.0)}, META)
    saver.wait()
    rename = Path.rename

    def refuse(path, target):
        if str(target).endswith(".deleting"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    saver.save(2, {"w": jnp.arange(8.0)}, META)
    assert saver.wait() == 2
    saver.close()
    assert saver.steps() == [1, 2]
    assert told == [f"{tmp_path / '1'} cannot be deleted: Permission denied. It takes room on the disk."]


def test_a_checkpoint_that_is_read_back_wrong_does_not_count(tmp_path, monkeypatch):
    saver = Checkpointer(tmp_path, Checkpoint(read_back=True))
    saver.save(1, {"w": jnp.arange(8.0)}, META)
    assert saver.steps() == [1]
    load = OrbaxStorage.load
    monkeypatch.setattr(OrbaxStorage, "load", lambda *args, **kw: jax.tree.map(lambda x: x + 1, load(*args, **kw)))
    with pytest.raises(CheckpointError, match=r"w: not the bits that were saved"):
        saver.save(2, {"w": jnp.arange(8.0)}, META)
    assert saver.steps() == [1]


def test_a_synchronous_save_fails_at_once(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint(asynchronous=False))
    with full_disk(), pytest.raises(CheckpointError, match="/2 was not saved"):
        saver.save(2, {"w": jnp.asarray(np.random.default_rng(0).normal(size=2**18))}, META)


class full_disk:
    """No file may grow beyond 64 KiB: the nearest thing to a full disk that needs no privileges."""

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)


@pytest.mark.parametrize("error", [TimeoutError("a barrier"), MemoryError(), PermissionError(13, "Permission denied")])
def test_what_says_nothing_about_the_files_is_no_damage(tmp_path, error):
    assert unreadable(tmp_path, error) and unreadable(tmp_path, ValueError("DATA_LOSS")) == ""


def test_a_save_that_fails_too_does_not_hide_why_a_run_ends(tmp_path, monkeypatch):
    def fail(self, step):
        raise CheckpointError("no room")

    lines = []
    tiers = Tiers(tmp_path, Checkpoint(), lines.append)
    monkeypatch.setattr(Checkpointer, "close", lambda self: fail(self, 1))
    with pytest.raises(ZeroDivisionError), tiers.closing():
        1 / 0  # noqa: B018
    assert lines == ["no room"]
    with pytest.raises(CheckpointError, match="no room"), tiers.closing():
        pass


def test_kill_during_a_save_leaves_the_one_before(tmp_path):
    program = """
        import os, signal, sys
        import jax.numpy as jnp, numpy as np
        from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
        saver, meta = Checkpointer(sys.argv[1]), make_meta({}, 0, "")
        saver.save(1, {"w": jnp.arange(8.0)}, meta)
        saver.wait()
        saver.save(2, {"w": jnp.asarray(np.random.default_rng(0).normal(size=2**23))}, meta)
        while not any(".saving" in name for name in os.listdir(sys.argv[1])):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = processes.finish([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(".saving" in path.name for path in tmp_path.iterdir())  # the save was indeed in progress
    saver = Checkpointer(tmp_path)
    assert saver.latest_step() == 1
    restored = saver.restore(1, {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jnp.arange(8.0).sharding)})
    assert_same_bits(restored, {"w": jnp.arange(8.0)})
    for step in (3, 4):
        saver.save(step, {"w": jnp.arange(8.0)}, META)
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]  # the partial one was removed


@pytest.mark.slow
def test_ten_kills_at_random_times_in_saves_and_deletes(tmp_path):
    """The newest checkpoint holds what was saved as it, and the next process resumes from it."""
    program = """
        import sys
        import jax.numpy as jnp
        from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
        from spmd_lm.config.schema import Checkpoint
        saver, meta = Checkpointer(sys.argv[1], Checkpoint(keep=1)), make_meta({}, 0, "")
        for step in range((saver.latest_step() or 0) + 1, 10**6):
            saver.save(step, {"w": jnp.full(2**18, step, jnp.float32)}, meta)
            print(step, flush=True)
    """
    rng, newest, moments = random.Random(0), 0, set()
    abstract = {"w": jax.ShapeDtypeStruct((2**18,), jnp.float32, sharding=jnp.arange(8.0).sharding)}
    for _ in range(10):
        command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            assert process.stdout.readline()
        time.sleep(rng.random())
        process.kill()
        process.communicate()
        moments |= {path.suffix for path in tmp_path.iterdir()}
        saver = Checkpointer(tmp_path)
        steps = saver.intact_steps()
        assert steps == saver.steps() and steps[-1] > newest
        newest = steps[-1]
        restored = saver.restore(newest, abstract)
        assert (np.asarray(restored["w"]) == newest).all()
    assert moments - {""}  # some of them hit a save, or the deletion behind it


CONFIG = {
    "run": {"name": "a"},
    "model": {"layers": 4, "width": 64, "scan": True},
    "objective": {"kind": "causal_lm"},
    "precision": {"params": "float32", "compute": "bfloat16"},
    "parallel": {"data": 8, "model": 1},
}


@pytest.mark.parametrize(
    "path, value",
    [("model.width", 128), ("model.mlp_width", 16), ("objective.kind", "masked_lm"), ("precision.params", "bfloat16")],
)
def test_another_model_is_refused_with_old_and_new(tmp_path, path, value):
    with pytest.raises(CheckpointError) as error:
        check_compatible(CONFIG, changed(path, value), tmp_path)
    old = dict(CONFIG[path.split(".")[0]]).get(path.split(".")[1], "not set")
    assert f"{path}: {old} -> {value}" in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    "path, value",
    [
        ("parallel.model", 4),
        ("precision.compute", "float32"),
        ("model.scan", False),
        ("model.dropout", 0.0),
        ("model.attention_dropout", 0.0),
        ("run.compiler_options", "none"),
        ("run.deterministic", True),
    ],
)
def test_other_differences_are_returned(tmp_path, path, value):
    (notice,) = check_compatible(CONFIG, changed(path, value), tmp_path)
    assert path in notice and str(value) in notice


def test_a_key_newer_than_the_checkpoint_is_at_its_default(tmp_path):
    model = {"layers": 1, "width": 8, "heads": 1, "context": 8, "vocab": 16}
    tree = {"model": model, "data": {"source": "synthetic"}, "optim": {"lr": 0.1}, "train": {"steps": 12, "batch": 4}}
    config = RunConfig.model_validate(tree).model_dump(by_alias=True)
    saved = json.loads(json.dumps(config))
    for section, key in [("model", "activation"), ("model", "scan"), ("checkpoint", "async"), ("remat", "policy")]:
        del saved[section][key]
    assert check_compatible(saved, config, tmp_path) == []
    config["model"]["activation"] = "gelu"
    with pytest.raises(CheckpointError, match=r"model\.activation: gelu_tanh -> gelu"):
        check_compatible(saved, config, tmp_path)


def test_sizes_derived_from_other_keys_may_be_explicit(tmp_path):
    """An imported model's config.json writes them out."""
    model = {"layers": 1, "width": 8, "heads": 2, "context": 8, "vocab": 16}
    implicit, explicit = {"model": model}, {"model": model | {"mlp_width": 32, "kv_heads": 2}}
    for saved, config in ((implicit, explicit), (explicit, implicit)):
        assert check_compatible(saved, config, tmp_path) == []
        check_warm_start(saved, config, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.mlp_width: 48 -> not set"):
        check_warm_start({"model": model | {"mlp_width": 48}}, implicit, tmp_path)


@pytest.mark.parametrize("value", [0, -5, None, "10", 2.5])
def test_a_saved_config_that_no_run_has_is_refused(tmp_path, value):
    tree = {"model": {"layers": 1, "width": 8, "heads": 1, "context": 8, "vocab": 16}, "data": {"source": "synthetic"}}
    tree |= {"optim": {"lr": 0.1}, "train": {"steps": 12, "batch": 4}}
    saved = RunConfig.model_validate(tree).model_dump(by_alias=True)
    check_saved_config(saved, tmp_path)
    saved["train"]["log_every"] = value
    with pytest.raises(CheckpointError, match=r"has no train\.log_every"):
        check_saved_config(saved, tmp_path)


def test_a_run_may_move(tmp_path):
    assert check_compatible(CONFIG, changed("run.name", "b"), tmp_path) == []


def changed(path, value):
    config = json.loads(json.dumps(CONFIG))
    section, key = path.split(".")
    config[section][key] = value
    return config
