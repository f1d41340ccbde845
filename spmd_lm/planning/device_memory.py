"""Traffic of a GPU's memory in a compiled step, the least that it needs, and assumed speeds of kernels.

Traffic of GPUs alone: a TPU's compiler keeps arrays on the chip, and a CPU's caches are unknown."""

from collections.abc import Iterator
from typing import Any

from spmd_lm.analysis.control_flow import Shares
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.memory_traffic import KernelSpeeds, memory_traffic
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.hardware import Hardware, find_hardware
from spmd_lm.cost_model.least_traffic import least_traffic
from spmd_lm.cost_model.step_time import OURS
from spmd_lm.parallel.plan import Plan

MOST_PRINTED = 5  # kernels that are printed
PACKAGE = "/spmd_lm/"


def kernel_speeds(hardware: Hardware) -> KernelSpeeds:
    """Assumed speeds of kernels on a device whose speed is modelled."""
    assert hardware.memory and hardware.efficiency and hardware.products
    memory, peak = hardware.memory, hardware.peak_flops
    if hardware.device_kind.startswith("tpu"):
        return KernelSpeeds(peak * hardware.efficiency, memory.bandwidth)
    reached, overhead = hardware.compiled, hardware.kernel_overhead
    return KernelSpeeds(
        flops=peak * (reached.products if reached else hardware.efficiency),
        memory_bandwidth=memory.bandwidth * memory.share,
        attention=peak * (reached.attention if reached else hardware.products.attention),
        fused=memory.bandwidth * (reached.fused if reached else memory.share),
        overhead=OURS.kernel_overhead if overhead is None else overhead,
    )


def device_traffic(
    config: RunConfig, plan: Plan, module: HloModule, shares: Shares | None, hardware: Hardware | None = None
) -> dict[str, Any] | None:
    """The result of `memory_traffic`, and {least, assumptions}; None if not a GPU of known speed.

    least: `least_traffic`.  hardware: default the published table's."""
    hardware = hardware or find_hardware(plan.device_kind)
    if plan.platform != "gpu" or not hardware or not hardware.memory or not hardware.efficiency:
        return None
    speeds = kernel_speeds(hardware)
    found = memory_traffic(module, speeds, shares)
    assumptions = {"hardware": hardware.device_kind, "source": hardware.source} | speeds._asdict()
    return found | {"least": least_traffic(config, plan), "assumptions": assumptions}


def render_traffic(traffic: dict[str, Any]) -> Iterator[str]:
    """Lines of text: totals, kinds, the largest kernels.  In GB, the unit of memory bandwidths."""
    least, assumed = traffic["least"], traffic["assumptions"]
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in least.items())
    yield (
        f"moves   {_gigabytes(traffic['bytes'])} of device memory, read and written, in "
        f"{1e3 * traffic['seconds']:,.4g} ms of kernels"
    )
    yield f"        must move {_gigabytes(sum(least.values()))}: {parts}"
    for row in traffic["kinds"]:
        seconds = f", {1e3 * row['seconds']:,.4g} ms" if row["seconds"] else ""
        yield f"        {row['kind']}: {_gigabytes(row['bytes'])} in {row['kernels']:,.6g} kernels{seconds}"
    for row in traffic["kernels"][:MOST_PRINTED]:
        yield f"largest {_gigabytes(row['bytes'])} in {row['count']:,.6g} {row['kind']}: {row['name']}, {_made_by(row)}"
    yield (
        f"assumes {assumed['memory_bandwidth'] / 1e9:,.4g} GB/s, {assumed['fused'] / 1e9:,.4g} of fused kernels, "
        f"{assumed['flops'] / 1e12:,.4g} TFLOP/s, {assumed['attention'] / 1e12:,.4g} of attention, and "
        f"{1e6 * assumed['overhead']:.3g} us a kernel"
    )


def _made_by(row: dict[str, Any]) -> str:
    before, package, file = row["source"].rpartition(PACKAGE)
    return (package.lstrip("/") + file if before else row["source"]) or row["scope"] or "added by the compiler"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
