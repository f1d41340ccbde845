"""Memory of a device that a run may take: all of it, but on a GPU the share that jax allocates."""

from typing import NamedTuple

from spmd_lm.cost_model.hardware import Hardware
from spmd_lm.runtime.formatting import format_bytes
from spmd_lm.runtime.gpu_memory import allocated_share


class Capacity(NamedTuple):
    """Bytes of a device.

    usable: bytes that a run may take.
    larger: bytes that it may take with `setting`, an environment variable's NAME=value; '' if jax allocates no more."""

    device: float
    usable: float
    larger: float
    setting: str = ""

    def remedy(self, needed: float) -> str | None:
        """The setting, if `needed` bytes fit only with it."""
        return self.setting if self.usable < needed <= self.larger else None


def capacity_of(hardware: Hardware | None, platform: str) -> Capacity | None:
    """The capacity, None for hardware of unknown memory.  Raises ConfigError for an invalid environment variable."""
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
    """Text of a capacity, to follow "of the"."""
    if usable == device:
        return f"{format_bytes(device)} that a device has"
    return f"{format_bytes(usable)} that jax allocates of the {format_bytes(device)} of a device"
