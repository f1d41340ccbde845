"""Time a step whose optimizer state is on the host, beside the plain step.

    python benchmarks/offload.py configs/debug.yaml [key=value ...] [--rounds 10] [--json FILE]

Warm programs take turns, one step at a time: the plain step; optim.offload=host, with its update on the devices and on
the host; remat.policy=full, and offload.  Exits 1 if losses differ that should be equal, bit for bit."""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import jax
from turns import measure

from spmd_lm.config.load import load
from spmd_lm.step.program import Program
from spmd_lm.training.bench import peak_memory, random_batch

VARIANTS = {
    "plain": (),
    "offload=host": ("optim.offload=host",),
    "offload=host, update=host": ("optim.offload=host", "optim.offload_update=host"),
    "remat=full": ("remat.policy=full",),
    "remat=offload": ("remat.policy=offload",),
}
SAME = {"offload=host": "plain", "offload=host, update=host": "plain", "remat=offload": "remat=full"}


class Variant:
    """A program, its state, and the losses and seconds of its steps."""

    def __init__(self, config: str, overrides: list[str]):
        self.program = Program(load(Path(config), overrides))
        self.compile_seconds = self.program.compile()
        self.state, self.batch = self.program.init(), random_batch(self.program)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(metrics["loss"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=10, help="steps that each program makes after the first two")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="default: all")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    variants = {}
    for name in args.only or VARIANTS:
        variants[name] = Variant(args.config, [*args.overrides, *VARIANTS[name]])
        for _ in range(2):
            variants[name].step()
        print(f"{name}: compiled in {variants[name].compile_seconds:.0f} s", flush=True)
    measure([*variants.values()], args.rounds)
    rows = {}
    for name, variant in variants.items():
        seconds = variant.seconds[2:]
        base = variants.get("plain", variant).seconds[2:]
        rows[name] = {
            "ms": statistics.median(seconds) * 1e3,
            "ratio": statistics.median(a / b for a, b in zip(seconds, base, strict=True)),
            "loss": variant.losses[-1],
        }
        with contextlib.suppress(AttributeError, TypeError):
            rows[name]["memory_gib"] = peak_memory(variant.program)[0] / 2**30
        print(f"{name:28s}" + "".join(f"{key} {value:10.4f}  " for key, value in rows[name].items()))
    wrong = [
        name
        for name, other in SAME.items()
        if {name, other} <= variants.keys() and variants[name].losses != variants[other].losses
    ]
    print(f"losses differ: {', '.join(wrong)}" if wrong else "losses are equal, bit for bit")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
