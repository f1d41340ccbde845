"""Memory and bytes sent, predicted without compiling, compared with the compiler's, for random runs.

    python benchmarks/predictions.py [--seed N] [--runs 30]

Draws a model of 1B to 30B parameters, a topology of at least 8 devices, a layout with any options, and the dtype in
which gradients are summed, if they are predicted to fit; compiles each in its own process; and prints a row: the
predicted memory, the compiler's peak (on simulated CPU devices arguments and temporaries, because a CPU's peak has no
temporaries), and whether bytes match theory.  Exits 1 if fewer than 24 of 30 are within 10%, if one is off by more than
25% or cannot be compiled, or if any bytes differ.
Without --seed a seed is drawn and printed; it may be hexadecimal, like a commit's hash: --seed 0x$(git rev-parse
--short HEAD)."""

import argparse
import functools
import itertools
import json
import math
import random
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import children
import jax

from spmd_lm.analysis.topology import Topology, parse_topology
from spmd_lm.config.load import dump, load
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.hardware import GIB, find_hardware
from spmd_lm.errors import ConfigError
from spmd_lm.resolve import abstract_plan

TOPOLOGIES = (
    *("v5p:2x2x2", "v5p:4x4x4", "v5e:4x4", "v6e:4x4", "v4:2x2x4", "7x:2x2x2"),
    *("h100:1x8", "h100:4x8", "a100:2x8", "b200:2x8", "cpu:8"),
)
LEAST, MOST = 1e9, 30e9  # parameters
ROOM = 0.9  # usable fraction of a device's memory
HOST_MEMORY = 64 * GIB  # limit on a simulated device's predicted memory
CLOSE, FAR = 0.1, 0.25
CLOSE_SHARE = 24 / 30


def draw(generator: random.Random) -> Iterator[tuple[RunConfig, Topology]]:
    """Yields configurations that are legal and fit, endlessly."""
    while True:
        topology = parse_topology(generator.choice(TOPOLOGIES))
        try:
            config = load(None, draw_overrides(generator, topology))
            plan = abstract_plan(config, topology.size, topology.platform, topology.device_kind)
        except ConfigError:
            continue
        if config.parallel.model > topology.domain:
            continue
        parameters = sum(leaf.size for leaf in jax.tree.leaves(plan.shapes))
        planned = sum(memory.table(config, plan).values())
        hardware = find_hardware(topology.device_kind)
        capacity = ROOM * hardware.memory.size if hardware and hardware.memory else HOST_MEMORY
        if LEAST <= parameters <= MOST and planned <= capacity:
            yield config, topology


def draw_overrides(generator: random.Random, topology: Topology) -> list[str]:
    choose, devices = generator.choice, topology.size
    pipe = choose([1, 1, 1, 2, 4])
    model = choose([1, 2, 4, 8])
    replica = choose([1, 1, 1, 2])
    heads = choose([16, 24, 32, 40])
    chunks = choose([1, 2]) if pipe > 1 else 1
    schedule = choose(["interleaved", "breadth_first"] if chunks > 1 else ["1f1b", "gpipe", "breadth_first"])
    head_width, llama = choose([64, 128]), generator.random() < 0.3
    swiglu = ["model.activation=swiglu", "model.norm_type=rms", "model.positions=rotary", "model.use_bias=false"]
    shards = max(1, devices // (pipe * model))
    microbatches = choose([1, 2, 4, 8])
    return [
        f"model.layers={choose([16, 24, 32, 48])}",
        f"model.width={heads * head_width}",
        f"model.heads={heads}",
        f"model.context={choose([1024, 2048, 4096])}",
        f"model.vocab={choose([32_000, 50_257, 51_200])}",
        "model.dropout=0",
        "model.attention_dropout=0",
        *(swiglu if llama else []),
        "data.source=synthetic",
        "optim.lr=1e-4",
        f"parallel.pipe={pipe}",
        f"parallel.model={model}",
        f"parallel.replica={replica}",
        f"parallel.sequence={str(generator.random() < 0.5).lower()}",
        f"parallel.zero={choose([0, 1, 2, 3])}",
        f"parallel.schedule={schedule}",
        f"parallel.chunks={chunks}",
        f"parallel.microbatches={microbatches}",
        f"parallel.reduce_once={str(generator.random() < 0.2).lower()}",
        f"remat.policy={choose(['none', 'selective', 'residual', 'full', 'block'])}",
        f"precision.reduce={choose(['float32', 'float32', 'bfloat16'])}",
        "train.steps=10",
        f"train.batch={microbatches * shards * choose([1, 2, 4])}",
        f"run.simulate_devices={devices if topology.platform == 'cpu' else 0}",
    ]


def compiled(config: RunConfig, topology: Topology) -> dict[str, Any] | str:
    """The audit's report, or the error if it cannot be compiled."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "run.yaml")
        file.write_text(dump(config))
        command = [sys.executable, "-m", "spmd_lm", "audit", str(file), "--topology", str(topology), "--json", "-"]
        done = subprocess.run(command, env=children.environment(), capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.stdout else done.stderr.strip()[-300:]


def describe(config: RunConfig, topology: Topology) -> str:
    m, p = config.model, config.parallel
    layout = f"pipe {p.pipe} replica {p.replica} model {p.model} zero {p.zero} m {p.microbatches}"
    options = [p.schedule if p.pipe > 1 else "", f"v{p.chunks}" * (p.pipe > 1), "seq" * p.sequence]
    options += ["once" * p.reduce_once, config.remat.policy, m.activation, f"sums {config.precision.reduce}"]
    return f"{topology} | {m.layers} x {m.width}, s {m.context} | {layout} {' '.join(filter(None, options))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=functools.partial(int, base=0), default=None)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}\n\n| topology | model | layout | predicted GiB | compiled | error | bytes |\n|{' --- |' * 7}")
    close = near = exact = done = 0
    for config, topology in itertools.islice(draw(random.Random(seed)), arguments.runs):
        found = compiled(config, topology)
        if isinstance(found, str):
            print(f"| {describe(config, topology)} | | failed: {found} | | |", flush=True)
            done += 1
            continue
        m = found["memory"]
        planned = sum(m["planned"].values())
        measured = m["total"] if topology.platform == "cpu" else max(m["peak"], m["arguments"])
        error = planned / measured - 1
        done += 1
        close += abs(error) <= CLOSE
        near += abs(error) <= FAR
        exact += found["ok"]
        sent = "exact" if found["ok"] else f"missing {found['missing_bytes']:.3g}, excess {found['excess_bytes']:.3g}"
        cells = describe(config, topology), f"{planned / GIB:.2f}", f"{measured / GIB:.2f}", f"{error:+.1%}", sent
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{close} of {done} within {CLOSE:.0%}, {near} within {FAR:.0%}; bytes as theory has them on {exact}")
    return int(close < math.floor(CLOSE_SHARE * done) or min(near, exact) < done)


if __name__ == "__main__":
    sys.exit(main())
