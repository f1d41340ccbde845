"""Speeds of devices, from one table, hardware.yaml: matmuls, memory, and links between devices."""

import dataclasses
import functools
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm.cost_model.wire import ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE
from spmd_lm.errors import ConfigError
from spmd_lm.files import read_bytes

TERA, GIGA, MICRO, GIB = 1e12, 1e9, 1e-6, 2**30
MAX_TABLE_BYTES = 2**20  # a file of measured rows has about a thousand


class Latency(NamedTuple):
    """Seconds: to start a collective, and for each hop over a link or over the network."""

    start: float
    link: float
    network: float


class Links(NamedTuple):
    """Bytes per second that a device sends.

    link: to one neighbour.
    closes_at: length of the shortest ring that is closed on a torus, where a device sends to both neighbours at a time;
    0 for devices behind one switch.
    network: to other hosts, or TPU slices; None if unknown."""

    link: float
    closes_at: int
    network: float | None
    latency: Latency

    def bandwidth(self, kind: str, devices: int, domains: int, adapters: float | None = None) -> float:
        """Bytes per second of a collective over `devices` in `domains`: hosts of GPUs, or slices of TPUs.

        A group that spans domains uses the network from all of its devices in a domain at once, or from `adapters` of
        them.  A permute sends one way, and to another domain from one device alone, for which all others wait."""
        if kind == ALL_TO_ALL:
            return self._all_to_all(devices, domains, adapters)
        if domains > 1:
            assert self.network is not None
            side_by_side = 1 if kind == COLLECTIVE_PERMUTE else adapters or devices / domains
            return min(self.link, self.network * side_by_side)
        return 2 * self.link if self.is_ring(devices, domains) and kind != COLLECTIVE_PERMUTE else self.link

    def _all_to_all(self, devices: int, domains: int, adapters: float | None) -> float:
        """Each device sends every other one a share of its own, which no device passes on but round a torus: there the
        links in the middle of a line carry what one half sends the other, and those of a ring half of that."""
        within = devices / domains
        if domains > 1:
            assert self.network is not None
            leaving = (devices - within) / (self.network * (adapters or within) / within)
            return (devices - 1) / max(leaving, (within - 1) / self.link)
        if not self.closes_at:
            return self.link
        across = (devices // 2) * (devices - devices // 2)
        return self.link * (devices - 1) / across * (2 if self.is_ring(devices, domains) else 1)

    def is_ring(self, devices: int, domains: int) -> bool:
        """True if a group is closed on a torus: each direction has its own links."""
        return domains == 1 and 0 < self.closes_at <= devices

    def delay(self, kind: str, devices: int, domains: int) -> float:
        """Seconds of a collective's latency.

        A ring gathers or scatters in one hop per other device, one per domain over the network; an all-reduce takes
        twice as long as that, or as a tree, if that is shorter."""
        start, link, network = self.latency
        if kind == COLLECTIVE_PERMUTE:
            return start + (network if domains > 1 else link)
        crossing = min(domains, devices - 1) if domains > 1 else 0
        around = (devices - 1 - crossing) * link + crossing * network
        if kind == ALL_REDUCE:
            up = math.log2(devices / domains) * link + math.log2(domains) * network
            return start + 2 * min(around, up)
        return start + around


class Memory(NamedTuple):
    """Bytes, bytes per second read and written, and the share of these that kernels reach."""

    size: float
    bandwidth: float
    share: float


class Products(NamedTuple):
    """Shares of the peak that matmuls reach.

    limit: share that the largest matmuls reach.
    half_inner: inner dimension at which half of `limit` is reached, as each tile of a result begins and ends idle.
    attention: share that fused attention reaches.
    tile: rows and columns of a result that one core computes at a time.
    cores: cores of a device; some idle in the last round."""

    limit: float
    half_inner: float
    attention: float
    tile: tuple[int, int]
    cores: int

    def share(self, rows: float, inner: float, columns: float, batch: float) -> float:
        (height, width), cores = self.tile, self.cores
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        used = batch * rows * columns / (height * width) / (cores * math.ceil(tiles / cores))
        return self.limit * used * inner / (inner + self.half_inner)


class Compiled(NamedTuple):
    """Measured shares in a compiled step: of the peak, by matmuls and fused attention; of memory bandwidth, by kernels
    that a compiler fuses, which read and write in several orders at once."""

    products: float
    attention: float
    fused: float


@dataclasses.dataclass(frozen=True, eq=False)
class Hardware:
    """One kind of device, compared and hashed by identity, because its dicts have no hash.  None is unknown.

    peaks: dense FLOP/s by dtype; for float32 on a GPU those of tf32.
    source: source of the figures.
    efficiency: share of the peak that audit assumes of matmuls, on a GPU where `compiled` is None.
    on_chip: see hardware.yaml.
    host: bytes per second from or to the host's memory.
    host_memory: a device's share of its bytes.
    kernel_overhead: seconds of each kernel besides its work; None for the software's."""

    device_kind: str
    peaks: dict[str, float]
    source: str
    efficiency: float | None = None
    memory: Memory | None = None
    links: Links | None = None
    products: Products | None = None
    devices_per_host: int = 0
    on_chip: dict[str, int] = dataclasses.field(default_factory=dict)
    kernel_overhead: float | None = None
    compiled: Compiled | None = None
    host: float | None = None
    host_memory: float | None = None

    @property
    def peak_flops(self) -> float:
        """FLOP/s in 16 bits."""
        return self.peaks.get("bfloat16") or self.peaks["float16"]

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of matmuls in a dtype; None if unpublished.  A TPU multiplies all but float64 in bfloat16."""
        return self.peaks.get("bfloat16" if self.device_kind.startswith("tpu") and dtype != "float64" else dtype)

    def rate(self, name: str, dtype: str) -> float:
        """The peak of this name over that of a dtype; 1 without a name, or where either is unknown."""
        of_dtype = self.peak(dtype)
        return self.peaks[name] / of_dtype if of_dtype and name in self.peaks else 1.0


RATES = {"fp8": "float8", "int8": "int8"}
"""Peaks by precision.matmul."""


@functools.cache
def _table() -> tuple[Hardware, ...]:
    import yaml  # here: topologies are parsed before anything slow is imported

    return tuple(map(_parse, yaml.safe_load(files("spmd_lm.cost_model").joinpath("hardware.yaml").read_text())))


def _parse(row: dict[str, Any]) -> Hardware:
    peaks = {dtype: TERA * rate for dtype, rate in row["peak"].items()}
    hardware = Hardware(row["device_kind"].strip().lower(), peaks, row["source"])
    if "link" not in row:
        return hardware
    memory, latency = row["memory"], Latency(**{name: MICRO * time for name, time in row["latency"].items()})
    network, overhead = row.get("network"), row.get("kernel_overhead")
    return dataclasses.replace(
        hardware,
        efficiency=row["efficiency"],
        memory=Memory(GIB * memory["size"], GIGA * memory["bandwidth"], memory["share"]),
        links=Links(GIGA * row["link"], row.get("closes_at", 0), None if network is None else GIGA * network, latency),
        products=Products(**row["products"], cores=row["cores"]),
        devices_per_host=row.get("devices_per_host", 0),
        on_chip=row.get("on_chip") or {},
        kernel_overhead=None if overhead is None else MICRO * overhead,
        compiled=Compiled(**row["compiled"]) if row.get("compiled") else None,
        host=GIGA * row["host"] if row.get("host") else None,
        host_memory=GIB * row["host_memory"] if row.get("host_memory") else None,
    )


def read_hardware(path: Path) -> tuple[Hardware, ...]:
    """Rows that `spmd-lm bench --calibrate` wrote.  Raises ConfigError for another file."""
    from spmd_lm.config import syntax
    from spmd_lm.cost_model.hardware_schema import problem_of

    try:
        rows, problems = syntax.read(read_bytes(path, MAX_TABLE_BYTES).decode())
    except OSError as error:
        raise ConfigError(
            f"--hardware {path}: cannot be read: {error.strerror}. Name a file of bench --calibrate."
        ) from error
    except UnicodeDecodeError:
        rows, problems = None, ["not text"]
    if not problems and not (isinstance(rows, list) and rows):
        problems = ["it has no rows"]
    for number, row in enumerate(rows if not problems else (), 1):
        if problem := problem_of(row):
            problems.append(f"row {number}, {problem}")
    if problems:
        what = f"--hardware {path}: not a table of hardware ({problems[0]})"
        raise ConfigError(f"{what}. Write one with spmd-lm bench CONFIG --calibrate FILE.")
    return tuple(map(_parse, rows))


def find_hardware(device_kind: str, measured: tuple[Hardware, ...] = ()) -> Hardware | None:
    """The row of a device, by jax's device_kind; None if the table has none.  measured: rows before the table's."""
    return find_row(device_kind, measured) or find_row(device_kind, _table())


def find_row(device_kind: str, rows: tuple[Hardware, ...]) -> Hardware | None:
    """The row whose kind is the longest prefix of `device_kind`; None if there is none."""
    matching = [row for row in rows if device_kind.lower().startswith(row.device_kind)]
    return max(matching, key=lambda row: len(row.device_kind), default=None)  # the first of equally long ones
