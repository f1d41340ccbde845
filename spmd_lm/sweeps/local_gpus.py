"""Assigns a machine's GPUs to the jobs of a sweep: one or more to each job, or, if jobs outnumber GPUs, one to several
jobs."""

import os
import re
from typing import NamedTuple

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.formatting import pluralize
from spmd_lm.runtime.gpu_memory import ALLOCATED_BY_DEFAULT, ALLOCATOR, FRACTION, NEW_FRACTION, UNLIMITED

LEAST_PERCENT = 2  # a job's part of GPU memory; CUDA itself takes about as much on a small GPU
NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # an index, or a UUID or its prefix, as CUDA accepts


class GpuShare(NamedTuple):
    gpus: list[list[str]]  # for each job, as in CUDA_VISIBLE_DEVICES
    environment: dict[str, str]  # variables for all jobs
    line: str  # for the user; '' if one job has all GPUs


def share_gpus(devices: int, jobs: int) -> GpuShare:
    """Shares the `devices` GPUs that jax finds.  Raises ConfigError if jobs would differ, or GPUs have no names."""
    names = gpu_names(devices)
    what = f"--jobs {jobs} on {pluralize(devices, 'GPU')}"
    if devices % jobs == 0:
        size = devices // jobs
        gpus = [names[job * size : (job + 1) * size] for job in range(jobs)]
        own = f"{', '.join(map(','.join, gpus[:-1]))} and {','.join(gpus[-1])}"
        return GpuShare(gpus, {}, f"{what}: {size} each, {own} of CUDA_VISIBLE_DEVICES" if jobs > 1 else "")
    if jobs % devices:
        divisors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise ConfigError(f"{what}: they would not be alike. Choose {divisors} or a multiple of {devices}.")
    each, environment, memory = jobs // devices, dict[str, str](), ""
    if not caller_limits_memory():
        # By default the first job would allocate most of the memory, and leave too little.
        if (percent := int(ALLOCATED_BY_DEFAULT * 100 / each)) < LEAST_PERCENT:
            raise ConfigError(f"{what}: {percent}% of a GPU's memory is too little for a job. Choose fewer.")
        environment = {FRACTION: f"{percent / 100:.2f}"}
        memory = f", with {percent}% of its memory ({FRACTION}={environment[FRACTION]})"
    shared = f"{each} jobs share {'each' if devices > 1 else 'it'}{memory}"
    line = f"{what}: {shared}. Their speeds are not those of a GPU of one's own."
    return GpuShare([[names[job % devices]] for job in range(jobs)], environment, line)


def caller_limits_memory() -> bool:
    """True if the environment limits a process's share of GPU memory, as jax reads it."""
    takes_it_as_needed = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    has_no_limit = os.environ.get(ALLOCATOR, "").lower() in UNLIMITED
    return takes_it_as_needed or has_no_limit or any(map(os.environ.get, (FRACTION, NEW_FRACTION)))


def gpu_names(devices: int) -> list[str]:
    """Names of jax's GPUs for CUDA_VISIBLE_DEVICES, which CUDA reads up to the first invalid entry.  Raises ConfigError
    if environment variables select GPUs in another way."""
    own = os.environ.get("JAX_CUDA_VISIBLE_DEVICES", "all")
    if own != "all":
        raise ConfigError(
            f"JAX_CUDA_VISIBLE_DEVICES={own}: a sweep divides the GPUs that CUDA shows. Use CUDA_VISIBLE_DEVICES."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(devices)]
    names = [name.strip() for name in visible.split(",")][:devices]
    if len(names) < devices or not all(map(NAME.fullmatch, names)):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={visible!r} does not name the {pluralize(devices, 'GPU')} that jax finds. Name "
            "them by index or UUID, as in 0,1 or GPU-8932f937,GPU-5a3b2c1d."
        )
    return names
