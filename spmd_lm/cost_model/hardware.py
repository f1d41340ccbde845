"""How fast devices are, from one table, hardware.yaml: matrix products, memory, and the links between devices."""

import functools
from importlib.resources import files
from typing import NamedTuple

from spmd_lm.cost_model.wire import COLLECTIVE_PERMUTE

TERA, GIGA = 1e12, 1e9


class Links(NamedTuple):
    """Bytes per second that a device sends.

    link: to one neighbour.  closes_at: length of the shortest ring that is closed on a torus, where a device sends to
    both of its neighbours at a time; 0 where all are behind one switch.  network: to other hosts, or TPU slices; None
    where no one has entered it."""

    link: float
    closes_at: int
    network: float | None

    def bandwidth(self, kind: str, devices: int, domains: int) -> float:
        """Of a collective over `devices` in so many domains, which are hosts of GPUs, or slices of TPUs.

        A group that spans domains crosses their network with all of its devices in each, side by side.  A permute
        sends one way, and to another domain from one device alone, on which all others wait."""
        if domains > 1:
            assert self.network is not None
            side_by_side = 1 if kind == COLLECTIVE_PERMUTE else devices / domains
            return min(self.link, self.network * side_by_side)
        return 2 * self.link if self.is_ring(devices, domains) and kind != COLLECTIVE_PERMUTE else self.link

    def is_ring(self, devices: int, domains: int) -> bool:
        """Whether a group is closed on a torus: each way round has links of its own."""
        return domains == 1 and 0 < self.closes_at <= devices


class Hardware(NamedTuple):
    """One kind of device.

    peak_flops: dense bfloat16 per second.  source: where the figures come from.  The others are None where no one has
    entered them.  efficiency: share of the peak that products are assumed to reach.  memory_bandwidth: bytes per
    second of HBM."""

    device_kind: str
    peak_flops: float
    source: str
    efficiency: float | None = None
    memory_bandwidth: float | None = None
    links: Links | None = None


@functools.cache
def _table() -> tuple[Hardware, ...]:
    import yaml  # here: topologies are parsed before anything slow is imported

    return tuple(map(_parse, yaml.safe_load(files("spmd_lm.cost_model").joinpath("hardware.yaml").read_text())))


def _parse(row: dict) -> Hardware:
    hardware = Hardware(row["device_kind"], TERA * row["peak"], row["source"])
    if "link" not in row:
        return hardware
    network = GIGA * row["network"] if "network" in row else None
    links = Links(GIGA * row["link"], row.get("closes_at", 0), network)
    return hardware._replace(efficiency=row["efficiency"], memory_bandwidth=GIGA * row["memory"], links=links)


def find_hardware(device_kind: str) -> Hardware | None:
    """The row of a device, by jax's device_kind; None if the table has none."""
    matching = [row for row in _table() if device_kind.lower().startswith(row.device_kind)]
    return max(matching, key=lambda row: len(row.device_kind), default=None)
