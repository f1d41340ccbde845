"""Exposed communication of a compiled step, on hardware whose speeds are known: modelled, not measured."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from spmd_lm.analysis.control_flow import Shares
from spmd_lm.analysis.exposed import Speeds, walk_schedule
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.cost_model.hardware import Hardware, find_hardware
from spmd_lm.cost_model.wire import ALL_GATHER, COLLECTIVE_PERMUTE
from spmd_lm.errors import OutputError
from spmd_lm.parallel.mesh import domains_along
from spmd_lm.planning.device_memory import kernel_speeds
from spmd_lm.runtime.formatting import format_bytes

LEAST_SHOWN = 0.01  # share of all seconds on wires of a row that is printed
NOT_MODELLED = (
    "latency, contention for memory and between axes, FLOPs of kernels that are not HLO, but for cuDNN's attention, "
    "asynchronous compute, stages that wait for each other"
)


def exposed_communication(
    module: HloModule, mesh: Mesh, shares: Shares | None, hardware: Hardware | None = None
) -> dict[str, Any] | None:
    """The result of `walk_schedule`, and {assumptions}, for a step on this mesh; None if the speed of device or network
    is unknown.  hardware: default the published table's."""
    hardware = hardware or find_hardware(mesh.devices.flat[0].device_kind)
    if not hardware or not hardware.links or not hardware.memory or not hardware.efficiency:
        return None
    links, sizes = hardware.links, dict(mesh.shape)
    if links.network is None and domains_along(mesh, mesh.axis_names) > 1:
        return None

    @functools.cache
    def group(axes: tuple[str, ...]) -> tuple[int, int]:
        return math.prod(sizes[axis] for axis in axes), domains_along(mesh, axes)

    def bandwidth(kind: str, axes: tuple[str, ...]) -> float:
        return links.bandwidth(kind, *group(axes))

    def is_ring(axes: tuple[str, ...]) -> bool:
        return links.is_ring(*group(axes))

    kernels = kernel_speeds(hardware)
    result = walk_schedule(module, Speeds(kernels, sizes, bandwidth, is_ring), shares)
    axes = [axis for axis, size in sizes.items() if size > 1]
    return result | {
        "assumptions": {
            "hardware": hardware.device_kind,
            "peak_flops": hardware.peak_flops,
            "efficiency": kernels.flops / hardware.peak_flops,
            "memory_bandwidth": kernels.memory_bandwidth,
            "bandwidth": {axis: bandwidth(ALL_GATHER, (axis,)) for axis in axes},
            "permute_bandwidth": {axis: bandwidth(COLLECTIVE_PERMUTE, (axis,)) for axis in axes},
            "source": hardware.source,
            "not_modelled": NOT_MODELLED,
        }
    }


def render_exposed(exposed: dict[str, Any]) -> Iterator[str]:
    """Lines of text: totals, kinds and axes, assumptions."""
    assumed, wire = exposed["assumptions"], exposed["wire_seconds"]
    waited, compute, step = (_milliseconds(exposed[f"{what}_seconds"]) for what in ("exposed", "compute", "step"))
    yield (
        f"exposed {exposed['exposed_fraction']:.1%} of the bytes: {waited} of {_milliseconds(wire)} on wires; "
        f"compute {compute}, step {step}"
    )
    for row in exposed["rows"]:
        if row["wire_seconds"] >= LEAST_SHOWN * wire:
            waited, seconds = _milliseconds(row["exposed_seconds"]), _milliseconds(row["wire_seconds"])
            axes = " x ".join(row["axes"])
            yield f"        {row['kind']} over {axes}: {waited} of {seconds}, {format_bytes(row['bytes'])}"
    speeds = "".join(
        f", {speed / 1e9:,.4g} GB/s over {axis}"
        + (f" ({one_way / 1e9:,.4g} one way)" if (one_way := assumed["permute_bandwidth"][axis]) != speed else "")
        for axis, speed in assumed["bandwidth"].items()
    )
    yield (
        f"assumes {assumed['hardware']}: {assumed['peak_flops'] / 1e12:,.4g} TFLOP/s at {assumed['efficiency']:.0%}, "
        f"memory {assumed['memory_bandwidth'] / 1e9:,.4g} GB/s{speeds}"
    )
    yield f"        of {assumed['source']}"
    yield f"        not modelled: {assumed['not_modelled']}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms"


def write_hlo(path: Path, text: str) -> None:
    """Writes a program's text.  Raises OutputError."""
    try:
        path.write_text(text)
    except OSError as error:
        raise OutputError(
            f"--hlo {path}: cannot be written: {error.strerror}. Make room, or write elsewhere."
        ) from error
