"""The share of a GPU's memory that jax allocates: three quarters, unless the environment sets another.

jaxlib reads these variables when it loads its plugin for GPUs (xla_client.generate_pjrt_gpu_plugin_options).  The
default allocator takes at most the fraction, at once or, with XLA_PYTHON_CLIENT_PREALLOCATE=false, incrementally
(CreateBFCAllocator in XLA's pjrt/gpu/gpu_helpers.cc).  "platform" and "cuda_async" have no limit: for the latter, the
fraction is what its pool keeps."""

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

from spmd_lm.errors import ConfigError

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NEW_FRACTION = "XLA_CLIENT_MEM_FRACTION"  # jaxlib's new name for it; it raises if both are set
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")
UNLIMITED = ("platform", "cuda_async")

ALLOCATED_BY_DEFAULT = 0.75
LARGE = 0.92  # leaves CUDA, cuDNN and NCCL 6 GiB of the smallest GPU whose memory hardware.yaml has


class AllocatedShare(NamedTuple):
    value: float  # largest share of a GPU's memory that jax allocates
    variable: str  # environment variable that raises it

    @property
    def larger(self) -> "AllocatedShare":
        return self._replace(value=max(self.value, LARGE))


def allocated_share(environment: Mapping[str, str] = os.environ) -> AllocatedShare:
    """The share under this environment.  Raises ConfigError for values that jaxlib refuses, or that no GPU has."""
    given = [name for name in (FRACTION, NEW_FRACTION) if environment.get(name)]
    if len(given) > 1:
        raise ConfigError(f"{FRACTION} and {NEW_FRACTION} are both set, which jax refuses. Unset one of them.")
    allocator = environment.get(ALLOCATOR, "default").lower()
    if allocator not in ALLOCATORS:
        raise ConfigError(f"{ALLOCATOR}={allocator:.40}: jax has no such allocator. Unset it, or use platform.")
    variable = given[0] if given else FRACTION
    value = _fraction(variable, environment[variable]) if given else ALLOCATED_BY_DEFAULT
    return AllocatedShare(1.0 if allocator in UNLIMITED else value, variable)


def _fraction(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value <= 1:  # false for NaN
        return value
    raise ConfigError(
        f"{variable}={text:.40}: the part of a GPU's memory that jax allocates, above 0 and at most 1. Set it to "
        f"{LARGE}, or unset it for {ALLOCATED_BY_DEFAULT}."
    )


def start_cuda() -> ctypes.CDLL | None:
    """CUDA's driver, or None."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


def gpu_memory(number: int) -> int | None:
    """Bytes of memory of a GPU, or MIG device, by its number among those visible to this process; None without a
    driver."""
    device, size, cuda = ctypes.c_int(), ctypes.c_size_t(), start_cuda()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), number):
        return None
    return None if cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) else size.value
