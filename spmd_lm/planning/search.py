"""`spmd-lm plan --search`: every legal layout of a run on some hardware, costed without compiling.

A layout is a degree for each axis of the mesh, sequence, zero, schedule, chunks, microbatches, reduce_once and remat.
Choices without effect appear once: ZeRO where its axes have one device, sequence parallelism where `model` has one;
`context` divides long rows alone.
If none fits, the search goes on with layouts that use the hosts' memory.  Each gets memory (cost_model/memory.py),
bytes sent (cost_model/expected_collectives.py) and time (cost_model/step_time.py)."""

import dataclasses
import inspect
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

from spmd_lm.analysis.topology import Topology
from spmd_lm.axes import BATCH_AXES, CONTEXT, DATA, EXPERT, MODEL, PIPE, REPLICA, ZERO_AXES, devices_along
from spmd_lm.config import layout_checks
from spmd_lm.config.remat import Policy
from spmd_lm.config.schema import Run, RunConfig
from spmd_lm.config.section import Section
from spmd_lm.config.suggest import divisors
from spmd_lm.config.types import Dtype
from spmd_lm.cost_model import memory
from spmd_lm.cost_model.hardware import Hardware, find_hardware, find_row, read_hardware
from spmd_lm.cost_model.step_time import OURS, SIMULATED, Software, predict_step
from spmd_lm.errors import ConfigError, HostBorderError, LayoutError
from spmd_lm.parallel.plan import Plan
from spmd_lm.planning.capacity import Capacity, capacity_of
from spmd_lm.resolve import abstract_plan, require_eight_bits

ALIKE: tuple[tuple[Policy, ...], ...] = (("none", "selective", "residual"), ("full",))
"""Remat policies that share a plan: with `full` layers run in a loop on a GPU too (config/layer_loop.py)."""
POLICIES = tuple(itertools.chain.from_iterable(ALIKE))
OFFLOADING: tuple[tuple[Policy, ...], ...] = (ALIKE[0], (*ALIKE[1], "offload"))
LARGEST_CHUNKS = 8
LEAST_OF_A_ROW = 1024
"""Tokens of a row that a device along `context` has at least, in layouts that the search proposes."""
ROOM = 0.92
"""Largest share of a device's capacity that a prediction may take; docs/planning.md has the errors of predictions."""


class Target(NamedTuple):
    """Hardware to search on."""

    topology: Topology
    hardware: Hardware
    capacity: Capacity

    @property
    def software(self) -> Software:
        return SIMULATED if self.topology.platform == "cpu" else OURS


@dataclasses.dataclass(frozen=True)
class CostedLayout:
    """A layout with its predicted step.

    memory: peak bytes of a device.
    on_host: bytes of a device in its host's memory.
    bytes: bytes that a device sends in a step.
    parts: seconds by use."""

    config: RunConfig
    target: Target
    memory: int
    on_host: int
    bytes: float
    seconds: float
    parts: dict[str, float]

    @property
    def room(self) -> float:
        """Bytes left of those that a layout may take, on a device or its host; negative if it does not fit."""
        return min(self.device_room, self.host_room)

    @property
    def device_room(self) -> float:
        return ROOM * self.target.capacity.usable - self.memory

    @property
    def host_room(self) -> float:
        """Infinite if the host's memory is unknown."""
        size = self.target.hardware.host_memory
        return math.inf if size is None else ROOM * size - self.on_host

    @property
    def remedy(self) -> str | None:
        """The setting of jax's allocator that it needs to fit, if there is one."""
        return self.target.capacity.remedy(self.memory / ROOM) if self.host_room >= 0 else None

    @property
    def overrides(self) -> dict[str, Any]:
        """Keys that the search chose."""
        p = self.config.parallel
        keys = "sequence", "zero", "schedule", "chunks", "microbatches", "reduce_once"
        memories = {"remat": self.config.remat.policy, "offload": self.config.optim.offload}
        return p.degrees | {key: getattr(p, key) for key in keys} | memories


