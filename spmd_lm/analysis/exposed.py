"""Exposed communication of a compiled step, by walking its schedule with a clock.

A device has one compute stream, which runs each computation's instructions in the order of the text, and for each mesh
axis one wire, which sends one collective at a time; groups over several axes, rare and small, have their own.  On a
ring each direction is a wire: a permute takes one, other collectives both.  A synchronous collective is exposed.  An
asynchronous one takes its wire from its start on, and the wait at its end is exposed.  A collective in a fusion is
hidden by the matmul beside it, and a chain of such fusions by all of their matmuls.

Two iterations of a loop are walked, and the second is repeated.  A branch counts as often as it runs, the mean over
pipeline stages; without a share the slowest branch counts as always taken."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from spmd_lm.analysis.compiled_collectives import (
    CollectiveInstruction,
    collectives_within,
    is_collective,
    read_collective,
)
from spmd_lm.analysis.control_flow import CallPath, Shares, calls, path_to_entry
from spmd_lm.analysis.exposed_state import State, Transfer, Wire
from spmd_lm.analysis.hlo import HloModule, Instruction
from spmd_lm.analysis.instruction_costs import InstructionCosts
from spmd_lm.analysis.memory_traffic import KernelSpeeds
from spmd_lm.analysis.starts import Starts
from spmd_lm.cost_model.wire import COLLECTIVE_PERMUTE


class Speeds(NamedTuple):
    """Speeds of a step's devices.

    kernels: speeds of one device.
    sizes: sizes of the mesh axes, outermost first.
    bandwidth: bytes per second that a device sends in a collective of a kind over axes.
    is_ring: true if each direction along these axes has its own links."""

    kernels: KernelSpeeds
    sizes: Mapping[str, int]
    bandwidth: Callable[[str, tuple[str, ...]], float]
    is_ring: Callable[[tuple[str, ...]], bool]


def walk_schedule(module: HloModule, speeds: Speeds, shares: Shares | None = None) -> dict[str, Any]:
    """Seconds of a step that its compiler scheduled: {rows: [{kind, axes, bytes, wire_seconds, exposed_seconds}],
    exposed_fraction, wire_seconds, exposed_seconds, compute_seconds, step_seconds}, the largest row first.

    bytes: bytes that a device sends.
    exposed_fraction: share of the bytes; a collective counts with the exposed share of its time.
    step_seconds: more than compute and exposed where a collective waits for its wire."""
    shares = shares or {}
    walk = _Walk(module, speeds, shares)
    walk.run(module.entry, path_to_entry(shares))
    state = walk.state
    rows: list[dict[str, Any]] = []
    for (kind, axes), amounts in state.rows.items():
        sent, seconds, waited, _ = amounts.tolist()
        rows.append({"kind": kind, "axes": [*axes], "bytes": sent, "wire_seconds": seconds, "exposed_seconds": waited})
    sent, wire_seconds, exposed_seconds, exposed_bytes = map(float, sum(state.rows.values(), start=np.zeros(4)))
    return {
        "rows": sorted(rows, key=lambda row: -row["bytes"]),
        "exposed_fraction": exposed_bytes / sent if sent else 0.0,
        "wire_seconds": wire_seconds,
        "exposed_seconds": exposed_seconds,
        "compute_seconds": state.compute,
        "step_seconds": state.clock,
    }


class _Scheduled(NamedTuple):
    """An instruction of a schedule.

    seconds: seconds of compute.
    transfers: collectives that it runs or starts.
    ended_chains: chains that end with it."""

    instruction: Instruction
    seconds: float
    transfers: tuple[Transfer, ...]
    ended_chains: frozenset[str]


class _Walk:
    def __init__(self, module: HloModule, speeds: Speeds, shares: Shares):
        self.module, self.speeds, self.shares = module, speeds, shares
        self.state, self.costs, self.starts = State(), InstructionCosts(module), Starts(module)
        self._steps_of: dict[tuple[str, str | None], list[_Scheduled]] = {}

    def run(self, computation: str, path: CallPath) -> None:
        """Moves the clock to the end of a computation on `path`."""
        for step in self._steps(computation, path):
            i, state = step.instruction, self.state
            if i.opcode == "while" and (iterations := self.module.trip_count(i)) is not None:
                self._loop(i, path, iterations)
            elif i.opcode in ("while", "conditional"):
                self._branch(i, path)
            elif i.opcode == "call":
                for callee, callee_path in calls(self.module, i, path, self.shares):
                    self.run(callee, callee_path)
            elif i.opcode.endswith("-start") and '"is_sync":true' not in i.attributes:
                state.compute_beside(step.seconds, (), frozenset())
                state.start(i.name, step.transfers)
            elif i.opcode.endswith("-done"):
                state.finish(self.starts.of(computation, i))
            else:
                state.compute_beside(step.seconds, step.transfers, step.ended_chains)

    def _loop(self, i: Instruction, path: CallPath, iterations: int) -> None:
        ((body, body_path),) = calls(self.module, i, path, self.shares)
        if iterations > 0:
            self.run(body, body_path)
        if iterations > 1:
            before = self.state.copy()
            self.run(body, body_path)
            self.state.scale_since(before, iterations - 1)

    def _branch(self, i: Instruction, path: CallPath) -> None:
        """A conditional, or a loop of at most one iteration."""
        branches = list(calls(self.module, i, path, self.shares))
        if branches[0][1].conditionals[-1] in self.shares:
            for branch, branch_path in branches:
                if total := path.counts.sum():
                    before = self.state.copy()
                    self.run(branch, branch_path)
                    self.state.scale_since(before, float(branch_path.counts.sum() / total))
            return
        before, outcomes = self.state, []
        for branch, branch_path in branches:
            self.state = before.copy()
            self.run(branch, branch_path)
            outcomes.append(self.state)
        self.state = max(outcomes, key=lambda state: state.clock)

    def _steps(self, computation: str, path: CallPath) -> list[_Scheduled]:
        """The schedule of a computation, read once for each collective that it may stand for."""
        if (key := (computation, path.fused_kind)) not in self._steps_of:
            body = self.module.computations[computation]
            transfers = [self._transfers(computation, i, path) for i in body]
            positions: dict[str, list[int]] = {}
            for position, each in enumerate(transfers):
                for transfer in each:
                    positions.setdefault(transfer.chain, []).append(position)
            firsts, lasts = ({chain: at[end] for chain, at in positions.items() if chain} for end in (0, -1))
            self._steps_of[key] = []
            for position, (i, each) in enumerate(zip(body, transfers, strict=True)):
                continues = any(t.chain and firsts[t.chain] < position < lasts[t.chain] for t in each)
                seconds = self._seconds(computation, i, beside=bool(each) and not continues)
                ended = frozenset(t.chain for t in each if t.chain and lasts[t.chain] == position)
                self._steps_of[key].append(_Scheduled(i, seconds, each, ended))
        return self._steps_of[key]

    def _seconds(self, computation: str, i: Instruction, *, beside: bool) -> float:
        """Seconds of compute.  beside: it has a collective, whose memory traffic does not count, only its matmul."""
        apart = i.opcode in ("while", "conditional", "call") or i.opcode.endswith(("-start", "-update", "-done"))
        if apart and i.opcode != "fusion-start":  # a GPU's copy beside other kernels shares the memory
            return 0.0
        if beside and not self.costs.flops(computation, i):
            return 0.0
        return self.speeds.kernels.seconds(self.costs, computation, i)

    def _transfers(self, computation: str, i: Instruction, path: CallPath) -> tuple[Transfer, ...]:
        """Collectives of an instruction; calls, loops and conditionals have schedules of their own."""
        sizes, devices, found = self.speeds.sizes, math.prod(self.speeds.sizes.values()), []
        if is_collective(i):
            found = [read_collective(self.module, computation, i, path, devices)]
        elif i.callee and i.opcode != "call":
            for callee, callee_path in calls(self.module, i, path, self.shares):
                found += collectives_within(self.module, callee, callee_path, devices, self.shares)
        transfers = []
        for c in found:
            if c.wire_bytes:
                axes = c.spanned_axes(sizes)
                seconds = c.wire_bytes / self.speeds.bandwidth(c.kind, axes)
                transfers.append(Transfer(c.kind, c.axes(sizes), self._wires(c, axes), c.wire_bytes, seconds, c.chain))
        return tuple(transfers)

    def _wires(self, c: CollectiveInstruction, axes: tuple[str, ...]) -> tuple[Wire, ...]:
        """Wires that a collective over these axes takes."""
        if c.kind == COLLECTIVE_PERMUTE and self.speeds.is_ring(axes):
            return ((axes, c.way(self.speeds.sizes)),)
        return (axes, 1), (axes, -1)
