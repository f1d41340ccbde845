"""How fast devices are, from one table, hardware.yaml: matrix products, memory, and the links between devices."""

import dataclasses
import functools
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm.cost_model.wire import ALL_REDUCE, COLLECTIVE_PERMUTE
from spmd_lm.errors import ConfigError
from spmd_lm.files import read_bytes

TERA, GIGA, MICRO, MIB, GIB = 1e12, 1e9, 1e-6, 2**20, 2**30
MAX_TABLE_BYTES = 2**20  # of a file of measured rows; one has a thousand


class Latency(NamedTuple):
    """Seconds: to start a collective, and for each hop over a link or over the network."""

    start: float
    link: float
    network: float


class Links(NamedTuple):
    """Bytes per second that a device sends.

    link: to one neighbour.  closes_at: length of the shortest ring that is closed on a torus, where a device sends to
    both of its neighbours at a time; 0 where all are behind one switch.  network: to other hosts, or TPU slices; None
    where no one has entered it."""

    link: float
    closes_at: int
    network: float | None
    latency: Latency

    def bandwidth(self, kind: str, devices: int, domains: int, adapters: float | None = None) -> float:
        """Of a collective over `devices` in so many domains, which are hosts of GPUs, or slices of TPUs.

        A group that spans domains crosses their network with all of its devices in each, side by side, or with as many
        as it has adapters.  A permute sends one way, and to another domain from one device alone, on which all others
        wait."""
        if domains > 1:
            assert self.network is not None
            side_by_side = 1 if kind == COLLECTIVE_PERMUTE else adapters or devices / domains
            return min(self.link, self.network * side_by_side)
        return 2 * self.link if self.is_ring(devices, domains) and kind != COLLECTIVE_PERMUTE else self.link

    def is_ring(self, devices: int, domains: int) -> bool:
        """Whether a group is closed on a torus: each way round has links of its own."""
        return domains == 1 and 0 < self.closes_at <= devices

    def delay(self, kind: str, devices: int, domains: int) -> float:
        """Seconds of a collective besides those of its bytes.

        A ring gathers or scatters in a hop to each other device, of which one a domain crosses the network, and sums
        in twice as many; a sum takes a tree where that has fewer."""
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
    """size: bytes.  bandwidth: bytes per second from and to it.  share: of these, what kernels reach."""

    size: float
    bandwidth: float
    share: float


class Products(NamedTuple):
    """The share of the peak that products of matrices reach.

    limit: of the largest.  half_inner: the inner dimension at which half of that is reached: each tile of a result
    begins and ends with work that is none.  attention: of attention in one kernel.  tile: rows and columns of a result
    that one core computes at a time.  cores: that share a device's work, and some of which have none the last time
    round."""

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
    """What kernels of a compiled step were measured to reach: of the peak, products and attention in one kernel; of the
    memory's bandwidth, kernels that a compiler fuses, which read and write in several orders at a time."""

    products: float
    attention: float
    fused: float


@dataclasses.dataclass(frozen=True, eq=False)
class Hardware:
    """One kind of device.  Compared and hashed by identity, because its dicts have no hash.

    peaks: dense FLOP/s by dtype; of float32 on a GPU tf32's.  source: where the figures come from.  efficiency: share
    of the peak that audit assumes of products.  on_chip: as hardware.yaml has it.  kernel_overhead: seconds of each
    kernel besides its work; None for the system's.  The others are None where no one has entered them."""

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

    @property
    def scratchpad(self) -> int:
        """Bytes outside of HBM in which a TPU's compiler places arrays: CMEM, which cores share, or one core's VMEM; 0
        of other hardware."""
        cores = self.products.cores if self.products else 1
        return (self.on_chip.get("cmem") or self.on_chip.get("vmem", 0) // cores) * MIB

    @property
    def peak_flops(self) -> float:
        """Of 16 bits."""
        return self.peaks.get("bfloat16") or self.peaks["float16"]

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s of products in a dtype; None where none is published.  A TPU multiplies any in bfloat16."""
        return self.peaks.get("bfloat16" if self.device_kind.startswith("tpu") and dtype != "float64" else dtype)


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
    """The row of which the kind is the longest beginning of `device_kind`; None if none is."""
    matching = [row for row in rows if device_kind.lower().startswith(row.device_kind)]
    return max(matching, key=lambda row: len(row.device_kind), default=None)  # of equal ones the first
