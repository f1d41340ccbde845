"""`spmd-lm bench --calibrate`: measures what cost_model/hardware.yaml has of published hardware, on the devices that
are here, and writes a row of such a table.

All devices work at the same time, as in a step: simulated ones share the CPU, and each has its part of it.  Times are
the best of several, because other programs only ever lengthen them."""

import os
import time
from collections.abc import Callable
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

from spmd_lm.cost_model.hardware import GIB, GIGA, MICRO, TERA, find_hardware
from spmd_lm.cost_model.wire import ALL_GATHER, wire_bytes
from spmd_lm.errors import ConfigError
from spmd_lm.files import write_atomically

MEASURED = "# Measured"  # how a table begins, which another calibration may replace
REPEATS = 7
LARGER_ON_ACCELERATORS = 16
"""Arrays there than on a CPU."""

ELEMENTS = 2**23  # of an array that no cache holds
CHAIN = 64  # operations of which one needs the other's result
AXIS = "devices"
ATTENTION = 0.5  # of the rate of products, in one kernel: an assumption, as the published table has it
INNER = (32, 64, 128, 256, 512)
"""Inner dimensions of the products, times what an accelerator has more."""


class Calibration:
    """The devices of this process, and how arrays of `dtype` are timed on all of them."""

    def __init__(self, dtype: str):
        self.devices, self.dtype = jax.devices(), jnp.dtype(dtype)
        self.mesh = Mesh(np.array(self.devices), (AXIS,))
        self.scale = 1 if self.devices[0].platform == "cpu" else LARGER_ON_ACCELERATORS

    def seconds(self, body: Callable[..., Array], *shapes: tuple[int, ...]) -> float:
        """Of `body` on every device, with arrays of these shapes on each."""
        run = jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
        sharding, n = NamedSharding(self.mesh, P(AXIS)), len(self.devices)
        arrays = [jax.device_put(np.ones((n * shape[0], *shape[1:]), self.dtype), sharding) for shape in shapes]
        jax.block_until_ready(run(*arrays))
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            times.append(time.perf_counter() - start)
        return min(times)

    def kernel_overhead(self) -> float:
        """Seconds of an operation on next to nothing, in a chain of them."""
        chained = self.seconds(lambda x: lax.fori_loop(0, 16 * CHAIN, lambda _, y: lax.sin(y), x), (8,))
        return chained / (16 * CHAIN)

    def memory_bandwidth(self) -> float:
        """Bytes per second of reading and writing arrays that no cache holds."""
        elements = ELEMENTS * self.scale
        one, several = (
            self.seconds(lambda x, n=n: lax.fori_loop(0, n, lambda _, y: y * 0.5 + 1.0, x), (elements,)) for n in (1, 5)
        )
        return 4 * 2 * elements * self.dtype.itemsize / max(several - one, 1e-9)

    def products(self) -> tuple[float, float]:
        """(FLOP/s of a large product, the inner dimension at which half of that is reached): seconds per FLOP grow with
        1 / inner, to which a line is fitted.  What starting a program takes is taken off."""
        rows = 512 * self.scale
        per_flop = []
        for inner in (n * self.scale for n in INNER):
            one, several = (self.seconds(_chained_products(n), (rows, inner), (inner, rows)) for n in (1, 5))
            per_flop.append((several - one) / (4 * 2 * 2 * rows * rows * inner))
        slope, least = np.polyfit([1 / (n * self.scale) for n in INNER], per_flop, 1)
        least = max(float(least), 0.5 * min(per_flop))
        return 1 / least, max(0.0, float(slope)) / least

    def links(self) -> tuple[float, float]:
        """(bytes per second that a device sends, seconds to start a collective), by gathers of two sizes."""
        n = len(self.devices)
        if n == 1:
            return 1e12, 0.0
        sizes = (64, 2**18 * self.scale)
        small, large = (self.seconds(lambda x: lax.all_gather(x, AXIS, tiled=True), (size,)) for size in sizes)
        sent = wire_bytes(ALL_GATHER, n * sizes[1] * self.dtype.itemsize, n)
        return sent / max(large - small, 1e-9), small

    def memory_size(self) -> float:
        """Bytes of one device."""
        stats = self.devices[0].memory_stats() or {}
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return stats.get("bytes_limit", host / len(self.devices))


def _chained_products(times: int) -> Callable[[Array, Array], Array]:
    """Of a matrix by another and by its transpose, so many times: a product needs the one before it."""

    def chained(left: Array, right: Array) -> Array:
        return lax.fori_loop(0, times, lambda _, x: (x @ right) @ right.T * jnp.asarray(1e-6, x.dtype), left)

    return chained


def calibrate(dtype: str) -> dict[str, Any]:
    """A row of hardware.yaml, for all devices of this process.  dtype: of products and elements."""
    here = Calibration(dtype)
    device = here.devices[0]
    rate, half_inner = here.products()
    link, start = here.links()
    where = f"{len(here.devices)} devices, jax {jax.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    row = {
        "device_kind": device.device_kind.lower(),
        "peak": dict.fromkeys(("bfloat16", "float16", dtype), rate / TERA),
        "source": f"bench --calibrate on {where}",
        "efficiency": 1.0,
        "memory": {"size": here.memory_size() / GIB, "bandwidth": here.memory_bandwidth() / GIGA, "share": 1.0},
        "cores": 1,
        "products": {"limit": 1.0, "half_inner": half_inner, "attention": ATTENTION, "tile": [1, 1]},
        "kernel_overhead": here.kernel_overhead() / MICRO,
        "link": link / GIGA,
        "latency": {"start": start / MICRO, "link": 0.0, "network": 0.0},
    }
    known = find_hardware(device.device_kind)
    return row | ({"closes_at": known.links.closes_at} if known and known.links else {})


def write_row(row: dict[str, Any], path: Path) -> None:
    """As a table of one row.  Raises ConfigError if the file cannot be written."""
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
