"""Losses of a run by what its blocks' matrices multiply in (precision.matmul), for some seeds:

    python benchmarks/eight_bits.py configs/debug.yaml train.steps=150 --seeds 0 1 2 --markdown

Prints the mean of the last losses of each run, and the first three.  Devices without such matmuls emulate them."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import spmd_lm

KINDS = "none", "fp8", "int8"
LAST = 20  # steps whose losses are averaged


def losses(config: Path, kind: str, seed: int, overrides: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as scratch:
        own = [f"train.seed={seed}", f"run.dir={scratch}/run", "train.log_every=1", "checkpoint.every=0"]
        own += [f"precision.matmul={kind}", "precision.emulate=true"] if kind != "none" else []
        run = spmd_lm.train(spmd_lm.load_config(config, *own, *overrides))
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [record["loss"] for record in records if "loss" in record]


def row(kind: str, runs: list[list[float]]) -> dict[str, Any]:
    last = [statistics.fmean(run[-LAST:]) for run in runs]
    return {"matmul": kind, "mean": statistics.fmean(last), "last": last, "first": [run[:3] for run in runs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--markdown", action="store_true", help="print a table in place of JSON")
    args = parser.parse_args()
    rows = [row(kind, [losses(args.config, kind, seed, args.overrides) for seed in args.seeds]) for kind in args.kinds]
    if not args.markdown:
        print(json.dumps(rows))
        return
    print("| `precision.matmul` | mean of the last losses | by seed |\n| --- | --- | --- |")
    for each in rows:
        print(f"| `{each['matmul']}` | {each['mean']:.4f} | {', '.join(f'{loss:.4f}' for loss in each['last'])} |")


if __name__ == "__main__":
    main()
