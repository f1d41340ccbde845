"""Bytes that each kernel of a compiled step reads from and writes to device memory, and the seconds that it takes.

What a kernel finds in a cache is not known: these are the bytes that it asks for.  A kernel takes as long as its FLOPs
or its bytes need, whichever is more, and a fixed time besides."""

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from spmd_lm.analysis.control_flow import CallPath, Shares, calls, path_to_entry
from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.analysis.instruction_costs import ATTENTION, COLLECTIVE_KERNELS, OTHERS, InstructionCosts, Traffic

LEAST_LISTED = 1e-3  # of all bytes: kernels that are listed


class KernelSpeeds(NamedTuple):
    """flops: per second, of matrix products; attention: of attention in one kernel.  memory_bandwidth: bytes per
    second; fused: of kernels that are neither products nor attention nor copies.  overhead: seconds of each kernel
    besides."""

    flops: float
    memory_bandwidth: float
    attention: float = math.inf
    fused: float = math.inf
    overhead: float = 0.0

    def seconds(self, costs: InstructionCosts, computation: str, i: Instruction) -> float:
        """Seconds of an instruction of `computation`; 0 if it is no kernel; of a collective, those of the product in
        it."""
        traffic, kind = costs.traffic(computation, i), costs.kind(computation, i)
        flops = costs.flops(computation, i) / self.flops
        if not sum(traffic) or (kind == COLLECTIVE_KERNELS and not flops):
            return flops
        if kind == ATTENTION:
            flops = costs.attention_flops(computation, i) / self.attention
        bandwidth = min(self.memory_bandwidth, self.fused) if kind == OTHERS else self.memory_bandwidth
        return max(flops, sum(traffic) / bandwidth) + self.overhead


class _Alike(NamedTuple):
    """Kernels that are alike.  counts: in a step, and seconds: of all of them, float [stages]."""

    name: str
    scope: str
    counts: np.ndarray
    seconds: np.ndarray


def memory_traffic(module: HloModule, speeds: KernelSpeeds, shares: Shares | None = None) -> dict[str, Any]:
    """Traffic of one device in one step, the mean over a pipeline's stages: {bytes, seconds, kinds: [{kind, kernels,
    read, written, bytes, seconds}], kernels: [{name, kind, source, scope, count, read, written, bytes, seconds}]}, the
    largest first.  `seconds` of all are those of the stage with the most; `read` and `written` of a kernel those of one
    run.

    A branch whose share is not known counts as if it were always taken.  Kernels of one source line that move the same
    bytes are one row."""
    shares, costs = shares or {}, InstructionCosts(module)
    rows: dict[tuple[str, str, Traffic], _Alike] = {}

    def walk(computation: str, path: CallPath) -> None:
        for i in module.computations[computation]:
            if i.opcode in ("while", "conditional", "call"):
                for callee, callee_path in calls(module, i, path, shares):
                    walk(callee, callee_path)
            elif sum(traffic := costs.traffic(computation, i)):
                key = costs.kind(computation, i), _source(module, costs, i), traffic
                seconds = path.counts * speeds.seconds(costs, computation, i)
                row = rows.get(key, _Alike(i.name, i.scope, np.zeros_like(seconds), np.zeros_like(seconds)))
                rows[key] = row._replace(counts=row.counts + path.counts, seconds=row.seconds + seconds)

    walk(module.entry, path_to_entry(shares))
    kernels: list[dict[str, Any]] = []
    kinds = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for (kind, source, traffic), row in rows.items():
        count, seconds = float(row.counts.mean()), float(row.seconds.mean())
        amounts = {"bytes": count * sum(traffic), "seconds": seconds}
        named = {"name": row.name, "kind": kind, "source": source, "scope": row.scope, "count": count}
        kernels.append(named | traffic._asdict() | amounts)
        in_all = {"read": count * traffic.read, "written": count * traffic.written}
        for name, amount in ({"kernels": count} | in_all | amounts).items():
            kinds[kind][name] += amount
    total = sum(each["bytes"] for each in kinds.values())
    by_kind: list[dict[str, Any]] = [{"kind": kind} | amounts for kind, amounts in kinds.items()]
    return {
        "bytes": total,
        "seconds": float(max(sum((row.seconds for row in rows.values()), start=np.zeros(1)))),
        "kinds": sorted(by_kind, key=_largest),
        "kernels": sorted((row for row in kernels if row["bytes"] >= LEAST_LISTED * total), key=_largest),
    }


def _largest(row: dict[str, Any]) -> float:
    return -row["bytes"]


def _source(module: HloModule, costs: InstructionCosts, i: Instruction) -> str:
    """FILE:LINE that made a kernel, or the last instruction in it that has one; '' where the compiler added all."""
    within = costs.within(i.callee) if i.callee else []
    return next(filter(None, map(module.source, (i, *reversed(within)))), "")
