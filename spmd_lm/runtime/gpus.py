"""Assigns GPUs to the processes of a job, if several of a host see the same ones.

Launchers do not tell: with `--gpus-per-task=2` a task's GPUs are 0 and 1 in its own cgroup, and all tasks of a host
with two see 0 and 1 too.  UUIDs distinguish the cases."""

import ctypes
from collections import defaultdict
from collections.abc import Sequence

from spmd_lm.errors import ConfigError
from spmd_lm.runtime.gpu_memory import start_cuda


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs, or MIG devices, visible to this process, in CUDA's order; none without a driver."""
    count, device, uuid = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
    cuda = start_cuda()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []  # CUDA_VISIBLE_DEVICES names none, or the driver does not start, which jax will report
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)  # the first tells MIG devices apart
    found = []
    for number in range(count.value):
        cuda.cuDeviceGet(ctypes.byref(device), number)
        get_uuid(uuid, device)
        found.append(uuid.raw.hex())
    return found


def share(seen: Sequence[Sequence[str]]) -> list[list[int]]:
    """Indices of each process's own GPUs among those it sees; GPUs that several processes see are divided among them.
    Raises ConfigError if some would be idle, or if two processes see partly the same GPUs.
    seen: UUIDs, by process."""
    sharers = defaultdict[frozenset[str], list[int]](list)
    first_user: dict[str, int] = {}
    for process, gpus in enumerate(seen):
        sharers[frozenset(gpus)].append(process)
        for first in (first_user.setdefault(gpu, process) for gpu in gpus):
            if {*seen[first]} != {*gpus}:
                raise ConfigError(
                    f"processes {first} and {process} see {len(seen[first])} and {len(gpus)} GPUs, of which "
                    f"{len({*gpus} & {*seen[first]})} are the same. Let all tasks of a host see the same GPUs, or each "
                    "task its own (CUDA_VISIBLE_DEVICES)."
                )
    shares: list[list[int]] = [[] for _ in seen]
    for processes in sharers.values():
        gpus = seen[processes[0]]
        size, rest = divmod(len(gpus), len(processes))
        if rest:
            *most, last = (str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
            fitting = f"{', '.join(most)} or {last}" if most else last
            raise ConfigError(
                f"{len(processes)} processes, the first of them process {processes[0]}, see the same {len(gpus)} "
                f"GPU{'s' if most else ''}, and cannot share them evenly. Start {fitting} on a host."
            )
        for i, process in enumerate(processes):
            shares[process] = [seen[process].index(gpu) for gpu in gpus[i * size : (i + 1) * size]]
    return shares
