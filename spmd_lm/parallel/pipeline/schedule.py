"""Pipeline schedules as data: for each tick and stage, which microbatch goes forward and which backward, through which
chunk of layers.

All stages tick together, and in a tick a stage does at most one forward and one backward (*paired ticks*), so that one
program serves all of them.  With p stages, m microbatches and v chunks of layers a stage:

    gpipe           all forwards, then all backwards                              arXiv:1811.06965
    1f1b            a backward as soon as there can be one                        arXiv:2104.04473, section 2.2.1
    interleaved     the same with v > 1, p microbatches of a chunk at a time      arXiv:2104.04473, section 2.2.2
    breadth_first   gpipe with v > 1, all microbatches of a chunk at a time       arXiv:2211.05953

A stage takes the units of work, (chunk, microbatch), in one order forward and in another backward; stage s begins s
ticks after the first one forward, and the first one backward s ticks after it.  That is all of a schedule.  The bubble
is (p - 1) / (v m) of the work; what differs is how many inputs a stage holds for backward, and for how long it uses the
weights of one chunk."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import numpy as np

Kind = Literal["gpipe", "1f1b", "interleaved", "breadth_first"]
IDLE = -1


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one stage does in one direction of a tick: its chunk of layers, on one microbatch."""

    chunk: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """kind: its name.  delay: ticks before the last stage's first backward."""

    kind: Kind
    stages: int
    microbatches: int
    chunks: int
    order: tuple[Unit, ...]
    """Of forward, the same on every stage."""
    delay: int

    @functools.cached_property
    def order_back(self) -> tuple[Unit, ...]:
        """Of backward: as forward, the chunks from the last to the first."""
        return tuple(Unit(self.chunks - 1 - unit.chunk, unit.microbatch) for unit in self.order)

    @property
    def ticks(self) -> int:
        return self.delay + len(self.order) + self.stages - 1

    def _table(self, first: Callable[[int], int]) -> np.ndarray:
        """int32 [ticks, stages]: places in an order that stage s begins at tick first(s)."""
        at = np.arange(self.ticks)[:, None] - np.array([first(s) for s in range(self.stages)])
        return np.where((at >= 0) & (at < len(self.order)), at, IDLE).astype(np.int32)

    @functools.cached_property
    def forward(self) -> np.ndarray:
        """int32 [ticks, stages]: which of `order`; IDLE is none."""
        return self._table(lambda s: s)

    @functools.cached_property
    def backward(self) -> np.ndarray:
        """int32 [ticks, stages]: which of `order_back`; IDLE is none."""
        return self._table(lambda s: self.delay + self.stages - 1 - s)

    # ---- what it costs

    def time(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Of a step, in the units of `forward` and `backward`, which are those of one microbatch through one stage.

        A tick takes as long as its busiest stage: all stages wait for its messages."""
        busy = [(table != IDLE).any(1).sum() for table in (self.forward, self.backward)]
        return float(busy[0] * forward + busy[1] * backward) / self.chunks

    @property
    def bubble(self) -> float:
        """Idle time of a stage, of its working time."""
        return self.time() / (3.0 * self.microbatches) - 1

    @functools.cached_property
    def live(self) -> list[int]:
        """The most inputs of units that each stage holds for backward at a time."""
        begun = {unit: i for i, unit in enumerate(self.order)}
        most = []
        for s in range(self.stages):
            held = np.zeros(self.ticks + 1, int)
            for i, unit in enumerate(self.order_back):
                held[begun[unit] + s] += 1
                held[self.delay + self.stages - s + i] -= 1  # the tick after its backward
            most.append(int(held.cumsum().max()))
        return most

    @property
    def messages(self) -> int:
        """Activations that cross from one stage to the next in a step, and as many gradients back."""
        return self.microbatches * (self.chunks * self.stages - 1)


def schedule(kind: Kind, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The arguments fit each other: config.layouts refuses others."""
    p, m, v = stages, microbatches, chunks
    assert v == 1 or kind in ("interleaved", "breadth_first"), kind
    assert p == 1 or v == 1 or (m % p == 0 if kind == "interleaved" else m >= p), (kind, p, m, v)
    depth_first = kind in ("1f1b", "interleaved")
    turns = range(0, m, p if depth_first and v > 1 else m)
    together = turns.step
    order = tuple(
        Unit(chunk, i) for first in turns for chunk in range(v) for i in range(first, min(first + together, m))
    )
    return Schedule(kind, p, m, v, order, delay=v * p - 1 if depth_first else v * m + p - 1)


def render(s: Schedule, width: int = 112) -> str:
    """Stages down, ticks across: forward|backward, each a microbatch and, if there are several, the letter of its
    chunk.  What does not fit in `width` columns is left out of the middle."""

    def name(unit: Unit) -> str:
        first, second = divmod(unit.chunk, 26)
        letters = (chr(ord("a") + first - 1) if first else "") + chr(ord("a") + second)
        return f"{unit.microbatch}{letters if s.chunks > 1 else ''}"

    size = max(map(len, map(name, s.order)))

    def cell(tick: int, stage: int) -> str:
        f, b = int(s.forward[tick, stage]), int(s.backward[tick, stage])
        left = name(s.order[f]) if f != IDLE else "."
        right = name(s.order_back[b]) if b != IDLE else "."
        return f"{left:>{size}}|{right:<{size}}"

    label = len(f"stage {s.stages - 1}")
    fits = max(2, (width - label) // (2 * size + 3))
    shown: list[int | None] = list(range(s.ticks))
    if s.ticks > fits:
        shown = [*range(fits // 2), None, *range(s.ticks - (fits - 1) // 2, s.ticks)]
    rows = [("tick", [str(t) if t is not None else "..." for t in shown])]
    for stage in range(s.stages):
        rows.append((f"stage {stage}", [cell(t, stage) if t is not None else "..." for t in shown]))
    return "\n".join(
        f"{head:<{label}}  " + "  ".join(f"{c:^{2 * size + 1}}" for c in cells).rstrip() for head, cells in rows
    )
