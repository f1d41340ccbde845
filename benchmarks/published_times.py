"""Step times that papers measured, compared with the cost model's predictions.

    python benchmarks/published_times.py            every table of published_times.yaml, as markdown
    python benchmarks/published_times.py ptd-p      tables whose names contain an argument

Nothing is compiled, and no device is needed."""

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from megatron import Profile, predict_step, profiles
from published_formulas import Recomputation, Sizes, microbatches_in_flight, state_bytes

from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.step_time import StepTime
from spmd_lm.resolve import abstract_plan

ROOT = Path(__file__).parents[1]
PARTS = "compute", "exposed", "bubble", "optimizer"
LARGEST_MICROBATCH = 16  # sequences
ROOM = 0.95  # usable fraction of a device's memory
ALLOCATED = 8  # bytes per logit, if one device has embedding and head


class Prediction(NamedTuple):
    """measured, value: in the table's unit.  chosen: settings that the paper does not give."""

    table: str
    name: str
    measured: float
    value: float
    fitted: str
    chosen: str
    step: StepTime

    @property
    def error(self) -> float:
        """Log of predicted over measured: above 0 if the model promises more than was measured."""
        return math.log(self.value / self.measured)


def tables() -> list[dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def predict(table: dict[str, Any]) -> list[Prediction]:
    """A prediction for each row.  Values in `seconds` are inverted, so that errors of all units have the same sign."""
    baseline = _fastest(table, table["baseline"]) if "baseline" in table else None
    predictions = []
    for row in table["rows"]:
        config, step, chosen = _fastest(table, row)
        measured, value = row["measured"], _rate(table, config, step)
        match table["unit"]:
            case "tflops":
                value /= 1e12
            case "seconds":
                measured, value = 1 / measured, 1 / step.seconds
            case "efficiency":
                assert baseline
                value /= _rate(table, *baseline[:2])
            case "speedup":
                assert baseline
                value = baseline[1].seconds / step.seconds
        predictions.append(
            Prediction(table["table"], row["name"], measured, value, row.get("fitted", ""), chosen, step)
        )
    return predictions


def _rate(table: dict[str, Any], config: RunConfig, step: StepTime) -> float:
    """FLOP/s per device, as the paper counts them."""
    flops = _sizes(config).step_flops(config.train.batch, recomputes=table.get("recomputes", False))
    return flops / step.seconds / _devices(config)


def _fastest(table: dict[str, Any], row: dict[str, Any]) -> tuple[RunConfig, StepTime, str]:
    """(configuration, step, chosen settings) of the fastest configuration that fits, among those the paper allows."""
    hardware, system = find_hardware(table["hardware"]), profiles()[table["system"]]
    assert hardware and hardware.memory
    steps = []
    for config, chosen in _candidates(table, row):
        if not table.get("free") or stage_memory(config, system) <= ROOM * hardware.memory.size:
            plan = abstract_plan(config, _devices(config), "gpu", table["hardware"])
            steps.append((config, predict_step(config, plan, hardware, system), chosen))
    return min(steps, key=lambda each: each[1].seconds)


def _candidates(table: dict[str, Any], row: dict[str, Any]) -> Iterator[tuple[RunConfig, str]]:
    layout = dict(row.get("layout", {}))
    batch = [f"train.batch={layout.pop('batch')}"] if "batch" in layout else []
    keys = [*table.get("overrides", []), *row.get("overrides", []), *batch]
    keys += [f"parallel.{key}={value}" for key, value in layout.items()]
    config = load(ROOT / f"configs/{row.get('base') or table['base']}.yaml", keys)
    free = table.get("free", [])
    if not free:
        yield config, ""
        return
    p, m = config.parallel, config.model
    per_replica = config.train.batch // p.data
    microbatches = [per_replica // n for n in _divisors(per_replica) if n <= LARGEST_MICROBATCH]
    chunks = _divisors(m.layers // p.pipe) if p.pipe > 1 else [1]
    choices = itertools.product(
        microbatches if "microbatch" in free else [p.microbatches],
        chunks,
        ("none", "selective", "full") if "remat" in free else [config.remat.policy],
    )
    for count, v, policy in choices:
        schedule = "interleaved" if v > 1 else "1f1b"
        update = {"microbatches": count, "chunks": v, "schedule": schedule}
        if v > 1 and count % p.pipe:
            continue
        parallel, remat = p.model_copy(update=update), config.remat.model_copy(update={"policy": policy})
        told = [f"microbatch {per_replica // count}"] * ("microbatch" in free) + [f"chunks {v}"] * (p.pipe > 1)
        told += [f"remat {policy}"] * ("remat" in free)
        yield config.model_copy(update={"parallel": parallel, "remat": remat}), ", ".join(told)


def stage_memory(config: RunConfig, system: Profile) -> float:
    """Bytes per device of the first stage, by the papers' formulas, but with gradients in float32 as in Megatron-LM, 2
    bytes more per parameter."""
    m, p, sizes = config.model, config.parallel, _sizes(config)
    sequences = config.train.batch // p.data // p.microbatches
    parameters = (sizes.parameters - m.vocab * m.width) / (p.pipe * p.model) + m.vocab * m.width / p.model
    layers = m.layers / p.pipe * (microbatches_in_flight(p.pipe, config.chunks) if p.pipe > 1 else 1)

    def activations(policy: Recomputation) -> float:
        return sizes.layer_activations(sequences, p.model, policy, shards_sequence=p.sequence)

    # A layer being recomputed is held whole; with fused attention, no scores are held.
    policy = config.remat.policy
    assert policy in ("none", "selective", "full")
    fused = policy == "none" and system.attention == "fused"
    saved = layers * activations("selective" if fused else policy) + (policy == "full") * activations("none")
    logits = sequences * m.context * m.vocab / p.model * ALLOCATED if p.pipe == 1 else 0
    return state_bytes(parameters, p.zero, p.data) + 2 * parameters + saved + logits


def _sizes(config: RunConfig) -> Sizes:
    m = config.model
    return Sizes(m.width, m.layers, m.heads, m.context, m.vocab)


def _devices(config: RunConfig) -> int:
    return config.parallel.pipe * config.parallel.data * config.parallel.model


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def main() -> None:
    for table in tables():
        if len(sys.argv) > 1 and not any(part.lower() in table["table"].lower() for part in sys.argv[1:]):
            continue
        rows = predict(table)
        judged = [row.error for row in rows if not row.fitted]
        rms = math.sqrt(sum(error**2 for error in judged) / len(judged))
        print(f"\n**{table['table']}** ({table['source']}; {table['hardware']}, {table['system']}, {table['unit']})\n")
        header = "row", "measured", "predicted", "error", "the fastest that fits", *PARTS
        print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
        for row in rows:
            measured, value = (1 / x if table["unit"] == "seconds" else x for x in (row.measured, row.value))
            parts = [f"{row.step.parts[name] / row.step.seconds:.1%}" for name in PARTS]
            error = f"{math.expm1(row.error):+.1%}" + (f", fitted: {row.fitted}" if row.fitted else "")
            cells = (row.name, f"{measured:.4g}", f"{value:.4g}", error, row.chosen, *parts)
            print(f"| {' | '.join(cells)} |")
        print(f"\nRMS of log errors of rows that nothing was fitted to: {rms:.3f}")


if __name__ == "__main__":
    main()
