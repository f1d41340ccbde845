"""Time verified checkpoints against plain orbax: the longest gap between steps, time per save, and restoring.

    python benchmarks/checkpoints.py [--mebibytes 1024] [--saves 20] [--directory DIR]

Both save the same state, in turn, from the same loop of sleeping steps; restoring is timed with the files cached."""

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "64")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.config.schema import Checkpoint

STEP_SECONDS = 0.05


def make_state(mebibytes: int) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    rng, rows = np.random.default_rng(0), mebibytes * 2**20 // 4 // 1024 // 16
    return {f"layer{i}": jax.device_put(rng.normal(size=(rows, 1024)).astype("float32"), sharding) for i in range(16)}


def run(saves: int, save: Callable[[int], None], is_complete: Callable[[int], bool]) -> tuple[float, float]:
    """Longest gap between two steps, and seconds until the last save is complete.  Steps continue meanwhile; the
    next save starts when the one before is complete."""
    start = last = time.perf_counter()
    longest_gap = 0.0
    for number in range(1, saves + 1):
        save(number)
        while True:
            complete = is_complete(number)
            now = time.perf_counter()
            longest_gap, last = max(longest_gap, now - last), now
            if complete:
                break
            time.sleep(STEP_SECONDS)
    return longest_gap, time.perf_counter() - start


def verified(directory: Path, state: dict[str, jax.Array], saves: int) -> tuple[float, float]:
    saver, meta = Checkpointer(directory, Checkpoint(keep=2)), make_meta({}, 0, "")
    return run(saves, lambda step: saver.save(step, state, meta), lambda step: saver.wait(0) == step)


def plain(directory: Path, state: dict[str, jax.Array], saves: int) -> tuple[float, float]:
    policy = ocp.training.preservation_policies.LatestN(2)
    saver, complete = ocp.training.Checkpointer(directory, preservation_policy=policy), threading.Event()

    def save(step: int) -> None:
        complete.clear()
        saver.save_async(step, state, force=True).on_complete(lambda _: complete.set())

    times = run(saves, save, lambda step: complete.is_set())
    saver.close()
    return times


def restore_seconds(directory: Path, state: dict[str, jax.Array], is_plain: bool) -> float:
    """Seconds to restore the newest checkpoint: by orbax alone if `is_plain`, else verified."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    reader = Checkpointer(directory)
    step = reader.steps()[-1]
    start = time.perf_counter()
    if is_plain:
        restored = ocp.load_checkpointables(reader.path(step), {"state": abstract})["state"]
    else:
        restored = reader.restore(step, abstract)
    jax.block_until_ready(restored)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    state = make_state(arguments.mebibytes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory, per_round = Path(name), max(1, arguments.saves // arguments.rounds)
        for round in range(arguments.rounds):
            for kind in (plain, verified):
                gap, seconds = kind(directory / f"{kind.__name__}{round}", state, per_round)
                print(
                    f"{kind.__name__:<9} longest gap {gap:6.2f} s   {seconds / per_round:6.2f} s per save", flush=True
                )
                if kind is plain:
                    shutil.rmtree(directory / f"plain{round}")
        last = directory / f"verified{arguments.rounds - 1}"
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-2, 10):  # two to warm up; both kinds go first in turn
            for is_plain in (True, False) if number % 2 else (False, True):
                seconds = restore_seconds(last, state, is_plain)
                times[is_plain] += [seconds] * (number >= 0)
        ratios = [checked / by_orbax for by_orbax, checked in zip(times[True], times[False], strict=True)]
        by_orbax, checked = statistics.median(times[True]), statistics.median(times[False])
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"restore   {by_orbax:.2f} s by orbax alone, {checked:.2f} s verified; ratio {ratio}")


if __name__ == "__main__":
    main()
