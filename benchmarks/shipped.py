"""Shipped configurations that name their hardware, compiled for it: bytes sent, memory, and compile time.

    python benchmarks/shipped.py            all of them
    python benchmarks/shipped.py ptd-p/1t   configurations whose names contain an argument

A configuration names its hardware in its first lines, as `--topology T`, and gives one row of a markdown table.  Exits
1 if a step does not match theory."""

import re
import sys
from pathlib import Path

from children import ROOT
from layouts import HEADER, RULE, row

from spmd_lm.config.load import load

CONFIGS = ROOT / "configs"


def size(path: Path) -> int:
    """Grows with the parameters of the model's layers."""
    model = load(path).model
    return model.layers * model.width**2


def main() -> int:
    print(f"GiB per device and step\n\n{HEADER.replace('overrides', 'configuration')}\n{RULE}")
    failed = 0
    topologies = {path: re.search(r"--topology (\S+)", path.read_text()) for path in CONFIGS.rglob("*.yaml")}
    named = {path: found[1] for path, found in topologies.items() if found}
    for path in sorted(named, key=lambda path: (path.parent, size(path), path.name)):
        name = str(path.relative_to(CONFIGS).with_suffix(""))
        if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:]):
            cells, ok = row(str(path), named[path], "", f"{name} on {named[path]}")
            failed += not ok
            print(cells, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
