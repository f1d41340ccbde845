"""Predicted step times of random layouts against measured ones, on simulated CPU devices.

    python benchmarks/simulated.py [--seed N] [--layouts 12] [--steps 8]

Calibrates 8 simulated devices with `spmd-lm bench --calibrate`, draws layouts of a small GPT on different meshes, times
each with `spmd-lm bench` in its own process, and prints a row for each and the rank correlation of predicted and
measured times, where differences below 5% are ties.  None of the layouts is used to calibrate.  Exits 1 if the
correlation is below 0.8, or the slowest layout takes less than twice the fastest.  glibc keeps memory between steps, as
in cpu_step.py: otherwise page faults are a third of a step.  Run it on an idle machine."""

import argparse
import itertools
import json
import random
import secrets
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from cpu_step import environment

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.hardware import read_hardware
from spmd_lm.planning.search import CostedLayout, Target, candidates, cost, make_plan, make_target

ROOT = Path(__file__).parents[1]
DEVICES, TIE = 8, 0.05
LEAST_CORRELATION, LEAST_SPREAD = 0.8, 2.0
MODEL = [
    *("model.layers=8", "model.width=512", "model.heads=8", "model.context=64", "model.vocab=2048"),
    *("model.dropout=0", "model.attention_dropout=0", "data.source=synthetic", "optim.lr=1e-3"),
    *("precision.compute=float32", "train.steps=100", "train.batch=16", f"run.simulate_devices={DEVICES}"),
]


def spmd_lm(*arguments: str) -> dict[str, Any]:
    """The JSON output of a command, in another process."""
    line = [sys.executable, "-m", "spmd_lm", *arguments, "--json", "-"]
    done = subprocess.run(line, env=environment("tuned") | {"NPROC": "64"}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}: {done.stderr}")
    return json.loads(done.stdout)


def draw(seed: int, count: int, target: Target) -> list[CostedLayout]:
    """Layouts of different meshes, each with random other choices, and their costs."""
    config, generator = load(None, MODEL), random.Random(seed)
    legal = list(itertools.chain.from_iterable(candidates(config, target, Counter())))
    generator.shuffle(legal)
    chosen, meshes = list[RunConfig](), set[tuple[int, ...]]()
    for each in legal:
        p = each.parallel
        if (mesh := (p.pipe, p.replica, p.data, p.model)) not in meshes and len(chosen) < count:
            meshes.add(mesh)
            chosen.append(each)
    return [cost(each, target, make_plan(each, target)) for each in chosen]


def ranks(values: list[float]) -> np.ndarray:
    """Mean ranks; values within TIE of the smallest of their group share one."""
    order, groups = sorted(range(len(values)), key=values.__getitem__), list[list[int]]()
    for i in order:
        if groups and values[i] <= values[groups[-1][0]] * (1 + TIE):
            groups[-1].append(i)
        else:
            groups.append([i])
    found, before = np.zeros(len(values)), 0
    for group in groups:
        found[group] = before + (len(group) - 1) / 2
        before += len(group)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--layouts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory() as directory:
        run, table = Path(directory, "run.yaml"), Path(directory, "cpu.yaml")
        run.write_text("")
        spmd_lm("bench", str(run), *MODEL, "--calibrate", str(table))
        print(f"seed {seed}\n\n{table.read_text()}\n| layout | predicted ms | measured ms |\n| --- | --- | --- |")
        target = make_target(parse_topology(f"cpu:{DEVICES}"), read_hardware(table))
        predicted, measured = [], []
        for layout in draw(seed, arguments.layouts, target):
            keys = {key: value for key, value in layout.overrides.items() if key != "remat"}
            overrides = [f"parallel.{key}={str(value).lower()}" for key, value in keys.items()]
            overrides.append(f"remat.policy={layout.overrides['remat']}")
            timed = spmd_lm("bench", str(run), *MODEL, *overrides, "--steps", str(arguments.steps))
            predicted.append(layout.seconds)
            measured.append(timed["step_seconds"]["min"])
            name = " ".join(override.removeprefix("parallel.") for override in overrides)
            print(f"| {name} | {1e3 * predicted[-1]:.1f} | {1e3 * measured[-1]:.1f} |", flush=True)
    correlation = np.corrcoef(ranks(predicted), ranks(measured))[0, 1]
    print(f"\nrank correlation {correlation:.2f}; slowest over fastest {max(measured) / min(measured):.2f}")
    return int(correlation < LEAST_CORRELATION or max(measured) < LEAST_SPREAD * min(measured))


if __name__ == "__main__":
    sys.exit(main())