@dataclasses.dataclass
class Search:
    """A search's result.

    layouts: all legal ones, fitting or not.
    rejected: counts by reason; `does not fit` counts legal ones."""

    targets: Sequence[Target]
    layouts: list[CostedLayout]
    rejected: Counter[str]
    seconds: float

    @property
    def fitting(self) -> list[CostedLayout]:
        return [layout for layout in self.layouts if layout.room >= 0]

    @property
    def remediable(self) -> list[CostedLayout]:
        """Layouts that fit if jax allocates more of a GPU."""
        return [layout for layout in self.layouts if layout.remedy]

    def fastest(self) -> CostedLayout:
        """The fastest layout that fits.  Raises ConfigError if none does."""
        if fastest := best_of(self.fitting):
            return fastest
        if not self.layouts:
            where = " or ".join(str(target.topology) for target in self.targets)
            why = ", ".join(f"{count:,} {reason}" for reason, count in self.rejected.items())
            raise ConfigError(
                f"no layout is legal on {where}: {why}. Search on another number of devices, or change train.batch."
            )
        closest = max(self.layouts, key=lambda layout: layout.room)
        none = f"none of {len(self.layouts):,} layouts fits: the smallest takes"
        topology, gib = closest.target.topology, 2**30
        if closest.device_room >= 0:
            share = closest.on_host + closest.host_room
            raise ConfigError(
                f"{none} {closest.on_host / gib:.1f} GiB of its host's memory for a device, whose share is "
                f"{share / gib:.1f}, on {topology}. Use optim.offload=disk, or search on more devices."
            )
        found, usable = best_of(self.remediable), closest.memory + closest.device_room
        remedy = f"Set {found.remedy}, with which {len(self.remediable):,} fit, or search" if found else "Search"
        raise ConfigError(
            f"{none} {closest.memory / gib:.1f} GiB of {usable / gib:.1f} on {topology}. {remedy} on more devices."
        )

    def pareto(self) -> list[CostedLayout]:
        """Fitting layouts that no other beats in time, memory and devices at once, the fastest first."""
        found: list[CostedLayout] = []
        for layout in sorted(self.fitting, key=speed):
            size = layout.target.topology.size
            if all(layout.memory < each.memory or size < each.target.topology.size for each in found):
                found.append(layout)
        return found


def search(config: RunConfig, targets: Sequence[Target]) -> Search:
    """Costs every layout of `config` on each target; if none fits, those with more in the hosts' memory too.  Raises
    ConfigError for a dtype of unknown speed there, for matmuls that its devices do not have, and for an optim.freeze
    that `Plan` refuses."""
    start, layouts, rejected = time.perf_counter(), list[CostedLayout](), Counter[str]()
    for target in targets:
        require_speed(config, target)
        require_eight_bits(config, target.topology.platform, target.topology.device_kind)
    for tier, policies in tiers(config):
        if any(layout.room >= 0 for layout in layouts):
            break
        try:
            for target in targets:
                layouts += costed(tier, target, policies, Counter() if layouts else rejected)
        except ConfigError:
            if not layouts:
                raise
            break  # there is nothing to offload
    for layout in layouts:
        rejected["does not fit"] += layout.room < 0
    return Search(targets, layouts, +rejected, time.perf_counter() - start)


Policies = tuple[tuple[Policy, ...], ...]
"""Remat policies, in groups that share a plan."""


def tiers(config: RunConfig) -> Iterator[tuple[RunConfig, Policies]]:
    """Configurations and remat policies to search, the fastest memories first."""
    yield config, ALIKE
    yield config, (("offload",),)
    if config.optim.offload == "none":
        optim = config.optim.model_copy(update={"offload": "host"})
        yield config.model_copy(update={"optim": optim}), OFFLOADING


def costed(config: RunConfig, target: Target, policies: Policies, rejected: Counter[str]) -> Iterator[CostedLayout]:
    """The legal layouts of `config` on a target.  Others are counted in `rejected`."""
    for variants in candidates(config, target, rejected, policies):
        try:
            plan = make_plan(variants[0], target)
        except HostBorderError:
            rejected["parallel.secondary without a border of hosts within data"] += len(variants)
            continue
        except LayoutError:
            rejected["parameters are not divisible"] += len(variants)
            continue
        yield from (cost(each, target, plan) for each in variants)


def make_plan(config: RunConfig, target: Target) -> Plan:
    """The plan of a layout.  Raises LayoutError if it does not divide the parameters, HostBorderError if a secondary
    copy needs another."""
    topology = target.topology
    return abstract_plan(config, topology.size, topology.platform, topology.device_kind, host=topology.host)


def cost(config: RunConfig, target: Target, plan: Plan) -> CostedLayout:
    step = predict_step(config, plan, target.hardware, target.software)
    sent = sum(each.row.bytes for each in step.collectives)
    on_device, on_host = sum(memory.table(config, plan).values()), memory.on_host(config, plan)
    return CostedLayout(config, target, on_device, on_host, sent, step.seconds, step.parts)


