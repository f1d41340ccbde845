"""Time spmd-lm's train step against a hand-written one, on one CPU device.

    python benchmarks/cpu_step.py [gpt-50k | gpt-256 | tiny] [--rounds 15]

Every program starts once and stays warm; then they take turns, one step at a time, so that other load on the machine
affects all of them alike.  CPU time decides: wall time on a machine that is not idle measures its other load.  Exits 1
if the losses differ or the framework takes more than `--bar` times as long as the hand-written step."""

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path

import children
from turns import Contender, measure, started
from workload import SIZES

HERE = Path(__file__).parent
REFERENCE, OURS = "hand-written", "spmd-lm"
PROGRAMS = {REFERENCE: ["handwritten.py"], OURS: ["framework.py"], "spmd-lm, scanned": ["framework.py", "--scan"]}

# Stock malloc returns XLA's temporaries to the system after every step, and every page faults in again.
KEEP_MEMORY = {
    "hugetlb": 1,
    "arena_max": 1,
    "mmap_threshold": 2**32,
    "trim_threshold": 2**34,
    "top_pad": 2**28,
}
TOLERANCE = 1e-4


def environment(malloc: str) -> dict[str, str]:
    env = {k: v for k, v in children.environment().items() if k not in ("XLA_FLAGS", "GLIBC_TUNABLES")}
    if malloc == "tuned":
        env["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{key}={value}" for key, value in KEEP_MEMORY.items())
    return env | {"JAX_PLATFORMS": "cpu"}


def row(contender: Contender, reference: Contender, flops: int) -> dict[str, float]:
    pairs = zip(contender.cpu, reference.cpu, strict=True)
    return {
        "cpu_ms": min(contender.cpu) * 1e3,
        "wall_ms": min(contender.wall) * 1e3,
        "cpu_ratio": min(contender.cpu) / min(reference.cpu),
        "paired_cpu_ratio": statistics.median(seconds / base for seconds, base in pairs),
        "wall_ratio": min(contender.wall) / min(reference.wall),
        "gflops": flops / min(contender.wall) / 1e9,
        "loss_difference": max(abs(a - b) for a, b in zip(contender.losses, reference.losses, strict=True)),
    }


def render(rows: dict[str, dict[str, float]]) -> str:
    columns = f"{'CPU ms':>9s}{'ratio':>8s}{'paired':>8s}{'wall ms':>10s}{'ratio':>8s}{'GFLOP/s':>9s}"
    lines = [f"{'':18s}{columns}  loss differs by"]
    for name, r in rows.items():
        cpu = f"{r['cpu_ms']:9.0f}{r['cpu_ratio']:8.3f}{r['paired_cpu_ratio']:8.3f}"
        wall = f"{r['wall_ms']:10.0f}{r['wall_ratio']:8.3f}{r['gflops']:9.0f}"
        lines.append(f"{name:18s}{cpu}{wall}  {r['loss_difference']:.1e}")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="?", default="gpt-50k", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=15, help="steps that each program makes")
    parser.add_argument("--bar", type=float, default=1.05, help="largest accepted ratio to the hand-written step")
    parser.add_argument("--malloc", choices=("tuned", "stock"), default="tuned", help="the same for every program")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=COMMAND", help="one more program to time")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    commands = {name: [sys.executable, str(HERE / file), args.sizes, *rest] for name, (file, *rest) in PROGRAMS.items()}
    commands |= {name: shlex.split(command) for name, _, command in (one.partition("=") for one in args.add)}
    with started(commands, environment(args.malloc)) as contenders:
        measure(contenders, args.rounds)
    rows = {c.name: row(c, contenders[0], SIZES[args.sizes].matmul_flops) for c in contenders}
    print(f"{args.sizes}, {args.rounds} rounds, {args.malloc} malloc: minima, and medians of paired ratios")
    print(render(rows))
    if args.json:
        args.json.write_text(json.dumps({"sizes": args.sizes, "malloc": args.malloc, "rows": rows}, indent=1))
    wrong = [name for name, r in rows.items() if not r["loss_difference"] <= TOLERANCE]
    if wrong:
        print(f"FAILED: {', '.join(wrong)}: losses differ from the {REFERENCE} step's by more than {TOLERANCE}")
    slow = rows[OURS]["cpu_ratio"] > args.bar
    if slow:
        print(f"FAILED: {OURS} takes {rows[OURS]['cpu_ratio']:.3f} times the {REFERENCE} step; the bar is {args.bar}")
    return int(bool(wrong) or slow)


if __name__ == "__main__":
    sys.exit(main())
