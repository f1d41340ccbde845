"""Peak matrix FLOP/s of a device: published by its vendor, or for a CPU measured."""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp

PEAK_BF16 = {
    # jax's device_kind, in lower case: dense bfloat16 FLOP/s of one jax device (vendor data sheets)
    "tpu v4": 275e12,
    "tpu v5 lite": 197e12,
    "tpu v5": 459e12,
    "tpu v6 lite": 918e12,
    "nvidia a100": 312e12,
    "nvidia h100": 989e12,
    "nvidia h100 pcie": 756e12,
    "nvidia h100 nvl": 835e12,
    "nvidia h200": 989e12,
    "nvidia b200": 2250e12,
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """flops: per second, of one device.  source: where the figure comes from."""

    flops: float
    source: str


def peak(device: jax.Device, dtype: str, simulated_devices: int = 1) -> Peak | None:
    """The peak matrix FLOP/s of `device` in `dtype`; None where no figure is published.

    simulated_devices: how many of them share the CPU."""
    if device.platform == "cpu":
        flops = _measured_flops(device, dtype) / simulated_devices
        return Peak(flops, f"a share of the CPU's measured matrix product in {dtype}")
    kind = device.device_kind.lower()
    matching = [name for name in PEAK_BF16 if kind.startswith(name)]
    if not matching or dtype == "float64":
        return None
    name = max(matching, key=len)
    # By default float32 inputs run as bfloat16 passes on a TPU, and as TF32, at half the rate, on a GPU.
    if dtype == "float32" and device.platform == "gpu":
        return Peak(PEAK_BF16[name] / 2, f"{name}, published, tf32")
    return Peak(PEAK_BF16[name], f"{name}, published, bfloat16")


@functools.cache
def _measured_flops(device: jax.Device, dtype: str) -> float:
    """FLOP/s of a square product: the best of five, because other processes only ever slow it down."""
    n = 1024
    with jax.default_device(device):
        x = jnp.ones((n, n), dtype)
        matmul = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b))
        matmul(x, x).block_until_ready()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            matmul(x, x).block_until_ready()
            seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds)
