"""A flipped bit in one copy of a parameter: the device is named, with the parameter."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd_lm.cli import main
from spmd_lm.errors import Exit, ReplicaError
from spmd_lm.step.program import Program
from spmd_lm.training.replicas import ReplicaCheck
from tests.helpers import make_config, program

DEBUG = str(Path(__file__).parents[2] / "configs" / "debug.yaml")


def flip(array: jax.Array, number: int) -> jax.Array:
    """The array with a flipped bit in shard `number`."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[number].reshape(-1).view(np.uint32)[0] ^= 1
    placed = [jax.device_put(data, shard.device) for data, shard in zip(shards, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


def with_flip(state, number: int):
    embedding = state.params["embedding"] | {"tokens": flip(state.params["embedding"]["tokens"], number)}
    return dataclasses.replace(state, params=state.params | {"embedding": embedding})


@pytest.mark.parametrize(
    "layout, named", [({"data": 4, "model": 2}, 1), ({"data": 2, "model": 4}, 2), ({"data": 8, "zero": 3}, None)]
)
def test_the_device_is_named(layout, named):
    """Layouts have 4 copies, 2, and one."""
    p = program(make_config(parallel=layout, precision={"params": "float32"}))
    state, check = p.init(), ReplicaCheck(p)
    assert check.has_copies()  # of small arrays at least
    check.check(state, step=3)
    broken = with_flip(state, 5)
    if named is None:
        check.check(broken, step=3)
        return
    with pytest.raises(ReplicaError, match=r"step 3: copies differ: params\.embedding\.tokens on") as error:
        check.check(broken, step=3)
    device = state.params["embedding"]["tokens"].addressable_shards[5].device
    assert str(device) in str(error.value) and str(error.value).lower().count("cpu:") == named


def test_one_device_has_no_copies():
    assert not ReplicaCheck(program(make_config(precision={"params": "float32"}))).has_copies()


@pytest.mark.slow
def test_a_run_ends_before_it_saves_what_differs(tmp_path, monkeypatch, capsys):
    step, done = Program.step, []

    def flipping(self, state, batch):
        done.append(None)
        return step(self, with_flip(state, 2) if len(done) == 4 else state, batch)

    monkeypatch.setattr(Program, "step", flipping)
    line = ["train", DEBUG, "--devices", "8", f"run.dir={tmp_path / 'run'}", "model.layers=1", "parallel.data=4"]
    line += ["parallel.model=2", "train.steps=9", "train.replica_check_every=2", "checkpoint.every=3"]
    assert main(line) == Exit.CHECK_FAILED
    assert "step 4: copies differ: params.embedding.tokens" in capsys.readouterr().err
    assert main(line) == Exit.DONE  # from step 3, which is clean
