"""`spmd-lm bench --calibrate`: measures the figures of cost_model/hardware.yaml on these devices, and writes a row of
such a table.

All devices work at the same time, as in a step: simulated ones each have a part of the CPU.  Times are the best of
several, because other programs only ever lengthen them.  A rate is the difference between two programs with different
numbers of kernels in a row.  The result reuses the first array's memory, so nothing is copied, and accelerators run no
loop, whose counters are kernels too.  XLA:GPU runs such kernels in a CUDA graph, as in a step."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.cost_model.hardware import GIB, GIGA, MICRO, RATES, TERA, Hardware, find_hardware
from spmd_lm.cost_model.wire import ALL_GATHER, wire_bytes
from spmd_lm.errors import ConfigError
from spmd_lm.files import write_atomically
from spmd_lm.runtime.gpu_memory import ALLOCATOR, allocated_share, gpu_memory

MEASURED = "# Measured"  # first words of a table that another calibration may replace
REPEATS = 7
LARGER_ON_ACCELERATORS = 16  # times the arrays of a CPU

ELEMENTS = 2**23  # in an array larger than any cache
FEW, MANY = 1, 9  # passes over such an array
FEW_KERNELS, MANY_KERNELS = 64, 320
FEW_PAIRS, MANY_PAIRS = 1, 5  # of matmuls
AXIS = "devices"
ATTENTION = 0.5  # share of the matmul rate, in one kernel: an assumption, as in the published table
INNER = (32, 64, 128, 256, 512)  # inner dimensions of matmuls; scaled up on accelerators

Body = Callable[..., Array]


def in_a_row(operation: Callable[[Array], Array], times: int, platform: str) -> Body:
    """`times` dependent kernels that XLA does not fuse: separated by barriers, or, on a CPU, where XLA may drop these
    (jax 0.10.2), in a loop, whose counter is no kernel there."""

    def body(x: Array) -> Array:
        if platform == "cpu":
            return lax.fori_loop(0, times, lambda _, y: operation(y), x)
        for _ in range(times):
            x = lax.optimization_barrier(operation(x))
        return x

    return body


def products(times: int) -> Body:
    """Dependent pairs of matmuls: of a matrix with another and with its transpose."""

    def body(left: Array, right: Array) -> Array:
        for _ in range(times):
            left = (left @ right) @ right.T
        return left

    return body


def gather(x: Array) -> Array:
    return lax.all_gather(x, AXIS, tiled=True)


class Calibration:
    """Times operations on arrays of `dtype` on these devices, by default all of this job."""

    def __init__(self, dtype: str, devices: list[Any] | None = None):
        self.devices, self.dtype = devices or jax.devices(), jnp.dtype(dtype)
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.sharding = NamedSharding(self.mesh, P(AXIS))
        self.platform = self.devices[0].platform
        self.scale = 1 if self.platform == "cpu" else LARGER_ON_ACCELERATORS

    def compiled(self, body: Body, *shapes: tuple[int, ...], in_place: bool = True) -> jax.stages.Compiled:
        """`body` on every device, with arrays of these shapes on each.  in_place: the result reuses the first one's
        memory."""
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
        arrays = [
            jax.ShapeDtypeStruct(self._global_shape(shape), self.dtype, sharding=self.sharding) for shape in shapes
        ]
        return jax.jit(mapped, donate_argnums=0 if in_place else ()).lower(*arrays).compile()

    def seconds(self, bodies: Sequence[Body], *shapes: tuple[int, ...], in_place: bool = True) -> list[float]:
        """Least seconds of each program on every device, in turns, with random arrays of these shapes: a GPU
        multiplies matrices of ones faster."""
        programs = [self.compiled(body, *shapes, in_place=in_place) for body in bodies]
        first, *rest = (self.random_array(shape) for shape in shapes)
        inputs = jnp.copy(first)
        times: list[list[float]] = [[] for _ in programs]
        for _ in range(1 + REPEATS):  # once to warm up
            for program, taken in zip(programs, times, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(program(inputs, *rest))
                taken.append(time.perf_counter() - start)
                # Not the result: products of products overflow in float16.
                inputs = jax.block_until_ready(jnp.copy(first)) if in_place else first
        return [min(taken[1:]) for taken in times]

    def _global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.devices) * shape[0], *shape[1:])

    def random_array(self, shape: tuple[int, ...]) -> Array:
        """Normal numbers of variance 1 / the last dimension, so that repeated products neither grow nor vanish."""
        make = jax.jit(
            lambda key: jax.random.normal(key, self._global_shape(shape), self.dtype) / shape[-1] ** 0.5,
            out_shardings=self.sharding,
        )
        return make(jax.random.key(0))

    def small_kernels(self, times: int) -> Body:
        """Kernels on tiny arrays."""
        return in_a_row(lax.sin, times, self.platform)

    def passes(self, times: int) -> Body:
        """Passes over an array, each a kernel that reads and writes all of it."""
        return in_a_row(lax.neg, times, self.platform)

    def kernel_overhead(self) -> float:
        """Seconds of a kernel among many in one compiled program."""
        few, many = self.seconds([self.small_kernels(n) for n in (FEW_KERNELS, MANY_KERNELS)], (8,))
        return max(many - few, 1e-9) / (MANY_KERNELS - FEW_KERNELS)

    def memory_bandwidth(self) -> float:
        """Bytes per second of reading and writing arrays larger than any cache."""
        elements = ELEMENTS * self.scale
        few, many = self.seconds([self.passes(n) for n in (FEW, MANY)], (elements,))
        return (MANY - FEW) * 2 * elements * self.dtype.itemsize / max(many - few, 1e-9)

    def products(self) -> tuple[float, float]:
        """(FLOP/s of a large matmul, inner dimension that reaches half of that), by a linear fit of seconds per FLOP to
        1 / inner."""
        rows, pairs = 512 * self.scale, [products(n) for n in (FEW_PAIRS, MANY_PAIRS)]
        per_flop = []
        for inner in (n * self.scale for n in INNER):
            few, many = self.seconds(pairs, (rows, inner), (inner, rows))
            per_flop.append((many - few) / ((MANY_PAIRS - FEW_PAIRS) * 2 * 2 * rows * rows * inner))
        slope, least = np.polyfit([1 / (n * self.scale) for n in INNER], per_flop, 1)
        least = max(float(least), 0.5 * min(per_flop))
        return 1 / least, max(0.0, float(slope)) / least

    def links(self) -> tuple[float, float]:
        """(bytes per second sent by a device, seconds to start a collective), by all-gathers of two sizes."""
        n = len(self.devices)
        if n == 1:
            return 1e12, 0.0
        sizes = (64, 2**18 * self.scale)
        small, large = (self.seconds([gather], (size,), in_place=False)[0] for size in sizes)
        sent = wire_bytes(ALL_GATHER, n * sizes[1] * self.dtype.itemsize, n)
        return sent / max(large - small, 1e-9), small


def allocated(device: Any) -> int | None:
    """Most bytes that jax allocates on an accelerator, on a GPU a share of its memory; None if jax sets or reports no
    limit."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_size(devices: list[Any]) -> float:
    """Bytes of memory of one device.  Raises ConfigError for a GPU of unknown size."""
    device, limit, known = devices[0], allocated(devices[0]), find_hardware(devices[0].device_kind)
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    if device.platform == "gpu":
        if total := gpu_memory(device.local_hardware_id):
            return total
        share = allocated_share().value
        if limit and share < 1:
            return limit / share
    elif limit:
        return limit
    if known and known.memory:
        return known.memory.size
    raise ConfigError(
        f"--calibrate: neither jax nor CUDA's driver (libcuda.so.1) tells how much memory {device.device_kind} has. "
        f"Unset {ALLOCATOR}, so that jax limits what it allocates."
    )


