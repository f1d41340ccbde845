"""Layouts of one run, compared: bytes sent, memory, and compile time, on hardware that may be absent.

    python benchmarks/layouts.py configs/gpt_22b.yaml v5p:4x4x4 "" "parallel.data=32 parallel.model=2"

Each layout is a string of overrides, and gives one row of a markdown table, from `spmd-lm audit --json` in its own
process.  Exits 1 if a step does not match theory."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

import children

HEADER = "| overrides | mesh | bubble | wire | theory | total | peak | planned | largest all-reduce | compile | RAM | |"
RULE = f"|{' --- |' * (HEADER.count('|') - 1)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def row(config: str, topology: str, overrides: str, name: str) -> tuple[str, bool]:
    """The row, and True if the step matches theory.  RAM is the compiling process's peak."""
    command = [sys.executable, "-m", "spmd_lm", "audit", config, "--topology", topology, "--json", "-"]
    command += overrides.split()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, env=children.environment(), stdout=stdout, stderr=stderr, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        output, errors = stdout.read(), stderr.read()
    if process.returncode not in (0, 1) or not output:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors}")
    r = json.loads(output)
    m = r["memory"]
    largest = max((c["bytes"] for c in r["collectives"] if c["kind"] == "all-reduce"), default=0)
    cells = [
        name,
        " x ".join(f"{axis} {n}" for axis, n in r["mesh"].items() if n > 1),
        f"{r['bubble']:.1%}",
        _gib(sum(c["bytes"] for c in r["collectives"])),
        _gib(sum(t["bytes"] for t in r["theory"])),
        _gib(m["total"]),
        _gib(m["peak"]),
        _gib(sum(m["planned"].values())),
        f"{largest / 2**20:.1f} MiB",
        f"{r['compile_seconds']:.0f} s",
        _gib(usage.ru_maxrss * 1024),
        "" if r["ok"] else "DOES NOT MATCH THEORY",
    ]
    return "| " + " | ".join(cells) + " |", r["ok"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("topology")
    parser.add_argument("layouts", nargs="+")
    a = parser.parse_args()
    first, *others = (layout.split() for layout in a.layouts)
    shared = [each for each in first if others and all(each in other for other in others)]
    print(f"{' '.join([a.config, 'on', a.topology, *shared])}; GiB per device and step\n\n{HEADER}\n{RULE}")
    failed = 0
    for layout in a.layouts:
        own = " ".join(each.removeprefix("parallel.") for each in layout.split() if each not in shared)
        cells, ok = row(a.config, a.topology, layout, own or "as configured")
        failed += not ok
        print(cells, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
