"""How long a step takes, before anything is compiled.

A step is, one after the other: the compute of one device, kernel by kernel (work.py, kernels.py); the communication
that nothing hides; the bubble of its pipeline, (p - 1) / (v m) of what a stage does for m microbatches in v chunks
(arXiv:2104.04473, section 2.2); and the optimizer.  All stages wait for the last one, which has the head.  Batches are
loaded beside the step.  A collective takes as long as its bytes on the slowest link that it crosses, and its hops."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.activations import at_least_float32, dtype_bytes
from spmd_lm.cost_model.expected_collectives import ExpectedCollective, expected_collectives, layer_passes
from spmd_lm.cost_model.hardware import Hardware
from spmd_lm.cost_model.kernels import Kernels
from spmd_lm.cost_model.megatron_collectives import megatron_collectives
from spmd_lm.cost_model.systems import System, Window
from spmd_lm.cost_model.work import head_seconds, layer_seconds
from spmd_lm.own_optimizer import moments_per_parameter
from spmd_lm.parallel.mesh import devices_within_domain
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Plan


class CollectiveTime(NamedTuple):
    """Of all collectives of one row of theory, in one step.  link: `link`, or `network` if they cross hosts."""

    row: ExpectedCollective
    link: str
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on."""

    compute: float
    exposed: float
    bubble: float
    optimizer: float
    collectives: tuple[CollectiveTime, ...]

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.bubble + self.optimizer

    @property
    def parts(self) -> dict[str, float]:
        """`input` is what a step waits for its batch: nothing, because batches are loaded beside it."""
        spent = {name: getattr(self, name) for name in ("compute", "exposed", "bubble", "optimizer")}
        return spent | {"input": 0.0}


def predict_step(config: RunConfig, plan: Plan, hardware: Hardware, system: System) -> StepTime:
    """Of a step of `config` under `plan`, as `system` runs it."""
    overhead = system.kernel_overhead if hardware.kernel_overhead is None else hardware.kernel_overhead
    kernels = Kernels(hardware, config.precision.compute, system.software, overhead)
    microbatches = config.parallel.microbatches
    in_layers = _layers_seconds(config, plan, system, kernels)
    # All stages wait for the last one, which has the head; simulated ones do not.
    counts = schedule_counts(config.parallel.schedule, plan.layout.pipe, microbatches, config.chunks)
    heads = microbatches / plan.layout.pipe if system.idle_is_free else microbatches
    idle_is_work = config.parallel.run_idle_stages and plan.layout.pipe > 1
    compute = in_layers + (counts.ticks if idle_is_work else heads) * head_seconds(config, plan, system, kernels)
    compute += _accumulation_seconds(config, plan, system, kernels)
    rows = (megatron_collectives if system.eager else expected_collectives)(config, plan)
    groups = {axes: _group(plan, axes, hardware) for axes in dict.fromkeys(row.axes for row in rows)}
    seconds_of = [_seconds_on_links(row, groups[row.axes], hardware, system) for row in rows]
    bubble = 0.0 if system.idle_is_free or idle_is_work else counts.bubble
    windows = {"compute": compute, "last_microbatch": in_layers * (1 / microbatches + bubble)}
    hidden_by = [system.hides(row, config, plan) for row in rows]
    hidden = _hidden(rows, seconds_of, hidden_by, windows, system.hidden_tensor_parallelism)
    collectives = tuple(
        CollectiveTime(row, "network" if groups[row.axes].domains > 1 else "link", seconds, seconds - not_waited)
        for row, seconds, not_waited in zip(rows, seconds_of, hidden, strict=True)
    )
    waited = sum(time.exposed_seconds for time in collectives if time.row.part in ("blocks", "messages"))
    return StepTime(
        compute=compute,
        exposed=sum(time.exposed_seconds for time in collectives),
        bubble=bubble * (in_layers + waited),
        optimizer=_optimizer_seconds(config, plan, system, kernels),
        collectives=collectives,
    )


