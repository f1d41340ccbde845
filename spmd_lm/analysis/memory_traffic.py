"""Bytes that each kernel of a compiled step reads from and writes to device memory, and the seconds that it takes.

Cache hits are unknown: bytes are those that a kernel requests.  A kernel takes as long as its FLOPs or its bytes need,
whichever is more, and a fixed overhead."""

import math
import operator
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from spmd_lm.analysis.control_flow import Shares, kernels
from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.analysis.instruction_costs import ATTENTION, COLLECTIVE_KERNELS, OTHERS, InstructionCosts, Traffic

LEAST_LISTED = 1e-3  # share of all bytes of a kernel that is listed


class KernelSpeeds(NamedTuple):
    """Rates per second.

    flops: FLOPs of matmuls.  attention: FLOPs of fused attention.  memory_bandwidth: bytes.  fused: most bytes of
    kernels of kind OTHERS.  overhead: extra seconds of each kernel, not a rate."""

    flops: float
    memory_bandwidth: float
    attention: float = math.inf
    fused: float = math.inf
    overhead: float = 0.0

    def seconds(self, costs: InstructionCosts, computation: str, i: Instruction) -> float:
        """Seconds of an instruction of `computation`: 0 if no kernel, or a collective without a matmul."""
        traffic, kind = costs.traffic(computation, i), costs.kind(computation, i)
        flops = costs.flops(computation, i) / self.flops
        if not sum(traffic) or (kind == COLLECTIVE_KERNELS and not flops):
            return flops
        if kind == ATTENTION:
            flops = costs.attention_flops(computation, i) / self.attention
        bandwidth = min(self.memory_bandwidth, self.fused) if kind == OTHERS else self.memory_bandwidth
        return max(flops, sum(traffic) / bandwidth) + self.overhead


def memory_traffic(module: HloModule, speeds: KernelSpeeds, shares: Shares | None = None) -> dict[str, Any]:
    """Traffic of one device in one step, the mean over pipeline stages: {bytes, seconds, kinds: [{kind, kernels, read,
    written, bytes, seconds}], kernels: [{name, kind, source, scope, count, read, written, bytes, seconds}]}, the
    largest first.  Total `seconds` are the slowest stage's; `read` and `written` of a kernel are per run.

    A branch without a share counts as always taken.  Kernels of one source line and equal bytes are one row."""
    costs = InstructionCosts(module)
    # The first of equal kernels, and (runs, seconds) of all: float [2, stages].
    rows: dict[tuple[str, str, Traffic], tuple[Instruction, np.ndarray]] = {}
    for computation, i, counts in kernels(module, shares or {}):
        if sum(traffic := costs.traffic(computation, i)):
            key = costs.kind(computation, i), _source(module, costs, i), traffic
            first, totals = rows.get(key, (i, 0.0))
            rows[key] = first, totals + np.outer((1, speeds.seconds(costs, computation, i)), counts)
    listed: list[dict[str, Any]] = []
    kinds = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for (kind, source, traffic), (first, totals) in rows.items():
        count, seconds = totals.mean(axis=1).tolist()
        amounts = {"bytes": count * sum(traffic), "seconds": seconds}
        named = {"name": first.name, "kind": kind, "source": source, "scope": first.scope, "count": count}
        listed.append(named | traffic._asdict() | amounts)
        in_all = {"read": count * traffic.read, "written": count * traffic.written}
        for name, amount in ({"kernels": count} | in_all | amounts).items():
            kinds[kind][name] += amount
    size = operator.itemgetter("bytes")
    total = sum(map(size, kinds.values()))
    by_kind: list[dict[str, Any]] = [{"kind": kind} | amounts for kind, amounts in kinds.items()]
    return {
        "bytes": total,
        "seconds": float(max(sum((totals[1] for _, totals in rows.values()), start=np.zeros(1)))),
        "kinds": sorted(by_kind, key=size, reverse=True),
        "kernels": sorted((row for row in listed if row["bytes"] >= LEAST_LISTED * total), key=size, reverse=True),
    }


def _source(module: HloModule, costs: InstructionCosts, i: Instruction) -> str:
    """FILE:LINE of a kernel, or of the last instruction in it that has one; '' if the compiler added all."""
    within = costs.within(i.callee) if i.callee else []
    return next(filter(None, map(module.source, (i, *reversed(within)))), "")
