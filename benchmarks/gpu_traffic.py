"""Memory traffic of steps of gpu_sizes.py on an absent H200, and the seconds that audit's count and plan's model
predict.

    python benchmarks/gpu_traffic.py [SIZE ...] [section.key=value ...]

Needs the compiler for GPUs (pip install -e '.[aot]'), and nvidia-cudnn-cu13 for cuDNN's attention."""

import sys

from gpu_sizes import SIZES, load_size

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.step_time import OURS, predict_step
from spmd_lm.planning.audit import audit_step
from spmd_lm.runtime.devices import hide_xla_warnings
from spmd_lm.runtime.formatting import format_table

KINDS = ("products", "attention", "other kernels", "copies", "fills")


def main(arguments: list[str]) -> None:
    overrides = tuple(argument for argument in arguments if "=" in argument)
    sizes = [argument for argument in arguments if "=" not in argument] or list(SIZES)
    cells: list[tuple[str, ...]] = [("GB a step", *KINDS, "must move", "counted, ms", "plan, ms")]
    for size in sizes:
        config = load_size(size, ("precision.compute=bfloat16", *overrides))
        program, _, _, report = audit_step(config, parse_topology("h200:1x1"))
        traffic, hardware = report["memory_traffic"], find_hardware(program.plan.device_kind)
        assert hardware
        planned = predict_step(program.config, program.plan, hardware, OURS).seconds
        moved = {row["kind"]: row["bytes"] for row in traffic["kinds"]}
        sizes_moved = (*(moved.get(kind, 0.0) for kind in KINDS), sum(traffic["least"].values()))
        seconds = traffic["seconds"], planned
        cells.append((size, *(f"{n / 1e9:.1f}" for n in sizes_moved), *(f"{1e3 * n:.1f}" for n in seconds)))
    print("\n".join(format_table(cells)))


if __name__ == "__main__":
    hide_xla_warnings()
    main(sys.argv[1:])
