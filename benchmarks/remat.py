"""What backward finds saved, per layer and sequence, by remat policy: the formula's and the compiler's.

    python benchmarks/remat.py                       a stack of GPT-3's proportions on v5p:2x2x2, model 8
    python benchmarks/remat.py --attention splash    with the fused kernel and no dropout in it
    python benchmarks/remat.py --width 12288 --heads 96

Compiled ahead of time at two depths and two batches: what grows with both is the activations of a layer, whatever else
a step holds.  Percent of no remat without sequence parallelism, as arXiv:2205.05198, figure 7, has them: GPT-3's 175B
57% selective, 62% sequence parallel, 19% both, 9% full."""

import argparse

from spmd_lm.analysis import topology
from spmd_lm.analysis.memory import block_bytes
from spmd_lm.audit import audit
from spmd_lm.config.schema import RunConfig
from spmd_lm.train.program import abstract_plan, choose_kernel

DEPTHS, BATCHES = (4, 8), (2, 4)
POLICIES = [(policy, sequence) for sequence in (False, True) for policy in ("none", "selective", "residual", "full")]


def config(a: argparse.Namespace, policy: str, sequence: bool, layers: int, batch: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "width": a.width,
                "heads": a.heads,
                "context": a.context,
                "vocab": 51200,
                "attention": a.attention,
                "attention_dropout": 0.1 if a.attention == "xla" else 0.0,
            },
            "data": {"source": "synthetic"},
            "parallel": {"model": 8, "sequence": sequence},
            "optim": {"lr": 1e-4},
            "remat": {"policy": policy},
            "train": {"steps": 1, "batch": batch},
        }
    )


def measured(a: argparse.Namespace, policy: str, sequence: bool, target: topology.Topology) -> float:
    """Bytes of a layer and sequence on a device, by the compiler."""
    held = {
        (layers, batch): audit(config(a, policy, sequence, layers, batch), target)["memory"]["temporaries"]
        for layers in DEPTHS
        for batch in BATCHES
    }
    (few, many), (small, large) = DEPTHS, BATCHES
    grown = (held[many, large] - held[many, small]) - (held[few, large] - held[few, small])
    return grown / (many - few) / (large - small)


def formula(a: argparse.Namespace, policy: str, sequence: bool, target: topology.Topology) -> float:
    c = config(a, policy, sequence, DEPTHS[0], BATCHES[0])
    kernel, _ = choose_kernel(c, target.platform)
    return block_bytes(c, abstract_plan(c, target.devices, target.platform), kernel) * a.context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--attention", choices=["xla", "splash"], default="xla")
    parser.add_argument("--topology", default="v5p:2x2x2")
    a = parser.parse_args()
    target = topology.parse(a.topology)
    print("MiB per layer and sequence\n\n| remat | sequence | formula | compiled | of none |\n" + "| --- " * 5 + "|")
    base = 0.0
    for policy, sequence in POLICIES:
        bytes_ = measured(a, policy, sequence, target)
        base = base or bytes_
        told = formula(a, policy, sequence, target)
        split = "split" if sequence else "whole"
        print(f"| {policy} | {split} | {told / 2**20:.2f} | {bytes_ / 2**20:.2f} | {bytes_ / base:.0%} |", flush=True)


if __name__ == "__main__":
    main()
