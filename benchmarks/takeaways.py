"""PTD-P's measured trade-offs (arXiv:2104.04473, sections 3 and 5.4), as the cost model predicts them: curves of
TFLOP/s per device, for Megatron-LM of 2021 on A100s.

    python benchmarks/takeaways.py      as markdown"""

from pathlib import Path
from typing import NamedTuple

from megatron import predict_step, profiles
from published_formulas import Sizes

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.step_time import StepTime
from spmd_lm.resolve import abstract_plan

CONFIG = Path(__file__).parents[1] / "configs/ptd-p/39.1b.yaml"
A100, SYSTEM = "NVIDIA A100-SXM4-80GB", "megatron-2021"


class Curve(NamedTuple):
    """label: what all points share.  points: TFLOP/s per device by the quantity that varies."""

    label: str
    points: dict[int, float]


def gpt(layers: int, width: int, heads: int, batch: int, remat: str = "full", /, **parallel: int | str) -> RunConfig:
    """A model of the paper, whose system shards neither the sequence nor the optimizer."""
    sizes = [f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"train.batch={batch}"]
    layout = {"pipe": 1, "data": 1, "model": 1, "microbatches": 1, "sequence": "false", "zero": 0} | parallel
    keys = [f"parallel.{key}={value}" for key, value in layout.items()]
    dropout = ["model.dropout=0.1", "model.attention_dropout=0.1"]
    return load(CONFIG, [*sizes, *keys, *dropout, f"remat.policy={remat}"])


def step(config: RunConfig) -> StepTime:
    hardware = find_hardware(A100)
    assert hardware
    p = config.parallel
    plan = abstract_plan(config, p.pipe * p.data * p.model, "gpu", A100)
    return predict_step(config, plan, hardware, profiles()[SYSTEM])


def tflops(config: RunConfig) -> float:
    """TFLOP/s per device, as the paper counts them, with recomputation."""
    m, p = config.model, config.parallel
    flops = Sizes(m.width, m.layers, m.heads, m.context, m.vocab).step_flops(config.train.batch, recomputes=True)
    return flops / step(config).seconds / (p.pipe * p.data * p.model) / 1e12


def tensor_and_pipeline() -> list[Curve]:
    """Section 5.4.1: 162.2B on 64 GPUs, by the degree of tensor parallelism."""
    return [
        Curve(
            f"batch {batch}",
            {
                t: tflops(gpt(32, 20480, 128, batch, model=t, pipe=64 // t, microbatches=batch))
                for t in (2, 4, 8, 16, 32)
            },
        )
        for batch in (32, 128)
    ]


def pipeline_and_data() -> list[Curve]:
    """Section 5.4.2: 5.9B on 64 GPUs, by the number of stages."""
    return _with_data("pipe")


def tensor_and_data() -> list[Curve]:
    """Section 5.4.3: the same, by the degree of tensor parallelism."""
    return _with_data("model")


def _with_data(axis: str) -> list[Curve]:
    curves = []
    for batch in (32, 128, 512):
        degrees = [n for n in (2, 4, 8, 16, 32) if batch % (64 // n) == 0]
        layouts = {n: {axis: n, "data": 64 // n, "microbatches": batch * n // 64} for n in degrees}
        curves.append(Curve(f"batch {batch}", {n: tflops(gpt(32, 3840, 32, batch, **layouts[n])) for n in degrees}))
    return curves


def microbatch_size() -> list[Curve]:
    """Section 5.4.4: 91B on 64 GPUs, by the sequences of a microbatch."""
    return [
        Curve(
            f"batch {batch}",
            {b: tflops(gpt(64, 10880, 80, batch, model=8, pipe=8, microbatches=batch // b)) for b in (1, 2, 4, 8)},
        )
        for batch in (32, 128, 512)
    ]


def interleaving() -> list[Curve]:
    """Section 5.3.2: 175B on 96 GPUs, by the batch."""
    batches = (12, 24, 36, 48, 60)
    return [
        Curve(
            label,
            {
                b: tflops(gpt(96, 12288, 96, b, model=8, pipe=12, microbatches=b, schedule=schedule, chunks=n))
                for b in batches
            },
        )
        for label, schedule, n in (("1F1B", "1f1b", 1), ("interleaved, 2 chunks", "interleaved", 2))
    ]


def recomputation() -> list[Curve]:
    """Section 5.5: 145B on 128 GPUs, by the batch; hundredths of a sequence per second, all 128 GPUs together."""
    batches = (1, 4, 16, 64, 256)
    return [
        Curve(
            label,
            {
                b: 100 * b / step(gpt(80, 12288, 96, b, policy, model=8, pipe=16, microbatches=b)).seconds
                for b in batches
            },
        )
        for label, policy in (("recomputed", "full"), ("saved", "none"))
    ]


def main() -> None:
    for curves in (
        tensor_and_pipeline,
        pipeline_and_data,
        tensor_and_data,
        microbatch_size,
        interleaving,
        recomputation,
    ):
        found = curves()
        points = sorted({x for curve in found for x in curve.points})
        print(f"\n{curves.__doc__}\n\n| | {' | '.join(map(str, points))} |\n|{' --- |' * (len(points) + 1)}")
        for label, values in found:
            print(f"| {label} | {' | '.join(f'{values[x]:.0f}' if x in values else '' for x in points)} |")


if __name__ == "__main__":
    main()
