"""What a device can do at most: dense matrix FLOP/s as its vendor publishes them, or as measured where nobody publishes
any."""

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


def peak(device: jax.Device, dtype: str, share: int = 1) -> Peak | None:
    """The most matrix FLOP/s of `device` in `dtype`; None for an accelerator or a type without a published figure.

    share: simulated devices that share one CPU."""
    if device.platform == "cpu":
        return Peak(_measured(device, dtype) / share, f"a share of the CPU's measured matrix product in {dtype}")
    kind = device.device_kind.lower()
    known = [name for name in PEAK_BF16 if kind.startswith(name)]
    if not known or dtype == "float64":
        return None
    name = max(known, key=len)
    # float32 inputs run as bfloat16 passes by default on TPU, and as TF32, at half the rate, on GPU
    half = dtype == "float32" and device.platform == "gpu"
    return Peak(PEAK_BF16[name] / (2 if half else 1), f"{name}, published, {'tf32' if half else 'bfloat16'}")


@functools.cache
def _measured(device: jax.Device, dtype: str) -> float:
    """FLOP/s of a square product: the best of a few, because other programs only ever slow one down."""
    n = 1024
    with jax.default_device(device):
        x = jnp.ones((n, n), dtype)
        product = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b))
        product(x, x).block_until_ready()
        best = min(_seconds(lambda: product(x, x).block_until_ready()) for _ in range(5))
    return 2 * n**3 / best


def _seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