def make_targets(topologies: Iterable[Topology], table: Path | None = None) -> list[Target]:
    """One target for each distinct topology.  table: a file of bench --calibrate, whose rows precede published ones.
    Raises ConfigError for hardware of unknown speed, and if no row of `table` is for any topology."""
    distinct = list(dict.fromkeys(topologies))
    measured = read_hardware(table) if table else ()
    if table and not any(find_row(each.device_kind, measured) for each in distinct):
        rows = ", ".join(repr(row.device_kind) for row in measured)
        kinds = " or ".join(dict.fromkeys(each.device_kind.lower() for each in distinct))
        raise ConfigError(
            f"--hardware {table}: its rows are of {rows:.200}, and of no --topology. Add one whose device_kind is "
            f"{kinds}, or a beginning of it."
        )
    return [make_target(each, measured) for each in distinct]


def make_target(topology: Topology, measured: tuple[Hardware, ...] = ()) -> Target:
    """The target of a topology.  measured: rows before the table's.  Raises ConfigError for hardware of unknown speed,
    and for an environment from which jax's share of a GPU cannot be read."""
    hardware = find_hardware(topology.device_kind, measured)
    simulated = f" --devices {topology.size}" if topology.platform == "cpu" else ""
    if not hardware or not hardware.products or not hardware.links:
        raise ConfigError(
            f"--topology {topology}: its speed is not known (cost_model/hardware.yaml). Measure it there, "
            f"`spmd-lm bench CONFIG{simulated} --calibrate FILE`, and add --hardware FILE."
        )
    if hardware.links.network is None and topology.domain < topology.size:
        one = "slice" if topology.platform == "tpu" else "host"
        raise ConfigError(
            f"--topology {topology}: the speed of the network between {one}s is not known. Name one {one}."
        )
    capacity = capacity_of(hardware, topology.platform)
    assert capacity
    return Target(topology, dataclasses.replace(hardware, devices_per_host=topology.domain), capacity)


def require_speed(config: RunConfig, target: Target) -> None:
    """Raises ConfigError if this hardware's matmul rate in precision.compute is unknown."""
    dtype, hardware = config.precision.compute, target.hardware
    if not hardware.peak(dtype):
        known = " or ".join(each for each in get_args(Dtype) if hardware.peak(each))
        raise ConfigError(
            f"precision.compute={dtype}: its speed on {hardware.device_kind} (--topology {target.topology}) is not "
            f"known. Use {known}, or measure it there, `spmd-lm bench CONFIG precision.compute={dtype} --calibrate "
            "FILE`, and add --hardware FILE."
        )


