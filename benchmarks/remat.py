"""Activations saved per layer and sequence under each remat policy: by a layer's trace, in the step, by the compiler.

    python benchmarks/remat.py                       layers of GPT-3's proportions on v5p:2x2x2, model 8
    python benchmarks/remat.py --attention splash    with the fused kernel and no dropout in it
    python benchmarks/remat.py --width 12288 --heads 96
    python benchmarks/remat.py --compile             minutes for each row

Step: the outputs of the loop over layers in the step's jaxpr.  Compiled: temporaries at two depths and two batches; the
part that grows with both belongs to one layer and sequence.

Percentages are relative to no remat and no sequence parallelism.  arXiv:2205.05198, figure 7, has for GPT-3 175B: 57%
selective, 62% sequence parallel, 19% both, 9% full."""

import argparse
from collections.abc import Iterator
from typing import Any

import jax

import spmd_lm
from spmd_lm.analysis.topology import Topology, parse_topology
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.layer_trace import trace_layer
from spmd_lm.step.program import Program

# Large enough that no array fits into a TPU's vector memory, which its compiler does not count.
DEPTHS, BATCHES = (48, 96), (4, 8)
POLICIES = [(policy, sequence) for sequence in (False, True) for policy in ("none", "selective", "residual", "full")]


def config(a: argparse.Namespace, policy: str, sequence: bool, layers: int, batch: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "width": a.width,
                "heads": a.heads,
                "context": a.context,
                "vocab": 1024,  # not part of a layer
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


def scans(jaxpr: Any) -> Iterator[Any]:
    """All scans of a jaxpr, nested ones too, in the order in which they run."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in jax.tree.leaves([*equation.params.values()]):
            inner = getattr(value, "jaxpr", value)
            yield from scans(inner) if hasattr(inner, "eqns") else ()


def traced(a: argparse.Namespace, policy: str, sequence: bool, target: Topology) -> tuple[float, float]:
    """Bytes saved per layer and sequence on a device: by the layer's trace, and in the jaxpr of the step."""
    c = config(a, policy, sequence, DEPTHS[0], BATCHES[0])
    program = Program(c, target.devices())
    jaxpr = jax.make_jaxpr(program.train_step)(program.abstract_state(), program.abstract_batch())
    forward = next(each for each in scans(jaxpr.jaxpr) if each.params["length"] == DEPTHS[0])
    saved = forward.outvars[forward.params["num_carry"] :]
    bytes_ = sum(x.aval.size * x.aval.dtype.itemsize for x in saved) / DEPTHS[0] / BATCHES[0]
    return trace_layer(c, program.plan, kernel=a.attention).saved, bytes_


def compiled(a: argparse.Namespace, policy: str, sequence: bool) -> float:
    """Bytes saved per layer and sequence on a device, by the compiler."""
    temporaries = {
        (layers, batch): spmd_lm.audit(config(a, policy, sequence, layers, batch), a.topology)["memory"]["temporaries"]
        for layers in DEPTHS
        for batch in BATCHES
    }
    (few, many), (small, large) = DEPTHS, BATCHES
    growth = (temporaries[many, large] - temporaries[many, small]) - (temporaries[few, large] - temporaries[few, small])
    return growth / (many - few) / (large - small)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--attention", choices=["xla", "splash"], default="xla")
    parser.add_argument("--topology", default="v5p:2x2x2")
    parser.add_argument("--compile", action="store_true")
    a = parser.parse_args()
    target = parse_topology(a.topology)
    columns = ["remat", "sequence", "layer", "step", "of none"] + ["compiled", "of none"] * a.compile
    print("MiB per layer and sequence\n\n| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    base: list[float] = []
    for policy, sequence in POLICIES:
        layer, *measured = traced(a, policy, sequence, target)
        measured += [compiled(a, policy, sequence)] if a.compile else []
        base = base or measured
        shares = [f"{x / 2**20:.2f} | {x / none:.1%}" for x, none in zip(measured, base, strict=True)]
        cells = [policy, "split" if sequence else "whole", f"{layer / 2**20:.2f}", *shares]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
