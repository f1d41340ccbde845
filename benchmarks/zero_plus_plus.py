"""Losses under ZeRO++'s keys beside exact ZeRO-3's, for the quickstart's model on eight simulated devices.

    python benchmarks/zero_plus_plus.py [--steps 600] [--seeds 3] [--only qgZ-int4] [KEY=VALUE ...]

Prints the mean of the last 20 losses, and its difference from the exact run's of the same seed; then means over seeds.
Exits 1 if a mean difference is above LIMITS."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from children import ROOT, environment

KEYS = {
    "exact": [],
    "qwZ": ["parallel.quantize_gather=int8"],
    "qgZ-int8": ["parallel.quantize_scatter=int8"],
    "qgZ-int4": ["parallel.quantize_scatter=int4"],
    "all": ["parallel.quantize_gather=int8", "parallel.secondary=within_host", "parallel.quantize_scatter=int4"],
}
LIMITS = {"qwZ": 0.02, "qgZ-int8": 0.03, "qgZ-int4": 0.06, "all": 0.08}
"""Largest difference in nats."""


def last_losses(name: str, seed: int, steps: int, overrides: list[str]) -> float:
    """The mean of a run's last 20 losses."""
    with tempfile.TemporaryDirectory() as directory:
        run = [f"run.dir={directory}", f"train.seed={seed}", f"train.steps={steps}", f"optim.decay_steps={steps}"]
        run += ["train.log_every=1", "train.eval_every=0", "checkpoint.every=0", "parallel.zero=3"]
        command = [sys.executable, "-m", "spmd_lm", "train", "configs/quickstart.yaml", *run, *KEYS[name], *overrides]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == steps, (len(losses), steps)
    return statistics.mean(losses[-20:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=[*LIMITS], help="default: all")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    a = parser.parse_args()
    differences: dict[str, list[float]] = {name: [] for name in a.only or LIMITS}
    for seed in range(1, a.seeds + 1):
        exact = last_losses("exact", seed, a.steps, a.overrides)
        print(f"seed {seed}  exact     {exact:.4f}", flush=True)
        for name, found in differences.items():
            loss = last_losses(name, seed, a.steps, a.overrides)
            found.append(loss - exact)
            print(f"seed {seed}  {name:<9} {loss:.4f}  {loss - exact:+.4f}", flush=True)
    means = {name: statistics.mean(found) for name, found in differences.items()}
    for name, mean in means.items():
        print(f"mean    {name:<9} {mean:+.4f}  of at most {LIMITS[name]}")
    return int(any(mean > LIMITS[name] for name, mean in means.items()))


if __name__ == "__main__":
    sys.exit(main())