def candidates(
    config: RunConfig, target: Target, rejected: Counter[str], policies: Policies = ALIKE
) -> Iterator[list[RunConfig]]:
    """Legal configurations, in lists that share a plan and differ in remat.  Others are counted in `rejected`."""
    devices = target.topology.size
    run = config.run.model_copy(update={"simulate_devices": target.topology.simulated})
    remats = [
        [config.remat.model_copy(update={"policy": policy, "block_size": None}) for policy in alike]
        for alike in policies
    ]
    number = sum(map(len, policies))
    sections: dict[str, Section] = {
        "model": config.model,
        "train": config.train,
        "objective": config.objective,
        "adapter": config.adapter,
        "precision": config.precision,
        "remat": remats[-1][-1],
        "run": Run(simulate_devices=devices),  # so that checks know how many there are
    }
    experts = math.gcd(*(moe.experts for moe in config.model.mixtures))
    parts = {EXPERT: experts or 1, CONTEXT: max(1, config.model.context // LEAST_OF_A_ROW)}
    for layout in layouts_of(devices, parts=parts):
        if target.topology.domain % layout["model"]:
            rejected["parallel.model spans hosts"] += number
            continue
        if layout["replica"] % target.topology.slices:
            rejected["only replicas can be between slices"] += number
            continue
        for choice in choices_within(config, layout, target.topology.slices):
            parallel = config.parallel.model_copy(update=layout | choice)
            if problem := first_problem(sections | {"parallel": parallel}):
                rejected[problem] += number
                continue
            update = {"run": run, "parallel": parallel}
            for alike in remats:
                legal = [remat for remat in alike if remat.policy != "offload" or layout["pipe"] == 1]
                if legal:
                    yield [config.model_copy(update=update | {"remat": remat}) for remat in legal]


def layouts_of(
    devices: int,
    axes: Sequence[str] = (PIPE, MODEL, EXPERT, CONTEXT, DATA, REPLICA),
    parts: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[dict[str, int]]:
    """Factorizations of the number of devices into a degree for each axis.  parts: numbers that the degrees of some
    axes divide."""
    first, *others = axes
    for degree in divisors(devices) if others else (devices,):
        if parts.get(first, degree) % degree:
            continue
        for rest in layouts_of(devices // degree, others, parts) if others else ({},):
            yield {first: degree, **rest}


def choices_within(config: RunConfig, layout: dict[str, int], slices: int) -> Iterator[dict[str, Any]]:
    """The other choices in all combinations, where they make a difference."""
    stages = [0] if devices_along(ZERO_AXES, layout) == 1 else [0, 1, 2, 3]
    if layout[REPLICA] > slices:  # without ZeRO replicas are data
        stages = [stage for stage in stages if stage]
    microbatches = divisors(max(1, config.train.batch // devices_along(BATCH_AXES, layout)))
    schedules = [("1f1b", 1)]
    if layout["pipe"] > 1:
        per_stage = divisors(max(1, config.model.layers // layout["pipe"]))
        several = [chunks for chunks in per_stage if 1 < chunks <= LARGEST_CHUNKS]
        schedules += [("interleaved", chunks) for chunks in several] + [("breadth_first", n) for n in (1, *several)]
    for zero, sequence, count, (schedule, chunks) in itertools.product(
        stages, (False, True) if layout["model"] > 1 else (False,), microbatches, schedules
    ):
        choice = {"zero": zero, "sequence": sequence, "microbatches": count, "schedule": schedule, "chunks": chunks}
        yield choice | {"reduce_once": False}
        if zero >= 2 and count > 1:
            yield choice | {"reduce_once": True}


REASONS: dict[Callable[..., Any], str] = {
    layout_checks.microbatches_divide_batch: "the batch is not divisible",
    layout_checks.tensor_parallel_divides: "parallel.model does not divide heads, MLP or context",
    layout_checks.tensor_parallel_divides_kv_heads: "parallel.model does not divide key/value heads",
    layout_checks.shared_layers_are_on_one_stage: "stages of shared layers",
    layout_checks.stages_divide_layers: "stages and chunks do not divide the layers",
    layout_checks.pipelines_are_manual: "sharding types in a pipeline",
    layout_checks.experts_are_divisible: "parallel.expert does not divide the experts",
    layout_checks.experts_are_manual: "sharding types with experts",
    layout_checks.context_divides_rows: "parallel.context does not divide rows",
    layout_checks.attention_reaches_over_context: "parallel.context does not suit the attention",
    layout_checks.context_divides_groups: "parallel.context does not divide the experts' groups",
    layout_checks.rings_are_in_no_branch: "a ring over parallel.context in a pipeline",
    layout_checks.context_is_manual: "sharding types with parallel.context",
    layout_checks.adapters_are_manual: "sharding types with adapters",
    layout_checks.whole_groups_are_rounded: "sharding types or codes with rounded matrices",
    layout_checks.scales_are_of_shards: "sharding types with matmuls in eight bits",
    layout_checks.microbatches_suit_chunks: "too few microbatches for the chunks",
    layout_checks.schedule_fits_a_table: "too many tasks in the schedule",
    layout_checks.layout_uses_all_devices: "the batch is not divisible",
    layout_checks.codes_are_of_zero_3: "parallel.quantize_gather or quantize_scatter without ZeRO-3",
    layout_checks.secondary_copies_are_gathered_again: "parallel.secondary without layers to gather again",
    layout_checks.prefetch_has_layers_to_gather: "parallel.prefetch=on",
    layout_checks.products_have_parts: "parallel.collective_matmul=on",
}


NEEDED = {check: tuple(inspect.signature(check).parameters) for check in REASONS}
"""The sections that each check reads."""


def first_problem(sections: dict[str, Section]) -> str:
    """The reason why a layout is not legal; '' if it is."""
    for check, reason in REASONS.items():
        if any(check(**{name: sections[name] for name in NEEDED[check]})):
            return reason
    return ""


def speed(layout: CostedLayout) -> tuple[float, int]:
    """Sort key: the fastest first, of equal ones the smallest."""
    return layout.seconds, layout.memory


def best_of(layouts: Iterable[CostedLayout]) -> CostedLayout | None:
    """The fastest, if there is any."""
    return min(layouts, key=speed, default=None)
