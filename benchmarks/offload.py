"""Time a step whose optimizer state is on the host, or on its disk, beside the plain step.

    python benchmarks/offload.py configs/debug.yaml [key=value ...] [--rounds 10] [--directory DIR] [--json FILE]

Warm programs take turns, one step at a time: the plain step; optim.offload=host and disk, each with its update on the
devices and on the host; remat.policy=full, and offload.  Beside programs with state on disk a bare loop takes turns,
which reads each of their files, writes it anew and calls fsync; no file is in the page cache when either begins.

`disk_ratio` is an update's rate, in bytes read and written per second until all files are on disk, over the bare
loop's.  Exits 1 if it is less than LEAST_DISK_RATIO, or if losses differ that should be equal, bit for bit."""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from turns import measure

from spmd_lm.config.load import load
from spmd_lm.parallel import groups
from spmd_lm.step.offload import offload_directory
from spmd_lm.step.program import Program
from spmd_lm.training.bench import peak_memory, random_batch

VARIANTS = {
    "plain": (),
    "offload=host": ("optim.offload=host",),
    "offload=host, update=host": ("optim.offload=host", "optim.offload_update=host"),
    "offload=disk": ("optim.offload=disk",),
    "offload=disk, update=host": ("optim.offload=disk", "optim.offload_update=host"),
    "remat=full": ("remat.policy=full",),
    "remat=offload": ("remat.policy=offload",),
}
SAME = {name: "plain" for name in VARIANTS if name.startswith("offload")} | {"remat=offload": "remat=full"}
LEAST_DISK_RATIO = 0.5


class Variant:
    """A program, its state, and the losses and seconds of its steps."""

    def __init__(self, config: str, overrides: list[str]):
        self.program = Program(load(Path(config), overrides))
        self.compile_seconds = self.program.compile()
        self.state, self.batch = self.program.init(), random_batch(self.program)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.directory: Path | None = None
        if self.program.config.optim.offload == "disk":
            self.directory = offload_directory(self.program.config) / "process-0"
            assert self.program.offload
            update = self.program.offload.update
            vars(self.program.offload)["update"] = lambda *arguments: self.time_update(update, *arguments)

    def time_update(self, update: Callable, *arguments: Any) -> Any:
        assert self.program.offload and self.directory
        jax.block_until_ready(arguments)
        evict(self.directory)
        start = time.perf_counter()
        state = jax.block_until_ready(update(*arguments))
        self.program.offload.store.flush()
        self.update_seconds.append(time.perf_counter() - start)
        return state

    def step(self) -> None:
        start = time.perf_counter()
        self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(metrics["loss"]))


class BareLoop:
    """The reads and writes of an update's files, one after the other."""

    def __init__(self, directory: Path):
        self.directory, self.copy = directory, directory.with_name("bare")
        self.seconds: list[float] = []

    def step(self) -> None:
        files = evict(self.directory)
        self.copy.mkdir()
        start = time.perf_counter()
        for path in files:
            with open(self.copy / path.name, "xb") as file:
                file.write(path.read_bytes())
                file.flush()
                os.fsync(file.fileno())
        self.seconds.append(time.perf_counter() - start)
        shutil.rmtree(self.copy)


def evict(directory: Path) -> list[Path]:
    """A program's files, none of which is in the page cache any more."""
    files = [*directory.rglob("*.safetensors")]
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=10, help="steps that each program makes after the first two")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--directory", type=Path, help="where to make the directory of files; default: the system's")
    parser.add_argument("--group", type=int, metavar="N", help="most elements of a group; default: that of any run")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    groups.GROUP_ELEMENTS = args.group or groups.GROUP_ELEMENTS
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        rows, wrong = compare(args, Path(scratch))
    for name in wrong:
        print(f"{name}: its losses differ from those of {SAME[name]}")
    slow = [name for name, row in rows.items() if row.get("disk_ratio", 1) < LEAST_DISK_RATIO]
    for name in slow:
        print(f"{name}: disk_ratio is less than {LEAST_DISK_RATIO}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(bool(wrong or slow))


def compare(args: argparse.Namespace, scratch: Path) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(figures by variant, variants whose losses differ)."""
    variants, bare = {}, {}
    for number, name in enumerate(args.only or VARIANTS):
        directory = [f"optim.offload_dir={scratch / str(number)}"] * ("disk" in name)
        variants[name] = Variant(args.config, [*args.overrides, *VARIANTS[name], *directory])
        for _ in range(2):
            variants[name].step()
        if on_disk := variants[name].directory:
            bare[name] = BareLoop(on_disk)
        print(f"{name}: compiled in {variants[name].compile_seconds:.0f} s", flush=True)
    measure([*variants.values(), *bare.values()], args.rounds)
    rows = {}
    for name, variant in variants.items():
        seconds = variant.seconds[2:]
        base = variants.get("plain", variant).seconds[2:]
        rows[name] = {"ms": statistics.median(seconds) * 1e3, "ratio": median_ratio(seconds, base)}
        rows[name]["loss"] = variant.losses[-1]
        with contextlib.suppress(AttributeError, TypeError):
            rows[name]["memory_gib"] = peak_memory(variant.program)[0] / 2**30
        if name in bare:
            updates, size = (
                variant.update_seconds[2:],
                2 * sum(path.stat().st_size for path in evict(bare[name].directory)),
            )
            rows[name]["disk_mb_per_s"] = size / statistics.median(updates) / 1e6
            rows[name]["bare_mb_per_s"] = size / statistics.median(bare[name].seconds) / 1e6
            rows[name]["disk_ratio"] = median_ratio(bare[name].seconds, updates)
            variant.program.close()
        print(f"{name:28s}" + "".join(f"{key} {value:10.4f}  " for key, value in rows[name].items()))
    losses = {name: variant.losses for name, variant in variants.items()}
    wrong = [name for name, other in SAME.items() if {name, other} <= losses.keys() and losses[name] != losses[other]]
    return rows, wrong


def median_ratio(some: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
