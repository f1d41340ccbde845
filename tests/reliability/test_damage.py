"""A checkpoint whose bits have changed is never taken for what was saved.

Arrays of megabytes: of small ones most bytes on disk are metadata, which orbax checks."""

import os
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.errors import DamagedCheckpointError

META = make_meta({"model": {"layers": 2}}, num_samples=48, fingerprint="abc")
STEP = 7


def make_state(mebibytes: int):
    rng = np.random.default_rng(0)
    rows = mebibytes * 2**20 // 4 // 1024 // 2
    params = {"w": rng.normal(size=(rows, 1024)).astype("float32")}
    moments = {"w": rng.normal(size=(rows, 1024)).astype("float32")}
    return {
        "step": jnp.int32(STEP),
        "params": params,
        "opt_state": moments,
        "half": jnp.arange(999, dtype=jnp.bfloat16),
    }


def save(directory: Path, mebibytes: int):
    state = jax.tree.map(jnp.asarray, make_state(mebibytes))
    saver = Checkpointer(directory)
    saver.save(STEP, state, META)
    saver.close()
    return state


class Damaged:
    """A checkpoint; one file at a time is changed and restored again."""

    def __init__(self, directory: Path, mebibytes: int):
        self.state = save(directory, mebibytes)
        self.abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        self.directory, self.checkpoints = directory, Checkpointer(directory)
        files = [path for path in sorted((directory / str(STEP)).rglob("*")) if path.is_file()]
        self.data = [path for path in files if path.stat().st_size > 2**20]
        self.others = [path for path in files if path not in self.data]

    def outcome(self) -> str:
        """detected, or harmless: the restored bits and meta are those that were saved."""
        try:
            restored, meta = self.checkpoints.restore(STEP, self.abstract), self.checkpoints.meta(STEP)
        except DamagedCheckpointError:
            return "detected"
        same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), restored, self.state)
        assert all(jax.tree.leaves(same)) and meta == META, "restored other bits in silence"
        return "harmless"

    def after(self, path: Path, change) -> str:
        before = path.read_bytes()
        try:
            change(path, before)
            return self.outcome()
        finally:
            if path.is_dir():
                shutil.rmtree(path)
            path.write_bytes(before)


def flip(rng: random.Random):
    def change(path: Path, before: bytes) -> None:
        position = rng.randrange(len(before))
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(bytes([before[position] ^ (1 << rng.randrange(8))]))

    return change


def zero_block(rng: random.Random):
    def change(path: Path, before: bytes) -> None:
        with open(path, "r+b") as file:
            file.seek(rng.randrange(len(before) // 4096) * 4096)
            file.write(bytes(4096))

    return change


def check_flips(damaged: Damaged, array_flips: int, other_flips: int, blocks: int) -> None:
    rng = random.Random(1)
    outcomes = [damaged.after(rng.choice(damaged.data), flip(rng)) for _ in range(array_flips)]
    assert outcomes == ["detected"] * array_flips  # its bytes are random numbers: none is without effect
    outcomes = [damaged.after(rng.choice(damaged.data), zero_block(rng)) for _ in range(blocks)]
    assert outcomes == ["detected"] * blocks
    others = [path for path in damaged.others if path.stat().st_size]
    for number in range(other_flips):
        damaged.after(others[number % len(others)], flip(rng))
    assert damaged.outcome() == "harmless"


def test_flipped_bits_and_zeroed_blocks(tmp_path):
    check_flips(Damaged(tmp_path, mebibytes=4), array_flips=5, other_flips=20, blocks=5)


@pytest.mark.slow
def test_200_flipped_bits_and_64_zeroed_blocks(tmp_path):
    check_flips(Damaged(tmp_path, mebibytes=16), array_flips=100, other_flips=100, blocks=64)


def truncate(path: Path, before: bytes) -> None:
    os.truncate(path, len(before) // 2)


def cut_last_byte(path: Path, before: bytes) -> None:
    os.truncate(path, len(before) - 1)


def empty(path: Path, before: bytes) -> None:
    os.truncate(path, 0)


def delete(path: Path, before: bytes) -> None:
    path.unlink()


def append(path: Path, before: bytes) -> None:
    path.write_bytes(before + b"\0")


def replace_by_directory(path: Path, before: bytes) -> None:
    path.unlink()
    path.mkdir()


def test_every_truncated_empty_and_missing_file_is_named(tmp_path):
    damaged = Damaged(tmp_path, mebibytes=2)
    for path in damaged.data + damaged.others:
        for change in (truncate, cut_last_byte, empty, delete, append, replace_by_directory):
            before = path.read_bytes()
            if change in (truncate, cut_last_byte, empty) and not before:
                continue
            assert damaged.after(path, change) == "detected", (path, change.__name__)
    damaged.after(damaged.data[0], delete)
    with pytest.raises(DamagedCheckpointError, match=damaged.data[0].name):
        damaged.data[0].unlink()
        damaged.checkpoints.restore(STEP, damaged.abstract)