def calibrate(dtype: str) -> dict[str, Any]:
    """A row of hardware.yaml, for all devices of this process.  dtype: of matmuls and arrays."""
    here = Calibration(dtype)
    device, known = here.devices[0], find_hardware(here.devices[0].device_kind)
    size, limit = memory_size(here.devices), allocated(device)
    rate, half_inner = here.products()
    bandwidth = here.memory_bandwidth()
    link, start = here.links()
    where = f"{len(here.devices)} devices, jax {jax.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    allocates = f"; jax allocated {limit / GIB:.1f} GiB of each at most" if limit and limit < size else ""
    peak = dict.fromkeys(("bfloat16", "float16", dtype), rate / TERA)
    if known:  # eight bits are as much faster as published
        peak |= {name: rate / TERA * known.rate(name, dtype) for name in RATES.values() if name in known.peaks}
    row = {
        "device_kind": device.device_kind.lower(),
        "peak": peak,
        "source": f"bench --calibrate on {where}{allocates}",
        "efficiency": 1.0,
        "memory": {"size": size / GIB, "bandwidth": bandwidth / GIGA, "share": 1.0},
        "cores": 1,
        "products": {"limit": 1.0, "half_inner": half_inner, "attention": ATTENTION, "tile": [1, 1]},
        "kernel_overhead": here.kernel_overhead() / MICRO,
        "link": link / GIGA,
        "latency": {"start": start / MICRO, "link": 0.0, "network": 0.0},
    }
    row |= {"closes_at": known.links.closes_at} if known and known.links else {}
    row |= {"host": known.host / GIGA} if known and known.host else {}
    return row | ({"compiled": of_measured(known, rate, bandwidth)} if known and known.compiled else {})


def of_measured(known: Hardware, rate: float, bandwidth: float) -> dict[str, float]:
    """The published table's rates of kernels in compiled steps, as shares of the measured rates."""
    assert known.compiled and known.memory
    reached, of_peak = known.compiled, known.peak_flops / rate
    shares = (
        reached.products * of_peak,
        reached.attention * of_peak,
        reached.fused * known.memory.bandwidth / bandwidth,
    )
    return dict(zip(reached._fields, (min(1.0, share) for share in shares), strict=True))


def write_row(row: dict[str, Any], path: Path) -> None:
    """Writes a table of one row.  Raises ConfigError if the file cannot be written."""
    table = yaml.safe_dump([row], sort_keys=False)
    try:
        write_atomically(path, f"{MEASURED}; the keys are those of cost_model/hardware.yaml.\n{table}")
    except OSError as error:
        raise ConfigError(f"--calibrate {path}: cannot be written: {error.strerror}. Choose another file.") from error


def render(row: dict[str, Any]) -> str:
    products, memory, latency = row["products"], row["memory"], row["latency"]
    rate = row["peak"]["bfloat16"]
    return "\n".join(
        (
            f"products {1000 * rate:,.4g} GFLOP/s a device; half at an inner dimension of {products['half_inner']:.0f}",
            f"memory   {memory['bandwidth']:,.4g} GB/s, {memory['size']:.1f} GiB",
            f"kernels  {row['kernel_overhead']:.3g} us each",
            f"links    {row['link']:,.4g} GB/s, {latency['start']:.4g} us to start a collective",
        )
    )
