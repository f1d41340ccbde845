"""The clock of a step, the wires between devices, and what is on its way: what exposed.py moves along a schedule."""

import copy
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

Wire = tuple[tuple[str, ...], int]
"""The mesh axes that it spans, and its direction on the ring along them, 1 or -1."""


class Transfer(NamedTuple):
    """A collective.  axes: as CollectiveInstruction.axes tells them.  wires: that it takes up.  bytes: that a device
    sends, in so many seconds.  chain: of steps that take it along; empty if there is none."""

    kind: str
    axes: tuple[str, ...]
    wires: tuple[Wire, ...]
    bytes: float
    seconds: float
    chain: str = ""


class _Flight(NamedTuple):
    """An asynchronous collective, and the time at which all of it has arrived."""

    transfer: Transfer
    end: float


class State:
    """Times are seconds since the step began.

    compute: seconds of compute until now.  rows: [bytes, wire seconds, exposed seconds, exposed bytes] of all
    collectives of one kind and axes."""

    def __init__(self) -> None:
        self.clock = self.compute = 0.0
        self.rows: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}
        self._free: dict[Wire, float] = {}  # when each wire is
        self._flights: dict[str, list[_Flight]] = {}  # by the instruction that started them
        self._left: dict[str, float] = {}  # seconds on the wire, of each chain

    @staticmethod
    def no_amounts() -> np.ndarray:
        return np.zeros(4)

    def copy(self) -> "State":
        other = copy.copy(self)
        other.rows, other._free = dict(self.rows), dict(self._free)
        other._flights, other._left = dict(self._flights), dict(self._left)
        return other

    def compute_beside(self, seconds: float, transfers: Iterable[Transfer], ended_chains: frozenset[str]) -> None:
        """Compute, and collectives that are sent at the same time: then waits for these, but of a chain only at its
        end."""
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
        """Of asynchronous collectives, by the instruction of this name."""
        self._flights[name] = [_Flight(transfer, self._send(transfer, self.clock)) for transfer in transfers]

    def finish(self, names: Iterable[str]) -> None:
        """Waits for what one of these instructions started: in a loop's first turn another one than later on."""
        name = next((name for name in names if name in self._flights), None)
        for transfer, end in self._flights.pop(name, []) if name else []:
            wait = max(0.0, end - self.clock)
            self._record(transfer, wait)
            self.clock += wait

    def scale_since(self, before: "State", times: float) -> None:
        """Makes what has passed since `before` pass so many times.  What is still on its way then remains so."""
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
                self._flights[name] = [_Flight(transfer, end + later) for transfer, end in flights]

    def _send(self, transfer: Transfer, now: float) -> float:
        """Puts it on its wires, as soon as these are free; returns when it has arrived."""
        end = max(now, *(self._free.get(wire, 0.0) for wire in transfer.wires)) + transfer.seconds
        self._free.update(dict.fromkeys(transfer.wires, end))
        return end

    def _record(self, transfer: Transfer, waited: float) -> None:
        """waited: seconds, of which those that others take up the wire are not its own."""
        exposed = min(waited, transfer.seconds)
        amounts = np.array([transfer.bytes, transfer.seconds, exposed, transfer.bytes * exposed / transfer.seconds])
        self.rows[transfer.kind, transfer.axes] = self.rows.get((transfer.kind, transfer.axes), 0.0) + amounts