def step_range(parts: dict[str, float], system: System) -> dict[str, list[float]]:
    """Seconds of a step of these parts if what computes reached the most, and the least, of the hardware's rate that
    published runs did."""
    computing, shares = parts["compute"] + parts["bubble"], system.software_range
    others = sum(parts.values()) - computing
    return {"software": [*shares], "step_seconds": [computing * system.software / each + others for each in shares]}


def _layers_seconds(config: RunConfig, plan: Plan, system: System, kernels: Kernels) -> float:
    """Of one device's layers, for all microbatches, with what backward runs again."""
    layer = layer_seconds(config, plan, system, kernels)
    if system.eager:
        passes = config.model.layers / plan.layout.pipe * config.parallel.microbatches
        again = layer.repeated(RematPolicy(config.remat.policy), eager=True)
        return passes * (layer.forward + again + layer.backward)
    ahead, passes = layer_passes(config, plan)  # in a pipeline the pass ahead of backward's runs the chunk twice
    again = layer.repeated(config.remat_policy, eager=False)
    return ahead * layer.forward + passes * (layer.forward + again + layer.backward)


def _accumulation_seconds(config: RunConfig, plan: Plan, system: System, kernels: Kernels) -> float:
    """Memory traffic of adding each microbatch's gradients to their sum, in float32 or wider; eager ones are added as
    their products are written."""
    microbatches, p = config.parallel.microbatches, config.precision
    if system.eager or (microbatches == 1 and plan.layout.pipe == 1):
        return 0.0
    elements = plan.elements_per_device(gathered=not plan.zero.scatters_in_backward, trained=True)
    bytes_ = dtype_bytes(p.compute) + 2 * dtype_bytes(at_least_float32(p.compute))
    return microbatches * kernels.traffic(elements * bytes_)


class _Group(NamedTuple):
    """Devices that one collective is over, and the domains of fast links that they span."""

    devices: int
    domains: int


def _group(plan: Plan, axes: tuple[str, ...], hardware: Hardware) -> _Group:
    devices = math.prod(plan.sizes[axis] for axis in axes)
    return _Group(devices, devices // devices_within_domain(plan.mesh, axes, hardware.devices_per_host))


def _seconds_on_links(row: ExpectedCollective, group: _Group, hardware: Hardware, system: System) -> float:
    """Of all collectives of a row, with nothing hidden."""
    links = hardware.links
    assert links
    devices, domains = group
    bandwidth = links.bandwidth(row.kind, devices, domains, 1 if system.one_adapter else devices // domains)
    return row.bytes / bandwidth + row.count * links.delay(row.kind, devices, domains)


def _hidden(
    rows: list[ExpectedCollective],
    seconds_of: list[float],
    hidden_by: list[Window | None],
    windows: dict[str, float],
    in_blocks: float,
) -> Iterator[float]:
    """Seconds of each row that are hidden: a window of compute hides as many as it has.  in_blocks: share that is
    hidden of a layer's collectives over `model`."""
    left = dict(windows)
    for row, seconds, window in zip(rows, seconds_of, hidden_by, strict=True):
        if window:
            hidden = min(seconds, left[window])
            left[window] -= hidden
            yield hidden
        else:
            yield in_blocks * seconds if row.part == "blocks" else 0.0


def _optimizer_seconds(config: RunConfig, plan: Plan, system: System, kernels: Kernels) -> float:
    """Memory traffic of the update.  Ours reads and writes weights and moments, reads gradients for their norm and for
    the update, and writes the copy in the compute dtype."""
    p = config.precision
    state = 2 * (1 + moments_per_parameter(config.optim)) * dtype_bytes(p.params)
    per_parameter = system.optimizer_bytes or state + 2 * dtype_bytes(p.reduce) + dtype_bytes(p.compute)
    return kernels.traffic(per_parameter * plan.elements_per_device(trained=True))
