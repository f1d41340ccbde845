"""Switches that make a run fit, one after the other: what a device and its host hold, and the predicted step.

    python benchmarks/memory_switches.py configs/llama/3.1-8b.yaml h100:1x8 train.batch=64

Prints the table of docs/memory.md, from `spmd-lm plan`'s figures.  Nothing is compiled or timed."""

import argparse
from pathlib import Path

from spmd_lm.analysis.topology import parse_topology
from spmd_lm.config.load import load
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.step_time import OURS, predict_step
from spmd_lm.resolve import abstract_plan

SWITCHES = (
    ("parallel.zero=0", "remat.policy=none", "parallel.microbatches=1"),
    ("parallel.microbatches=8",),
    ("parallel.zero=1",),
    ("precision.reduce=bfloat16",),
    ("parallel.zero=3",),
    ("remat.policy=full",),
    ("remat.policy=offload",),
    ("optim.offload=host",),
    ("optim.offload_update=host",),
)
HEADER = "| and then | state, GiB | peak, GiB | peak point | on the host, GiB | predicted step, s |"


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("topology", type=parse_topology)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    devices = args.topology.devices()
    hardware = find_hardware(devices[0].device_kind)
    assert hardware is not None
    print(HEADER, f"|{' --- |' * (HEADER.count('|') - 1)}", sep="\n")
    overrides = [*args.overrides]
    for switch in SWITCHES:
        overrides += switch
        config = load(args.config, overrides)
        plan = abstract_plan(config, len(devices), args.topology.platform, devices[0].device_kind)
        point, step = memory.fullest_point(config, plan), predict_step(config, plan, hardware, OURS)
        state = sum(memory.state(config, plan).values())
        on_host = memory.activations_on_host(config, plan) + memory.state_on_host(config, plan)
        cells = gib(state), gib(state + point.total), point.name, gib(on_host), f"{step.seconds:.2f}"
        print(f"| `{' '.join(switch)}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
