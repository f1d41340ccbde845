"""What hides a step's communication: compiled steps with and without XLA's options and prefetch.

    python benchmarks/overlap.py                 every row, as a table: a minute or two each
    python benchmarks/overlap.py --only h100     rows whose topology and layout have this in it
    python benchmarks/overlap.py --partitioner types    those without a pipeline

Nothing runs: the figures are those of `spmd-lm audit`, which walks the compiled schedule.  GPT 22B, or where its
topology is too small for it, its first layers.  Each row is audited as well: the exit code is 1 where a step sends
something else than theory asks for."""

import argparse
import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from spmd_lm.analysis.topology import Topology, parse_topology
from spmd_lm.config.load import load
from spmd_lm.planning.audit import audit

ZERO, SEQUENCE = "ZeRO-3", "with the sequence sharded"
PIPELINE = "pipe 4 x data 16, 1f1b, 16 microbatches"
LAYOUTS = {
    ZERO: [],
    f"data 32 x model 2 {SEQUENCE}": ["parallel.model=2", "parallel.sequence=true"],
    f"data 8 x model 8 {SEQUENCE}": ["parallel.model=8", "parallel.sequence=true"],
    PIPELINE: ["parallel.pipe=4", "parallel.microbatches=16"],
}
ROWS = [
    ("v5p:4x4x4", ZERO, 48),
    ("v5p:4x4x4", f"data 32 x model 2 {SEQUENCE}", 48),
    ("v5p:4x4x4", PIPELINE, 48),
    ("v6e:8x8", ZERO, 4),
    ("v5e:8x8", ZERO, 4),
    ("h100:8x8", ZERO, 48),
    ("h100:8x8", f"data 8 x model 8 {SEQUENCE}", 48),
    ("h100:8x8", PIPELINE, 48),
    ("h200:8x8", ZERO, 48),
    ("a100:8x8", ZERO, 48),
]


class Variant(NamedTuple):
    """options: whether XLA gets those of its table, on hardware where it can do without."""

    name: str
    options: bool
    prefetch: str

    def overrides(self, platform: str) -> list[str]:
        options = "auto" if self.options or platform == "gpu" else "none"
        return [f"run.compiler_options={options}", f"parallel.prefetch={self.prefetch}"]


PLAIN, OPTIONS, PREFETCH = Variant("", False, "off"), Variant("options", True, "off"), Variant("prefetch", True, "on")


def variants(target: Topology) -> list[Variant]:
    """Only a TPU's compiler has options that change what overlaps."""
    if target.platform == "gpu":
        return [PLAIN, PREFETCH]
    return [PLAIN, OPTIONS, PREFETCH._replace(name="options, prefetch")]


GIB = 2**30


def row(result: dict[str, Any], name: str) -> tuple[bool, list[str]]:
    exposed, memory = result["exposed"], result["memory"]
    wire = sum(each["bytes"] for each in result["collectives"]) / GIB
    compute, step = exposed["compute_seconds"], exposed["step_seconds"]
    return result["ok"], [
        name,
        f"{wire:.2f} GiB",
        f"{exposed['exposed_fraction']:.1%}",
        f"{exposed['exposed_seconds']:.3f} s",
        f"{compute:.3f} s",
        f"{step:.3f} s, {step / compute:.3f}",
        f"{memory['temporaries'] / GIB:.2f} / {memory['peak'] / GIB:.2f} GiB",
        "" if result["ok"] else "NOT as theory asks",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--partitioner", default="auto", choices=("auto", "types", "manual"))
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # what was compiled for absent hardware cannot be loaded
    columns = ("", "sent", "exposed", "", "compute", "step", "temporaries / peak", "")
    print(f"| topology | layout | {' | '.join(columns)} |")
    print("|" + " --- |" * (len(columns) + 2))
    failed = 0
    for topology, layout, layers in ROWS:
        if args.only not in f"{topology} {layout}" or (args.partitioner == "types" and layout == PIPELINE):
            continue
        target, where = parse_topology(topology), layout if layers == 48 else f"{layout}, {layers} layers"
        for variant in variants(target):
            overrides = [*LAYOUTS[layout], *variant.overrides(target.platform), f"model.layers={layers}"]
            config = load("configs/gpt_22b.yaml", [*overrides, f"parallel.partitioner={args.partitioner}"])
            exact, cells = row(audit(config, target), variant.name)
            failed += not exact
            print(f"| {' | '.join([topology, where, *cells])} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
