"""Prediction of a step's seconds, before anything is compiled.

A step is, one after the other: the compute of one device, kernel by kernel (compute_time.py, kernels.py); the
communication that nothing hides; the bubble of its pipeline, (p - 1) / (v m) of a stage's work on m microbatches in v
chunks (arXiv:2104.04473, section 2.2); and the optimizer.  All stages wait for the last one, which has the head.
Batches are loaded beside the step.  A collective takes as long as its bytes on the slowest link that it crosses, and
its hops."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.compute_time import LayerSeconds, head_seconds, layer_seconds
from spmd_lm.cost_model.counted_step import ExpectedCollective, layer_passes
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.hardware import Hardware
from spmd_lm.cost_model.kernels import Kernels
from spmd_lm.cost_model.sizes import at_least_float32, dtype_bytes, stream_bytes
from spmd_lm.cost_model.wire import COLLECTIVE_PERMUTE
from spmd_lm.own_optimizer import bytes_of_moments
from spmd_lm.parallel.mesh import devices_within_domain
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Plan


class CollectiveTime(NamedTuple):
    """Seconds of all collectives of an expected row in a step.  link: `link`, or `network` between hosts or slices."""

    row: ExpectedCollective
    link: str
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on.

    host: seconds that a device waits for its host's memory."""

    compute: float
    exposed: float
    bubble: float
    optimizer: float
    collectives: tuple[CollectiveTime, ...]
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.bubble + self.optimizer + self.host

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name; `input`, the wait for a batch, is 0, because batches are loaded beside the step."""
        spent = {name: getattr(self, name) for name in ("compute", "exposed", "bubble", "optimizer", "host")}
        return spent | {"input": 0.0}


class Software(NamedTuple):
    """Efficiency of programs on the hardware.

    share: share of its matmul rate that they reach.
    shares: where that is not measured, the most and the least that published runs of other programs reached.
    kernel_overhead: seconds of each kernel besides its work.
    idle_is_free: whether an idle device leaves its processor to others.
    weight_copies: see `layer_seconds`."""

    share: float
    shares: tuple[float, float]
    kernel_overhead: float = 4e-6
    idle_is_free: bool = False
    weight_copies: int = 0


OURS = Software(0.9, (0.93, 0.47))
"""An assumption: docs/cost-model.md.  The range is that of share x measured rate / predicted rate over the rows
of benchmarks/published_times.yaml."""
SIMULATED = Software(1.0, (1.0, 1.0), idle_is_free=True, weight_copies=2)
"""Programs on simulated devices, which share one processor."""


class Compute(NamedTuple):
    """Seconds of one device in one step.

    layers: seconds of the layers, for all microbatches.
    rest: seconds of the head, and of summing gradients over microbatches.
    optimizer: seconds of the update."""

    layers: float
    rest: float
    optimizer: float


def predict_step(config: RunConfig, plan: Plan, hardware: Hardware, software: Software) -> StepTime:
    """The step of `config` under `plan`."""
    overhead = software.kernel_overhead if hardware.kernel_overhead is None else hardware.kernel_overhead
    kernels = Kernels(hardware, config.precision.compute, software.share, overhead)
    layer = layer_seconds(config, plan, kernels, weight_copies=software.weight_copies)
    ahead, passes = layer_passes(config, plan)  # in a pipeline the pass ahead of backward's runs the chunk twice
    in_layers = ahead * layer.forward + passes * (layer.forward + layer.backward)
    # All stages wait for the last one, which has the head; simulated ones do not.
    microbatches, stages = config.parallel.microbatches, plan.layout.pipe
    counts = schedule_counts(config.parallel.schedule, stages, microbatches, config.chunks)
    heads = microbatches / stages if software.idle_is_free else microbatches
    idle_is_work = config.parallel.run_idle_stages and stages > 1
    rest = (counts.ticks if idle_is_work else heads) * head_seconds(config, plan, kernels)
    rest += _accumulation_seconds(config, plan, kernels)
    compute = Compute(in_layers, rest, _optimizer_seconds(config, plan, kernels))
    rows = expected_collectives(config, plan)

    def hidden(seconds_of: list[float]) -> list[float]:
        return _hidden(config, plan, rows, seconds_of, in_layers + rest)

    bubble = 0.0 if software.idle_is_free or idle_is_work else counts.bubble
    step = combine(plan, hardware, compute, rows, hidden, bubble)
    host = passes * _seconds_of_offloading(config, plan, hardware, layer) + _seconds_of_state(config, plan, hardware)
    return dataclasses.replace(step, host=host)


def _seconds_of_offloading(config: RunConfig, plan: Plan, hardware: Hardware, layer: LayerSeconds) -> float:
    """Seconds that a layer waits while its input is copied to the host's memory and back, beside the layer's own work;
    0 where the rate is unknown."""
    if not config.remat_policy.offloads_inputs or hardware.host is None:
        return 0.0
    copy = stream_bytes(config, plan) / hardware.host
    return max(0.0, copy - layer.forward) + max(0.0, copy - layer.backward)


def _seconds_of_state(config: RunConfig, plan: Plan, hardware: Hardware) -> float:
    """Seconds that updates of offloaded state wait for copies, which nothing hides, because they need the norm; 0 where
    the rate is unknown.  On the devices, masters and moments come and go at the same time; on the host, whose own work
    and disk are not counted, gradients come before weights go."""
    copied = memory.copied_by_hosts(config, plan)
    if not copied or hardware.host is None:
        return 0.0
    at_once = config.optim.offload_update == "device"
    return (max if at_once else sum)(copied.values()) / hardware.host


def combine(
    plan: Plan,
    hardware: Hardware,
    compute: Compute,
    rows: list[ExpectedCollective],
    hidden: Callable[[list[float]], Iterable[float]],
    bubble: float,
    *,
    one_adapter: bool = False,
) -> StepTime:
    """A step of these parts.

    hidden: maps the seconds of each row of collectives to those that nothing waits for.
    bubble: share of a stage's work.
    one_adapter: whether a ring crosses hosts over one adapter, however many of a host's devices it has."""
    groups = {axes: _group(plan, axes, hardware) for axes in dict.fromkeys(row.axes for row in rows)}
    seconds_of = [_seconds_on_links(row, groups[row.axes], hardware, one_adapter) for row in rows]
    collectives = tuple(
        CollectiveTime(row, "network" if groups[row.axes].domains > 1 else "link", seconds, seconds - not_waited)
        for row, seconds, not_waited in zip(rows, seconds_of, hidden(seconds_of), strict=True)
    )
    waited = sum(time.exposed_seconds for time in collectives if time.row.part in ("blocks", "messages"))
    return StepTime(
        compute=compute.layers + compute.rest,
        exposed=sum(time.exposed_seconds for time in collectives),
        bubble=bubble * (compute.layers + waited),
        optimizer=compute.optimizer,
        collectives=collectives,
    )


