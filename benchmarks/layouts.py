"""Layouts of one run, side by side: what each sends, holds and takes to compile, on hardware that need not be there.

    python benchmarks/layouts.py configs/gpt_22b.yaml v5p:4x4x4 "" "parallel.data=32 parallel.model=2"

Each layout is a string of overrides; one row of a markdown table for each, from `spmd-lm audit --json` in a process of
its own.  Exits 1 where a step is not as theory asks."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GIB = 2**30
HEADER = "| overrides | mesh | bubble | wire | theory | total | peak | planned | largest all-reduce | compile | RAM | |"
RULE = f"|{' --- |' * (HEADER.count('|') - 1)}"


def row(config: str, topology: str, overrides: str, name: str) -> tuple[str, bool]:
    """The row, and whether the step is as theory asks.  RAM: that the compiling process took at most."""
    command = [
        sys.executable,
        "-m",
        "spmd_lm",
        "audit",
        config,
        "--topology",
        topology,
        "--json",
        "-",
        *overrides.split(),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=errors, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out, told = (file.seek(0) or file.read() for file in (said, errors))
    if process.returncode not in (0, 1) or not out:
        raise SystemExit(f"{' '.join(command)} failed:\n{told}")
    r = json.loads(out)
    m = r["memory"]
    gib = lambda size: f"{size / GIB:.2f}"  # noqa: E731
    largest = max((c["bytes"] for c in r["collectives"] if c["kind"] == "all-reduce"), default=0)
    cells = [
        name,
        " x ".join(f"{axis} {n}" for axis, n in r["mesh"].items() if n > 1),
        f"{r['bubble']:.1%}",
        gib(sum(c["bytes"] for c in r["collectives"])),
        gib(sum(t["bytes"] for t in r["theory"])),
        gib(m["total"]),
        gib(m["peak"]),
        gib(sum(m["planned"].values())),
        f"{largest / 2**20:.1f} MiB",
        f"{r['compile_seconds']:.0f} s",
        f"{gib(usage.ru_maxrss * 1024)}",
        "" if r["ok"] else "NOT AS THEORY ASKS",
    ]
    return "| " + " | ".join(cells) + " |", r["ok"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("topology")
    parser.add_argument("layouts", nargs="+")
    a = parser.parse_args()
    print(f"{a.config} on {a.topology}; GiB per device and step\n\n{HEADER}\n{RULE}")
    failed = 0
    for layout in a.layouts:
        cells, ok = row(a.config, a.topology, layout, layout.replace("parallel.", "") or "as it is")
        failed += not ok
        print(cells, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
