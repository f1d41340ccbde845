"""Pipeline schedules as data: which microbatch each stage runs forward and which backward in each tick, through which
chunk of layers.

All stages tick together, and in a tick a stage runs at most one forward and one backward task (*paired ticks*), so that
one program serves all of them.  With p stages, m microbatches and v chunks of layers per stage:

    gpipe           all forwards, then all backwards                              arXiv:1811.06965
    1f1b            a backward as soon as there can be one                        arXiv:2104.04473, section 2.2.1
    interleaved     the same with v > 1, p microbatches of a chunk at a time      arXiv:2104.04473, section 2.2.2
    breadth_first   gpipe with v > 1, all microbatches of a chunk at a time       arXiv:2211.05953

A task is a chunk of layers on one microbatch.  Every stage runs its tasks in the same order forward, and in another
order backward; stage s starts s ticks after the first one forward, and the first one starts backward s ticks after it.
That is all of a schedule.  The bubble is (p - 1) / (v m) of the work; schedules differ in how many inputs a stage holds
for backward, and for how long it uses the weights of one chunk."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import numpy as np

Kind = Literal["gpipe", "1f1b", "interleaved", "breadth_first"]
IDLE = -1


@dataclasses.dataclass(frozen=True)
class Task:
    """What one stage runs in one half of a tick: a chunk of its layers, on one microbatch."""

    chunk: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """forward_order: of tasks, the same on every stage.  delay: ticks before the last stage's first backward task."""

    kind: Kind
    stages: int
    microbatches: int
    chunks: int
    forward_order: tuple[Task, ...]
    delay: int

    @functools.cached_property
    def backward_order(self) -> tuple[Task, ...]:
        """As forward, with the chunks from the last to the first."""
        return tuple(Task(self.chunks - 1 - task.chunk, task.microbatch) for task in self.forward_order)

    @property
    def ticks(self) -> int:
        return self.delay + len(self.forward_order) + self.stages - 1

    def _table(self, first: Callable[[int], int]) -> np.ndarray:
        """int32 [ticks, stages]: indices into an order that stage s starts at tick first(s); IDLE for none."""
        at = np.arange(self.ticks)[:, None] - np.array([first(s) for s in range(self.stages)])
        return np.where((at >= 0) & (at < len(self.forward_order)), at, IDLE).astype(np.int32)

    @functools.cached_property
    def forward(self) -> np.ndarray:
        """int32 [ticks, stages]: indices into `forward_order`; IDLE for none."""
        return self._table(lambda s: s)

    @functools.cached_property
    def backward(self) -> np.ndarray:
        """int32 [ticks, stages]: indices into `backward_order`; IDLE for none."""
        return self._table(lambda s: self.delay + self.stages - 1 - s)

    # ---- what it costs

    def time(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Time of a step.  forward, backward: times of one microbatch through one stage.

        A tick takes as long as its busiest stage: all stages wait for its messages."""
        busy = [(table != IDLE).any(1).sum() for table in (self.forward, self.backward)]
        return float(busy[0] * forward + busy[1] * backward) / self.chunks

    @property
    def bubble(self) -> float:
        """Idle time of a stage, as a fraction of its working time."""
        return self.time() / (3.0 * self.microbatches) - 1

    @functools.cached_property
    def live_inputs(self) -> list[int]:
        """The most inputs that each stage holds for backward at a time."""
        forward_index = {task: i for i, task in enumerate(self.forward_order)}
        peaks = []
        for stage in range(self.stages):
            change = np.zeros(self.ticks + 1, int)
            for i, task in enumerate(self.backward_order):
                change[forward_index[task] + stage] += 1
                change[self.delay + self.stages - stage + i] -= 1  # the tick after its backward
            peaks.append(int(change.cumsum().max()))
        return peaks

    @property
    def messages(self) -> int:
        """Activations sent from one stage to the next in a step, and as many gradients back."""
        return self.microbatches * (self.chunks * self.stages - 1)


def make_schedule(kind: Kind, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """config.layout_checks refuses combinations that do not fit."""
    p, m, v = stages, microbatches, chunks
    assert v == 1 or kind in ("interleaved", "breadth_first"), kind
    assert p == 1 or v == 1 or (m % p == 0 if kind == "interleaved" else m >= p), (kind, p, m, v)
    depth_first = kind in ("1f1b", "interleaved")
    group = p if depth_first and v > 1 else m  # microbatches that run through a chunk before the next chunk
    order = tuple(
        Task(chunk, i)
        for first in range(0, m, group)
        for chunk in range(v)
        for i in range(first, min(first + group, m))
    )
    return Schedule(kind, p, m, v, order, delay=v * p - 1 if depth_first else v * m + p - 1)


def render(s: Schedule, width: int = 112) -> str:
    """A drawing: stages down, ticks across, forward|backward in each cell; a task is its microbatch and, if there are
    several, the letter of its chunk.  What does not fit in `width` columns is left out of the middle."""

    def name(task: Task) -> str:
        first, second = divmod(task.chunk, 26)
        letters = (chr(ord("a") + first - 1) if first else "") + chr(ord("a") + second)
        return f"{task.microbatch}{letters if s.chunks > 1 else ''}"

    size = max(map(len, map(name, s.forward_order)))

    def cell(tick: int, stage: int) -> str:
        f, b = int(s.forward[tick, stage]), int(s.backward[tick, stage])
        left = name(s.forward_order[f]) if f != IDLE else "."
        right = name(s.backward_order[b]) if b != IDLE else "."
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
