"""`spmd-lm plan --search` on PTD-P's ten models (arXiv:2104.04473, table 1), against the layouts that the paper chose.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python benchmarks/searches.py [--compile] [NAME ...]    NAME: 39.1b; default all

Each row: layouts that were costed, the time of a search, and predicted step times under the paper's layout, with the
microbatch and chunks that are best for it, and under the search's.  The paper's layout is not given to the search.
--compile compiles each winner, and tells whether it fits and sends what theory predicts.  Exits 1 if the search loses,
or if a winner does not fit or match."""

import argparse
import sys
from pathlib import Path

import spmd_lm
from spmd_lm.analysis.topology import parse_topology
from spmd_lm.config.load import load
from spmd_lm.planning.search import CostedLayout, make_target, search
from spmd_lm.planning.search_report import confirm, describe_layout
from spmd_lm.runtime.devices import hide_xla_warnings

CONFIGS = Path(__file__).parents[1] / "configs/ptd-p"
HOSTS = {"1.7b": 4, "3.6b": 8, "7.5b": 16, "18.4b": 32, "39.1b": 64, "76.1b": 128, "145.6b": 192, "310.1b": 240}
HOSTS |= {"529.6b": 315, "1t": 384}


def is_paper_s(layout: CostedLayout, paper: CostedLayout | None, degrees: tuple[int, int, int]) -> bool:
    """True if a layout is the paper's, with full recomputation and no ZeRO, and faster than `paper`, the best yet."""
    p = layout.config.parallel
    chosen = (p.pipe, p.data, p.model) == degrees and p.zero == 0 and not p.sequence
    return chosen and layout.config.remat.policy == "full" and (paper is None or layout.seconds < paper.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    hide_xla_warnings()
    print("| model | devices | layouts | search | paper's layout | search's | chosen | compiled |\n|" + " --- |" * 8)
    failed = 0
    for name in arguments.names or HOSTS:
        config = load(CONFIGS / f"{name}.yaml")
        p = config.parallel
        found = search(config, [make_target(parse_topology(f"a100:{HOSTS[name]}x8"))])
        paper, best = None, found.fastest()
        for layout in found.layouts:
            if is_paper_s(layout, paper, (p.pipe, p.data, p.model)):
                paper = layout
        assert paper, name
        compiled = ""
        if arguments.compile:
            confirmed = confirm(best, spmd_lm.audit)
            peak = confirmed["compiled_peak"] or float("inf")  # None if the compiler refuses it
            compiled = f"peak {peak / 2**30:.1f} GiB for {best.memory / 2**30:.1f}"
            compiled += ", bytes as theory has them" if confirmed["matches_theory"] else ", NOT as theory"
            failed += peak > best.memory + best.device_room or not confirmed["matches_theory"]
        failed += best.seconds > paper.seconds
        chosen = " ".join(f"{key}={value}" for key, value in describe_layout(best)["layout"].items())
        cells = (
            name,
            f"{8 * HOSTS[name]}",
            f"{len(found.layouts):,}",
            f"{found.seconds:.0f} s",
            f"{paper.seconds:.2f} s",
        )
        print(f"| {' | '.join((*cells, f'{best.seconds:.2f} s', chosen, compiled))} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
