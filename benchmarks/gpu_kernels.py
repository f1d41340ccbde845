"""A profiled step's time by kind: matrix products, attention, other kernels, copies, and idle time between them."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

OTHER, IDLE = "other kernels", "idle"

# Matched in this order: Inductor names pointwise kernels after the operations that they fuse, products among them.
KINDS = {
    OTHER: r"^triton_(poi|red|per)_",
    "attention": r"flash|fmha|sdpa|attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|(^|[^a-z])(dot|(add|b)?mm|matmul)(?![a-z])",
    "copies": r"memcpy|memset|(^|[^a-z])copy",
}
COLUMNS = ("products", "attention", OTHER, "copies", IDLE)


class Kernel(NamedTuple):
    """One execution of a kernel; times in seconds."""

    name: str
    start: float
    seconds: float


def kind_of(name: str) -> str:
    """The kind of a kernel of CUDA's libraries, XLA, Inductor or PyTorch, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHER)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one kernel runs."""
    busy, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        end = kernel.start + kernel.seconds
        busy += max(0.0, end - max(kernel.start, until))
        until = max(until, end)
    return busy


def summarize(kernels: list[Kernel], steps: int) -> dict:
    """A program's report on its profile of `steps` steps: seconds per step by kernel, and idle seconds.

    Raises ValueError for a profile without kernels."""
    if not kernels:
        raise ValueError("The profile has no kernels: the profiler did not see the device.")
    by_name: dict[str, float] = {}
    for kernel in kernels:
        by_name[kernel.name] = by_name.get(kernel.name, 0.0) + kernel.seconds / steps
    window = max(k.start + k.seconds for k in kernels) - min(k.start for k in kernels)
    longest_first = sorted(by_name.items(), key=lambda item: -item[1])
    return {"kernels": dict(longest_first), IDLE: max(0.0, window - busy_seconds(kernels)) / steps}


def by_kind(profile: Mapping) -> dict[str, float]:
    """Seconds per step for each of COLUMNS."""
    seconds = dict.fromkeys(COLUMNS, 0.0)
    for name, of_kernel in profile["kernels"].items():
        seconds[kind_of(name)] += of_kernel
    return seconds | {IDLE: profile[IDLE]}
