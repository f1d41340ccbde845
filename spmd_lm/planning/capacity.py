"""Bytes of a device that a run may take: all that it has, but of a GPU what jax allocates, here as there."""

from typing import NamedTuple

from spmd_lm.cost_model.hardware import Hardware
from spmd_lm.runtime.formatting import format_bytes
from spmd_lm.runtime.gpu_memory import allocated_share


class Capacity(NamedTuple):
    """Bytes.  device: that it has.  usable: that a run may take.  larger: the same, if jax is to allocate more.
    setting: by which it does, as of an environment; '' where it cannot."""

    device: float
    usable: float
    larger: float
    setting: str = ""

    def remedy(self, needed: float) -> str | None:
        """The setting with which `needed` bytes fit, if they fit with it alone."""
        return self.setting if self.usable < needed <= self.larger else None


def capacity_of(hardware: Hardware | None, platform: str) -> Capacity | None:
    """None for hardware whose memory is not known.  Raises ConfigError for an environment that says nonsense of it."""
    if not hardware or not hardware.memory:
        return None
    size = hardware.memory.size
    if platform != "gpu":
        return Capacity(size, size, size)
    share = allocated_share()
    larger = share.larger
    setting = f"{larger.variable}={larger.value:g}" if larger.value > share.value else ""
    return Capacity(size, share.value * size, larger.value * size, setting)


def describe_capacity(usable: float, device: float) -> str:
    """Words for a capacity, to follow "of the"."""
    if usable == device:
        return f"{format_bytes(device)} that a device has"
    return f"{format_bytes(usable)} that jax allocates of the {format_bytes(device)} of a device"
