"""The resolution of `parallel.partitioner`: which side inserts the collectives of a step.

`auto` leaves them to XLA if a step compiled from sharding types exposes no more time and holds no more memory than the
manual step.  `python benchmarks/partitioners.py --choose TOPOLOGY` compiles both and writes the table."""

import functools
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from spmd_lm.config.schema import RunConfig
from spmd_lm.config.types import Partitioner

TABLE_FILE = "partitioners.yaml"
MOST_OF_MANUAL = 1.01  # largest ratio of a types step's exposed time, and of its memory, to the manual step's


class PartitionerChoice(NamedTuple):
    partitioner: Partitioner
    why: str


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load(files("spmd_lm.config").joinpath(TABLE_FILE).read_text()) or ())


def choose_partitioner(config: RunConfig, platform: str, overlaps: bool, own: bool = False) -> PartitionerChoice:
    """The partitioner on `platform`, and the reason.

    overlaps: linears are collective matmuls.
    own: the model has user-defined modules."""
    p = config.parallel
    if p.partitioner != "auto":
        return PartitionerChoice(p.partitioner, "as configured")
    if p.pipe > 1:
        return PartitionerChoice("manual", "stages of a pipeline run different programs, which types cannot describe")
    if config.model.mixtures:
        return PartitionerChoice("manual", "tokens go to experts in buffers, which types cannot describe")
    if p.context > 1:
        return PartitionerChoice("manual", "attention over `context` is written out")
    if overlaps:
        return PartitionerChoice("manual", "products run in parts beside their collectives")
    if own:
        return PartitionerChoice("manual", "modules of one's own may do what types cannot describe")
    if (p.quantize_gather, p.quantize_scatter) != ("none", "none"):
        return PartitionerChoice("manual", "weights or gradients are sent as codes, which the step writes out")
    if p.secondary != "none":
        return PartitionerChoice("manual", "the step gathers a secondary copy, which it writes out")
    if config.adapter.kind != "none":
        return PartitionerChoice("manual", f"adapter.kind={config.adapter.kind} is written out")
    if config.precision.few_bits:
        return PartitionerChoice("manual", "groups of rounded inputs are on one device, which types cannot describe")
    if config.precision.matmul != "none":
        return PartitionerChoice("manual", "a scale of eight bits is of one device's shard")
    layout = {"platform": platform, "zero": p.zero, "model": p.model > 1, "sequence": p.sequence and p.model > 1}
    row = next((row for row in table() if layout.items() <= row.items()), None)
    if row is None:
        return PartitionerChoice("manual", f"types were not compared on {platform}")
    exposed, memory = (max(row[figure].values()) for figure in ("exposed", "memory"))
    partitioner: Partitioner = "types" if max(exposed, memory) <= MOST_OF_MANUAL else "manual"
    compared = f"exposed time {exposed:.3f} and memory {memory:.3f} of the written-out step's on {row['topology']}"
    return PartitionerChoice(partitioner, f"types: {compared}")
