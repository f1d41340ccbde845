"""State of the walk in exposed.py: clock, wires between devices, and collectives in flight."""

import copy
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

Wire = tuple[tuple[str, ...], int]
"""Mesh axes that it spans, and its direction on the ring along them, 1 or -1."""


class Transfer(NamedTuple):
    """A collective.

    axes: those of CollectiveInstruction.axes.
    bytes: bytes that a device sends, in `seconds`.
    chain: CollectiveInstruction.chain."""

    kind: str
    axes: tuple[str, ...]
    wires: tuple[Wire, ...]
    bytes: float
    seconds: float
    chain: str = ""


class State:
    """State of the walk.  Times are seconds since the step began.

    compute: seconds of compute until now.
    rows: [bytes, wire seconds, exposed seconds, exposed bytes] of all collectives of one kind and axes."""

    def __init__(self) -> None:
        self.clock = self.compute = 0.0
        self.rows: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}
        self._free: dict[Wire, float] = {}  # the time from which each wire is free
        self._flights: dict[str, list[tuple[Transfer, float]]] = {}  # with their arrivals, by the name of their start
        self._left: dict[str, float] = {}  # seconds on the wire, by chain

    def copy(self) -> "State":
        other = copy.copy(self)
        other.rows, other._free = dict(self.rows), dict(self._free)
        other._flights, other._left = dict(self._flights), dict(self._left)
        return other

    def compute_beside(self, seconds: float, transfers: Iterable[Transfer], ended_chains: frozenset[str]) -> None:
        """Computes beside collectives, then waits for them; for a chain only at its end."""
        began = self.clock
        self.clock += seconds
        self.compute += seconds
        end, waited_for = self.clock, []
        for transfer in transfers:
            if transfer.chain:
                self._left[transfer.chain] = self._left.get(transfer.chain, transfer.seconds) - seconds
                if transfer.chain in ended_chains:
                    waited = max(0.0, self._left.pop(transfer.chain))
                    self._record(transfer, waited)
                    end = max(end, self.clock + waited)
            else:
                end = max(end, self._send(transfer, began))
                waited_for.append(transfer)
        total = sum(transfer.seconds for transfer in waited_for)
        for transfer in waited_for:
            self._record(transfer, (end - self.clock) * transfer.seconds / total)
        self.clock = end

    def start(self, name: str, transfers: Iterable[Transfer]) -> None:
        """Starts asynchronous collectives in instruction `name`."""
        self._flights[name] = [(transfer, self._send(transfer, self.clock)) for transfer in transfers]

    def finish(self, names: Iterable[str]) -> None:
        """Waits for what one of these instructions started: in a loop's first iteration another than later."""
        name = next((name for name in names if name in self._flights), None)
        for transfer, end in self._flights.pop(name, []) if name else []:
            wait = max(0.0, end - self.clock)
            self._record(transfer, wait)
            self.clock += wait

    def scale_since(self, before: "State", times: float) -> None:
        """Repeats what has passed since `before`, `times` in all; what is in flight remains so."""
        later = (times - 1) * (self.clock - before.clock)
        self.clock += later
        self.compute += (times - 1) * (self.compute - before.compute)
        for key, amounts in self.rows.items():
            self.rows[key] = amounts + (times - 1) * (amounts - before.rows.get(key, 0.0))
        for wire, free in self._free.items():
            if free > before._free.get(wire, 0.0):
                self._free[wire] = free + later
        for name, flights in self._flights.items():
            if before._flights.get(name) is not flights:
                self._flights[name] = [(transfer, end + later) for transfer, end in flights]

    def _send(self, transfer: Transfer, now: float) -> float:
        """Puts a transfer on its wires as soon as they are free; returns the time of its arrival."""
        end = max(now, *(self._free.get(wire, 0.0) for wire in transfer.wires)) + transfer.seconds
        self._free.update(dict.fromkeys(transfer.wires, end))
        return end

    def _record(self, transfer: Transfer, waited: float) -> None:
        """Adds a transfer to its row.  waited: seconds; those beyond its own, others held the wire."""
        exposed = min(waited, transfer.seconds)
        amounts = np.array([transfer.bytes, transfer.seconds, exposed, transfer.bytes * exposed / transfer.seconds])
        self.rows[transfer.kind, transfer.axes] = self.rows.get((transfer.kind, transfer.axes), 0.0) + amounts
