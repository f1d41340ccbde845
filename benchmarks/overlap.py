"""Hidden communication: compiled steps with and without XLA's options, prefetch and collective matmul.

    python benchmarks/overlap.py                 every row, as a table: a minute or two each
    python benchmarks/overlap.py --only h100     rows whose topology and layout contain this
    python benchmarks/overlap.py --partitioner types    rows without a pipeline

Nothing runs: the figures are those of `spmd-lm audit`, which walks the compiled schedule.  The models are GPT 22B, or
only its first layers on a topology too small for it, and a small one.  Exits 1 if the audit of a row finds anything
sent that theory does not ask for, or the reverse."""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import spmd_lm
from spmd_lm.analysis.topology import Topology, parse_topology
from spmd_lm.config.load import load
from spmd_lm.runtime.xla_options import options_for

SEQUENCE = "with the sequence sharded"
PIPELINE = "pipe 4 x data 16, 16 microbatches, "
WIDE, SMALL = "gpt_22b", "debug"
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    f"data 32 x model 2 {SEQUENCE}": {"model": 2, "sequence": True},
    f"data 8 x model 8 {SEQUENCE}": {"model": 8, "sequence": True},
    f"{PIPELINE}1f1b": {"pipe": 4, "microbatches": 16},
    f"{PIPELINE}breadth_first in 12 chunks": {"pipe": 4, "microbatches": 16, "schedule": "breadth_first", "chunks": 12},
    f"model 2 {SEQUENCE}, width 1024": {"model": 2, "sequence": True, "zero": 3},
}
ZERO, DATA32, DATA8, ONE_F_ONE_B, BREADTH_FIRST, WIDTH_1024 = LAYOUTS
OVERRIDES = {
    WIDE: [],
    SMALL: [
        "model.width=1024",
        "model.heads=16",
        "model.context=256",
        "precision.compute=bfloat16",
        "precision.reduce=bfloat16",
    ],
}


class Case(NamedTuple):
    """layers: first layers of GPT 22B; None for all of it, and for the small model."""

    topology: str
    layout: str
    layers: int | None = None
    batch: int = 256

    @property
    def config(self) -> str:
        return SMALL if self.layout == WIDTH_1024 else WIDE

    @property
    def where(self) -> str:
        cut = f", {self.layers} layers" if self.layers else ""
        return self.layout + cut + (f", batch {self.batch}" if self.batch != 256 else "")

    @property
    def overrides(self) -> list[str]:
        layout = LAYOUTS[self.layout] | {"replica": parse_topology(self.topology).slices}
        parallel = [f"parallel.{key}={value}" for key, value in layout.items()]
        layers = [f"model.layers={self.layers}"] if self.layers else []
        return [*OVERRIDES[self.config], f"train.batch={self.batch}", *parallel, *layers]


CASES = [
    *(Case("v5p:4x4x4", layout) for layout in (ZERO, DATA32, ONE_F_ONE_B, BREADTH_FIRST)),
    *(Case("h100:8x8", layout) for layout in (ZERO, DATA8, ONE_F_ONE_B, BREADTH_FIRST)),
    *(Case("h100:8x8", DATA8, 4, batch) for batch in (64, 128)),
    Case("v5e:8x8", ZERO, 4),
    Case("v6e:8x8", ZERO, 4),
    Case("h200:8x8", ZERO),
    Case("a100:8x8", ZERO),
    *(Case(topology, DATA8, 4) for topology in ("h200:8x8", "b200:8x8", "a100:8x8")),
    *(Case(tpu, WIDTH_1024) for tpu in ("v4:4x4x4", "v5e:8x8", "2*v5e:8x8", "v5e:16x16", "v6e:8x8", "7x:4x4x4")),
    *(Case(gpu, WIDTH_1024) for gpu in ("a100:8x8", "h200:8x8", "b200:8x8", "gb200:1x64")),
]


class Variant(NamedTuple):
    options: bool
    prefetch: bool = False
    collective_matmul: bool = False

    @property
    def name(self) -> str:
        names = {"options": self.options, "prefetch": self.prefetch, "collective matmul": self.collective_matmul}
        return ", ".join(name for name, used in names.items() if used)

    def overrides(self) -> list[str]:
        prefetch, collective_matmul = ("on" if used else "off" for used in (self.prefetch, self.collective_matmul))
        return [
            f"run.compiler_options={'auto' if self.options else 'none'}",
            f"parallel.prefetch={prefetch}",
            f"parallel.collective_matmul={collective_matmul}",
        ]


def has_options(target: Topology) -> bool:
    """True if `auto` sets more options than the compiler needs."""
    kind = target.devices()[0].device_kind
    auto, none = (options_for(setting, target.platform, kind, absent=True).values for setting in ("auto", "none"))
    return auto != none


def variants(layout: str, partitioner: str, target: Topology) -> Iterator[Variant]:
    yield Variant(options=False)
    if has_options(target):
        yield Variant(options=True)
    yield Variant(options=True, prefetch=True)
    if "model" in LAYOUTS[layout] and partitioner != "types":
        yield Variant(options=True, prefetch=True, collective_matmul=True)


GIB = 2**30


def format_seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def row(result: dict[str, Any], name: str) -> tuple[bool, list[str]]:
    exposed, memory = result["exposed"], result["memory"]
    wire = sum(each["bytes"] for each in result["collectives"]) / GIB
    compute, step = exposed["compute_seconds"], exposed["step_seconds"]
    return result["ok"], [
        name,
        f"{wire:.2f} GiB",
        f"{exposed['exposed_fraction']:.1%}",
        format_seconds(exposed["exposed_seconds"]),
        format_seconds(compute),
        f"{format_seconds(step)}, {step / compute:.3f}",
        f"{memory['temporaries'] / GIB:.2f} GiB",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--partitioner", default="auto", choices=("auto", "types", "manual"))
    args = parser.parse_args()
    columns = ("with", "sent", "exposed", "seconds", "compute", "step", "temporaries")
    print(f"| topology | layout | {' | '.join(columns)} |")
    print("|" + " --- |" * (len(columns) + 2))
    failed = 0
    for case in CASES:
        in_pipeline = "pipe" in LAYOUTS[case.layout]
        if args.only not in f"{case.topology} {case.where}" or (args.partitioner == "types" and in_pipeline):
            continue
        target = parse_topology(case.topology)
        for variant in variants(case.layout, args.partitioner, target):
            overrides = [*case.overrides, *variant.overrides()]
            config = load(f"configs/{case.config}.yaml", [*overrides, f"parallel.partitioner={args.partitioner}"])
            exact, cells = row(spmd_lm.audit(config, case.topology), variant.name)
            if not exact:
                failed += 1
                print(f"{case.topology}, {case.where}, {variant.name}: not as theory asks", file=sys.stderr)
            print(f"| {' | '.join([case.topology, case.where, *cells])} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