def step_range(parts: dict[str, float], software: Software) -> dict[str, list[float]]:
    """Seconds of a step of these parts if compute reached the most, and the least, of the hardware's rate that
    published runs reached."""
    computing = parts["compute"] + parts["bubble"]
    others = sum(parts.values()) - computing
    seconds = [computing * software.share / each + others for each in software.shares]
    return {"software": [*software.shares], "step_seconds": seconds}


def _accumulation_seconds(config: RunConfig, plan: Plan, kernels: Kernels) -> float:
    """Seconds to add each microbatch's gradients to their sum, float32 or wider; 0 for one microbatch and stage."""
    microbatches, p = config.parallel.microbatches, config.precision
    if microbatches == 1 and plan.layout.pipe == 1:
        return 0.0
    elements = plan.elements_per_device(gathered=not plan.zero.scatters_in_backward, trained=True)
    bytes_ = dtype_bytes(p.compute) + 2 * dtype_bytes(at_least_float32(p.compute))
    return microbatches * kernels.traffic(elements * bytes_)


class _Group(NamedTuple):
    """Number of devices in a collective's group, and of the fast-link domains that they span."""

    devices: int
    domains: int


def _group(plan: Plan, axes: tuple[str, ...], hardware: Hardware) -> _Group:
    devices = math.prod(plan.sizes[axis] for axis in axes)
    return _Group(devices, devices // devices_within_domain(plan.mesh, axes, hardware.devices_per_host))


def _seconds_on_links(row: ExpectedCollective, group: _Group, hardware: Hardware, one_adapter: bool) -> float:
    """Seconds of all collectives of a row, with nothing hidden."""
    links = hardware.links
    assert links
    devices, domains = group
    bandwidth = links.bandwidth(row.kind, devices, domains, 1 if one_adapter else devices // domains)
    return row.bytes / bandwidth + row.count * links.delay(row.kind, devices, domains)


def _hidden(
    config: RunConfig, plan: Plan, rows: list[ExpectedCollective], seconds_of: list[float], compute: float
) -> list[float]:
    """Seconds of each row that the compute left over from earlier rows hides, where prefetch, the schedule or a
    collective matmul overlaps them.  Nothing hides a secondary copy's gathers, at the start of the step."""
    beside = {
        "messages": config.parallel.schedule != "breadth_first",
        "weights": bool(plan.prefetch) or plan.prefetch_chunks,
        "gradients": bool(plan.prefetch) and plan.zero.scatter_per == "layer",
    }
    hidden = []
    for row, seconds in zip(rows, seconds_of, strict=True):
        in_parts = row.part == "blocks" and row.kind == COLLECTIVE_PERMUTE
        at_start = row.part == "weights" and plan.ring_of_hosts in row.axes
        is_hidden = in_parts or (beside.get(row.part) and not at_start)
        hidden.append(min(seconds, compute) if is_hidden else 0.0)
        compute -= hidden[-1]
    return hidden


def _optimizer_seconds(config: RunConfig, plan: Plan, kernels: Kernels) -> float:
    """Seconds of the update's memory traffic: it reads and writes weights and moments, reads gradients for their norm
    and for the update, and writes the copy in the compute dtype."""
    p = config.precision
    state = 2 * (dtype_bytes(p.params) + bytes_of_moments(config.optim, p.params))
    per_parameter = state + 2 * dtype_bytes(p.reduce) + dtype_bytes(p.compute)
    return kernels.traffic(per_parameter * plan.elements_per_device(trained=True))
