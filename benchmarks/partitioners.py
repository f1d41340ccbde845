"""Collectives that XLA inserts into a step of sharding types, compared with theory.

    python benchmarks/partitioners.py                  every case, as a table
    python benchmarks/partitioners.py --only h100      cases whose name contains this
    python benchmarks/partitioners.py --partitioner manual
    python benchmarks/partitioners.py --steps          times a step against the manual one, on 8 simulated devices
    python benchmarks/partitioners.py --choose v5p:2x2x2
                                                       writes rows of spmd_lm/config/partitioners.yaml, which
                                                       parallel.partitioner=auto goes by; once per jax version

The cases cover every pair of values of different FACTORS on every topology.  A case is exact if the activations sent
over `model` agree with theory in number, and all bytes to within 0.1%.  Exits 1 if a case is not exact."""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")  # without it, collectives of simulated devices deadlock on two cores
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import yaml

import spmd_lm
from spmd_lm.analysis import topology
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.wire import wire_bytes

TOPOLOGIES = ("v5p:4x4x4", "h100:2x8", "cpu:8")
TENSOR_PARALLEL = 4
SIZES = {"layers": 2, "width": 512, "heads": 8, "context": 128, "vocab": 509, "dropout": 0.1, "attention_dropout": 0.0}
BATCH = 64
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "bert": {"kind": "bert", "norm": "post", "token_types": 2},
    "bert, pre": {"kind": "bert", "norm": "pre", "token_types": 2},
    "llama": {"norm_type": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 4, "use_bias": False},
}
FACTORS = {
    "model": tuple(MODELS),
    "remat": ("none", "selective", "residual", "full"),
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "replica": (1, 2),
    "microbatches": (1, 2),
}
MOST = 1e-3
"""Largest sum of missing and excess bytes of an exact case, relative to theory's."""

Case = dict[str, Any]


def all_pairs() -> list[Case]:
    """Cases that cover every pair of values of different factors: each next one adds the most new pairs."""
    names = tuple(FACTORS)
    rows = list(itertools.product(*FACTORS.values()))

    def pairs(row: tuple) -> set:
        return set(itertools.combinations(zip(names, row, strict=True), 2))

    missing, chosen = set().union(*map(pairs, rows)), []
    while missing:
        row = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(row)
        chosen.append(dict(zip(names, row, strict=True)))
    return chosen


def config_of(case: Case, partitioner: str) -> RunConfig:
    model = MODELS[case["model"]]
    parallel = {name: case[name] for name in ("zero", "sequence", "replica", "microbatches")}
    return RunConfig.model_validate(
        {
            "model": SIZES | model,
            "objective": {"kind": "masked_lm" if model.get("kind") == "bert" else "causal_lm"},
            "data": {"source": "synthetic"},
            "parallel": parallel | {"model": TENSOR_PARALLEL, "partitioner": partitioner},
            "precision": {"params": "float32", "compute": "bfloat16", "reduce": "bfloat16"},
            "remat": {"policy": case["remat"]},
            "optim": {"lr": 1e-3},
            "train": {"steps": 10, "batch": BATCH},
        }
    )


def over_model(rows: list[dict], one: float) -> dict[str, float]:
    """Activations that cross `model`, by kind: bytes sent over it, divided by one activation's."""
    counts: dict[str, float] = {}
    for row in rows:
        if row["axes"] == ["model"]:
            counts[row["kind"]] = counts.get(row["kind"], 0) + row["bytes"] / wire_bytes(
                row["kind"], one, TENSOR_PARALLEL
            )
    return counts


def judged(name: str, case: Case, partitioner: str) -> tuple[bool, list[str]]:
    """True if the case is exact, and its row of the table."""
    target = topology.parse_topology(name)
    result = spmd_lm.audit(config_of(case, partitioner), name)
    shards = target.size // TENSOR_PARALLEL * case["microbatches"]
    one = BATCH // shards * SIZES["context"] * SIZES["width"] * 2
    found, theory = (over_model(result[key], one) for key in ("collectives", "theory"))
    if target.platform == "cpu":  # it sends bfloat16 as float32
        theory = {kind: 2 * count for kind, count in theory.items()}
    total, off = sum(t["bytes"] for t in result["theory"]), result["missing_bytes"] + result["excess_bytes"]
    same = found.keys() == theory.keys() and all(abs(found[k] - n) < 0.1 for k, n in theory.items())
    exact = same and off <= MOST * total and not result["compiled_to_zeros"]
    counts = ", ".join(f"{count:.4g} {kind}" for kind, count in sorted(found.items()))
    expected = ", ".join(f"{count:.4g}" for _, count in sorted(theory.items()))
    seconds = f"{result['compile_seconds']:.0f} s"
    return exact, [f"{counts} ({expected})", f"{off / total:.1e}", "exact" if exact else "NOT exact", seconds]


ROUNDS, STEPS = 12, 4
STEP_SECTIONS = {
    "model": {"width": 256, "context": 64},
    "parallel": {"data": 4, "model": 2},
    "precision": {"compute": "float32", "reduce": "float32"},
    "train": {"batch": 32},
}
"""A step for timing: a machine of two cores computes it in half a second at most."""


