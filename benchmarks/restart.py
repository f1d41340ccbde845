"""Time a start up to its first step, with compiled programs on disk and without.

    python benchmarks/restart.py [--rounds 2] [KEY=VALUE ...]

Each round starts `train` twice with a cache of its own, which the first start fills."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNROLLED = ["model.layers=12", "model.scan=false", "train.steps=1", "train.log_every=1", "checkpoint.every=0"]


def seconds_to_first_step(directory: Path, overrides: list[str]) -> float:
    """Seconds from the start of the process to the record of step 1."""
    command = [sys.executable, "-m", "spmd_lm", "train", "configs/debug.yaml", "--devices", "8", *UNROLLED]
    start, metrics = time.perf_counter(), directory / "metrics.jsonl"
    process = subprocess.Popen(
        [*command, f"run.dir={directory}", *overrides], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    if process.wait():
        sys.exit(f"train failed in {directory}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            overrides = [*arguments.overrides, f"run.compilation_cache={directory / 'cache'}"]
            cold, warm = (seconds_to_first_step(directory / run, overrides) for run in ("cold", "warm"))
        print(f"round {number + 1}: {cold:.1f} s to the first step, {warm:.1f} s with the cache: {warm / cold:.2f}")


if __name__ == "__main__":
    main()
