"""The quickstart's model with experts, beside its dense one at equal active parameters, on eight simulated devices.

    python benchmarks/experts.py [--steps 600] [--seeds 3] [KEY=VALUE ...]

Each token uses two of eight experts, which are half as wide as the dense MLP.  Prints for each seed the mean of the
last 20 losses, without auxiliary ones; the largest load of an expert over these steps, in multiples of an even share;
the share of dropped choices; the least distance of two experts' outputs, as a share of their norm; and the median
seconds of a step.  Exits 1 if an expert's load is above MOST_LOAD, or two experts are alike."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from children import ROOT, environment

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

LAYOUTS = {
    "dense": ["parallel.data=4", "parallel.model=2"],
    "experts": ["parallel.data=2", "parallel.expert=2", "parallel.model=2"],
}
MOE = "model.mlp={kind: moe, experts: 8, per_token: 2, width: 256}"
MOST_LOAD, LEAST_DISTANCE = 2.0, 0.1


class Figures(NamedTuple):
    """See the module's docstring; load, dropped and distance are 0 for a dense run."""

    loss: float
    seconds: float
    load: float = 0.0
    dropped: float = 0.0
    distance: float = 0.0


def run(name: str, seed: int, steps: int, overrides: list[str]) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        keys = [f"run.dir={directory}", f"train.seed={seed}", f"train.steps={steps}", f"optim.decay_steps={steps}"]
        keys += ["train.log_every=1", "train.eval_every=0", *LAYOUTS[name], *[MOE] * (name == "experts"), *overrides]
        command = [sys.executable, "-m", "spmd_lm", "train", "configs/quickstart.yaml", *keys]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
        seconds = statistics.median(record["seconds"] for record in records)
        loss = statistics.mean(record.get("causal_lm_loss", record["loss"]) for record in records[-20:])
        if name == "dense":
            return Figures(loss, seconds)
        load = np.mean([record["expert_load"] for record in records[-20:]], axis=0).max()
        dropped = statistics.mean(record["dropped_share"] for record in records[-20:])
        return Figures(loss, seconds, float(load), dropped, least_distance(Path(directory)))


def least_distance(directory: Path) -> float:
    """Of two experts' outputs for the same random tokens, in any layer, as a share of their norm."""
    import jax

    from spmd_lm.checkpoints.restored import open_run
    from spmd_lm.config.load import load_run

    _, params, _ = open_run(load_run(directory))
    experts = jax.device_get(params["blocks"]["mlp"]["experts"])
    tokens = np.random.default_rng(0).standard_normal((256, experts["up"].shape[2]))
    least = np.inf
    for layer in range(len(experts["up"])):
        up, up_bias, down, down_bias = (experts[key][layer] for key in ("up", "up_bias", "down", "down_bias"))
        hidden = np.asarray(jax.nn.gelu(np.einsum("tw,ewf->etf", tokens, up) + up_bias[:, None]))
        outputs = np.einsum("etf,ewf->etw", hidden, down) + down_bias[:, None]
        for i, one in enumerate(outputs):
            for other in outputs[:i]:
                least = min(least, float(np.linalg.norm(one - other) / np.linalg.norm(one)))
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    a = parser.parse_args()
    found: dict[str, list[Figures]] = {name: [] for name in LAYOUTS}
    for seed in range(1, a.seeds + 1):
        for name, figures in found.items():
            figures.append(run(name, seed, a.steps, a.overrides))
            loss, seconds, load, dropped, distance = figures[-1]
            line = f"seed {seed}  {name:<8} loss {loss:.4f}  {1000 * seconds:.0f} ms a step"
            if name == "experts":
                line += f"  largest load {load:.2f}  dropped {dropped:.1%}  least distance {distance:.2f}"
            print(line, flush=True)
    for name, figures in found.items():
        print(f"mean    {name:<8} loss {statistics.mean(each.loss for each in figures):.4f}")
    experts = found["experts"]
    return int(any(each.load > MOST_LOAD or each.distance < LEAST_DISTANCE for each in experts))


if __name__ == "__main__":
    sys.exit(main())