def time_steps() -> None:
    """Prints a step's least CPU time over interleaved rounds: with types, with manual, and with manual once more."""
    from spmd_lm.api import read_batch
    from spmd_lm.step.program import Program

    case = {"model": "gpt", "remat": "none", "zero": 0, "sequence": False, "replica": 1, "microbatches": 1}
    programs = {}
    for name, partitioner in {"types": "types", "manual": "manual", "manual again": "manual"}.items():
        config = config_of(case, partitioner)
        sections = {key: getattr(config, key).model_copy(update=values) for key, values in STEP_SECTIONS.items()}
        config = config.model_copy(update=sections)
        program = Program(config)
        batch = jax.tree.map(lambda x, to: jax.device_put(x[None], to), read_batch(config), program.batch_shardings)
        state, _ = program.step(program.init(), batch)
        programs[name] = [program, batch, state]
    least = dict.fromkeys(programs, float("inf"))
    for turn in range(ROUNDS):
        first = turn % len(programs)
        for name in [*programs][first:] + [*programs][:first]:
            program, batch, state = programs[name]
            start = time.process_time()
            for _ in range(STEPS):
                state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
            least[name] = min(least[name], (time.process_time() - start) / STEPS)
            programs[name][2] = state
    for name, seconds in least.items():
        print(f"{name:14} {seconds:.3f} s of CPU time a step, {seconds / least['manual']:.3f} of manual's")


CHOSEN_BY = {
    "model": {"layers": 4, "width": 2048, "heads": 16, "context": 1024, "vocab": 32768, "dropout": 0.0},
    "precision": {"reduce": "float32"},
    "train": {"batch": 32},
}
"""A step to compile: arrays large enough to outweigh the rest, small enough to compile in a minute."""
SHARDED = {"neither": ((1,), False), "model": ((2, 8), False), "sequence too": ((2, 8), True)}
"""Degrees of `model`, and whether the sequence is sharded over it.  Over a whole torus a compiler omits some of the
collectives that it inserts along one line of devices."""
TABLE = Path(spmd_lm.__file__).parent / "config" / "partitioners.yaml"
HEADER = """# Steps of sharding types beside written-out ones, as compiled for hardware that was not there: what
# parallel.partitioner=auto goes by.  Written by `python benchmarks/partitioners.py --choose TOPOLOGY`.
# exposed, memory: of the step of types, as a share of the other's, by the version of jax that compiled both
"""


def choose(name: str) -> None:
    """Compiles both steps for each row of this topology, and writes the figures of this jax into the table."""
    rows: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text()) or []  # the first time, the file is only a comment
    for zero, (degrees, sequence) in itertools.product(FACTORS["zero"], SHARDED.values()):
        case: Case = {"model": "gpt", "remat": "full", "zero": zero, "sequence": sequence, "replica": 1}
        shares = [_shares_of_manual(case, degree, name) for degree in degrees]
        exposed, memory = map(max, zip(*shares, strict=True))
        platform = topology.parse_topology(name).platform
        row = {"platform": platform, "zero": zero, "model": max(degrees) > 1, "sequence": sequence, "topology": name}
        known = next((each for each in rows if row.items() <= each.items()), None)
        if known is None:
            known = row | {"exposed": {}, "memory": {}}
            rows.append(known)
        known["exposed"][jax.__version__], known["memory"][jax.__version__] = round(exposed, 4), round(memory, 4)
        TABLE.write_text(
            HEADER + "".join(f"- {yaml.safe_dump(each, default_flow_style=True, width=1000)}" for each in rows)
        )
        print(f"{row}: exposed {exposed:.4f}, memory {memory:.4f}", flush=True)


def _shares_of_manual(case: Case, degree: int, name: str) -> tuple[float, float]:
    """Exposed time and memory of a step of types relative to the manual one, with this many devices along `model`."""
    found = {}
    for partitioner in ("manual", "types"):
        config = config_of(case | {"microbatches": 1}, partitioner)
        sections = {key: getattr(config, key).model_copy(update=values) for key, values in CHOSEN_BY.items()}
        # Only the manual partitioner has a collective matmul.
        parallel = config.parallel.model_copy(update={"model": degree, "collective_matmul": "off"})
        result = spmd_lm.audit(config.model_copy(update=sections | {"parallel": parallel}), name)
        found[partitioner] = result["exposed"]["exposed_seconds"], result["memory"]["peak"]
    exposed, memory = (types / manual for types, manual in zip(found["types"], found["manual"], strict=True))
    return exposed, memory


def cases(only: str) -> Iterator[tuple[str, str, Case]]:
    for topology_name, case in itertools.product(TOPOLOGIES, all_pairs()):
        name = f"{topology_name} " + " ".join(f"{key}={value}" for key, value in case.items())
        if only in name:
            yield topology_name, name, case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--partitioner", default="types", choices=("types", "manual"))
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--choose", metavar="TOPOLOGY")
    args = parser.parse_args()
    if args.choose:
        choose(args.choose)
        return 0
    if args.steps:
        time_steps()
        return 0
    print(f"| topology | {' | '.join(FACTORS)} | over model (theory) | bytes off | | compiled in |")
    print("|" + " --- |" * (len(FACTORS) + 5))
    failed = 0
    for topology_name, _, case in cases(args.only):
        exact, cells = judged(topology_name, case, args.partitioner)
        failed += not exact
        print(f"| {' | '.join([topology_name, *map(str, case.values()), *cells])} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
