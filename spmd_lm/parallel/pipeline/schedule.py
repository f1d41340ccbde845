"""Pipeline schedules as data: which microbatch each stage runs forward and which backward in each tick, through which
chunk of layers.

All stages tick together, and in a tick a stage runs at most one forward and one backward task (*paired ticks*), so that
one program serves all of them.  With p stages, m microbatches and v chunks of layers per stage:

    gpipe           all forwards, then all backwards                              arXiv:1811.06965
    1f1b            a backward as soon as there can be one                        arXiv:2104.04473, section 2.2.1
    interleaved     the same with v > 1, p microbatches of a chunk at a time      arXiv:2104.04473, section 2.2.2
    breadth_first   gpipe with v > 1, all microbatches of a chunk at a time       arXiv:2211.05953

A task is a chunk of layers on one microbatch.  All stages run their tasks in one order forward, and in one order
backward, in which the chunks are reversed.  Forward, stage s starts s ticks after stage 0; backward, stage 0 starts s
ticks after stage s.  That is all.  The bubble is (p - 1) / (v m) of the work; schedules differ in how many
inputs a stage holds for backward, and for how long it uses the weights of one chunk.  `schedule_table` makes of it what
the interpreter reads: for each stage and tick the slots of its buffers, and the predicates of its conditionals."""

import dataclasses
import functools
import heapq
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

Kind = Literal["gpipe", "1f1b", "interleaved", "breadth_first"]
A = TypeVar("A")
IDLE = -1


class PipelineTask(NamedTuple):
    """A stage's work in one half of a tick: a chunk of its layers, on one microbatch."""

    chunk: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """forward_order: the order of tasks, the same on every stage.  backward_start: the tick of the last stage's first
    backward task."""

    kind: Kind
    stages: int
    microbatches: int
    chunks: int
    forward_order: tuple[PipelineTask, ...]
    backward_start: int

    @functools.cached_property
    def backward_order(self) -> tuple[PipelineTask, ...]:
        """The forward order with the chunks reversed."""
        return tuple(PipelineTask(self.chunks - 1 - task.chunk, task.microbatch) for task in self.forward_order)

    @property
    def ticks(self) -> int:
        return self.backward_start + len(self.forward_order) + self.stages - 1

    @functools.cached_property
    def _order(self) -> dict[PipelineTask, int]:
        return {task: i for i, task in enumerate(self.forward_order)}

    def ticks_of(self, virtual_stage: int, microbatch: int) -> tuple[int, int]:
        """(forward, backward) ticks in which a microbatch runs through a virtual stage.  Chunk c of stage s is virtual
        stage c p + s: microbatches run through them in the order of their numbers."""
        chunk, stage = divmod(virtual_stage, self.stages)
        forward = self._order[PipelineTask(chunk, microbatch)]
        backward = self._order[PipelineTask(self.chunks - 1 - chunk, microbatch)]
        return forward + stage, backward + self.backward_start + self.stages - 1 - stage

    def _table(self, start_ticks: np.ndarray) -> np.ndarray:
        """int [ticks, stages]: indices into an order that stage s starts at start_ticks[s]; IDLE for none."""
        at = np.arange(self.ticks)[:, None] - start_ticks
        return np.where((at >= 0) & (at < len(self.forward_order)), at, IDLE)

    @functools.cached_property
    def forward(self) -> np.ndarray:
        """int [ticks, stages]: indices into `forward_order`; IDLE for none."""
        return self._table(np.arange(self.stages))

    @functools.cached_property
    def backward(self) -> np.ndarray:
        """int [ticks, stages]: indices into `backward_order`; IDLE for none."""
        return self._table(self.backward_start + np.arange(self.stages)[::-1])

    # ---- costs

    def time(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Time of a step.  forward, backward: times of one microbatch through one stage.

        A tick takes as long as its busiest stage: all stages wait for what it sends."""
        busy = len(self.forward_order) + self.stages - 1  # ticks in which some stage runs forward; as many backward
        return (busy * forward + busy * backward) / self.chunks

    @property
    def bubble(self) -> float:
        """Idle time of a stage, as a fraction of its working time."""
        return self.time() / (3.0 * self.microbatches) - 1

    @functools.cached_property
    def live_inputs(self) -> list[int]:
        """The most inputs that each stage holds for backward at a time."""
        peaks = []
        for stage in range(self.stages):
            change = np.zeros(self.ticks + 1, int)
            for task in self.forward_order:
                forward, backward = self.ticks_of(task.chunk * self.stages + stage, task.microbatch)
                change[forward] += 1
                change[backward + 1] -= 1
            peaks.append(int(change.cumsum().max()))
        return peaks

    @property
    def stage_sends(self) -> int:
        """Activations sent from one stage to the next in a step, and as many gradients back."""
        return self.microbatches * (self.chunks * self.stages - 1)


def make_schedule(kind: Kind, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Makes a schedule; config.layout_checks refuses combinations that do not fit."""
    p, m, v = stages, microbatches, chunks
    assert v == 1 or kind in ("interleaved", "breadth_first"), kind
    assert p == 1 or v == 1 or (m % p == 0 if kind == "interleaved" else m >= p), (kind, p, m, v)
    depth_first = kind in ("1f1b", "interleaved")
    group = p if depth_first and v > 1 else m  # microbatches that run through a chunk before the next chunk
    groups = [range(first, min(first + group, m)) for first in range(0, m, group)]
    order = tuple(PipelineTask(chunk, microbatch) for each in groups for chunk in range(v) for microbatch in each)
    return Schedule(kind, p, m, v, order, backward_start=v * p - 1 if depth_first else v * m + p - 1)


def render(s: Schedule, width: int = 112) -> str:
    """Draws a schedule: stages down, ticks across, forward|backward in each cell; a task is its microbatch and, if
    there are several, the letter of its chunk.  Ticks in the middle that do not fit in `width` columns are left out."""

    def name(order: tuple[PipelineTask, ...], i: int) -> str:
        first, second = divmod(order[i].chunk, 26)
        letters = (chr(ord("a") + first - 1) if first else "") + chr(ord("a") + second)
        return "." if i == IDLE else f"{order[i].microbatch}{letters if s.chunks > 1 else ''}"

    size, label = max(len(name(s.forward_order, i)) for i in range(len(s.forward_order))), len(f"stage {s.stages - 1}")

    def cell(tick: int, stage: int) -> str:
        f, b = name(s.forward_order, s.forward[tick, stage]), name(s.backward_order, s.backward[tick, stage])
        return f"{f:>{size}}|{b:<{size}}"

    shown: list[int | None] = [*range(s.ticks)]
    if s.ticks > (fits := max(2, (width - label) // (2 * size + 3))):
        shown[fits // 2 : s.ticks - (fits - 1) // 2] = [None]
    rows = [("tick", ["..." if t is None else str(t) for t in shown])]
    for stage in range(s.stages):
        rows.append((f"stage {stage}", ["..." if t is None else cell(t, stage) for t in shown]))
    return "\n".join(
        f"{head:<{label}}  " + "  ".join(f"{c:^{2 * size + 1}}" for c in cells).rstrip() for head, cells in rows
    )


# ---- as the interpreter reads it


class TaskFields(NamedTuple, Generic[A]):
    """Tasks of each stage in one direction: arrays [ticks, stages]; in the interpreter also scalars, of one tick and
    one stage."""

    active: A  # whether there is a task
    microbatch: A
    chunk: A
    from_embedding: A  # its input comes from the embedding
    to_head: A  # its output goes to the head
    input_slot: A  # holds its input
    output_grad_slot: A  # holds the gradient of its output
    receive_slot: A  # in which to put what a neighbour sends in this tick; IDLE for none
    same_chunk_next: A  # its chunk is that of the stage's next task, if there is one
    new_chunk: A  # its chunk differs from that of the stage's previous task
    new_chunk_next: A  # its chunk differs from that of the stage's next task
    first_of_chunk: A  # the stage's first backward task of its chunk, in time: gradients start at zero
    last_of_chunk: A  # and its last: they are complete

    def at_ticks(self, ticks: Any) -> "TaskFields[A]":
        """ticks: bool [ticks]."""
        columns: tuple[Any, ...] = self
        return TaskFields(*(column[ticks] for column in columns))


FLAGS = (
    *("active", "from_embedding", "to_head"),
    *("same_chunk_next", "new_chunk", "new_chunk_next", "first_of_chunk", "last_of_chunk"),
)
PER_TICK = ("active", "receives", "same_chunk_next", "new_chunk", "new_chunk_next", "last_of_chunk")
"""Predicates of the interpreter's conditionals (Pipeline.cond) of every tick; the others are of active tasks alone."""


@dataclasses.dataclass(frozen=True)
class ScheduleTable:
    """input_slots, output_grad_slots: slots of each kind that a stage needs."""

    forward: TaskFields[np.ndarray]
    backward: TaskFields[np.ndarray]
    input_slots: int
    output_grad_slots: int

    @property
    def phases(self) -> list[tuple[TaskFields[np.ndarray] | None, TaskFields[np.ndarray] | None]]:
        """Ranges of ticks that run in one loop each, as (forward, backward); None for a half in which all stages are
        idle.  Where no tick has both halves, each half has a loop of its own, and sends in one direction alone."""
        forward, backward = (half.active.any(1) for half in (self.forward, self.backward))
        if (forward & backward).any():
            return [(self.forward, self.backward)]
        return [(self.forward.at_ticks(forward), None), (None, self.backward.at_ticks(backward))]

    @property
    def ticks(self) -> dict[str, int]:
        """Number of ticks in loops with a forward half, and in those with a backward half."""
        halves = zip(("forward", "backward"), zip(*self.phases, strict=True), strict=True)
        return {name: sum(len(half.active) for half in phases if half) for name, phases in halves}

    def execution_counts(self, run_idle_stages: bool = False) -> dict[str, np.ndarray]:
        """float [stages]: the number of times that each predicate is true in a step, by name.

        run_idle_stages: then both branches run wherever a predicate is evaluated, as if it were always true."""
        counts: dict[str, np.ndarray] = {}
        for name, half in (("forward", self.forward), ("backward", self.backward)):
            true = {flag: (getattr(half, flag) & half.active).sum(0) for flag in FLAGS}
            for predicate, times in (true | {"receives": (half.receive_slot != IDLE).sum(0)}).items():
                counts[f"{name}_{predicate}"] = np.full_like(times, self.ticks[name]) if run_idle_stages else times
        first = np.arange(self.forward.active.shape[1]) == 0
        # Once per step, after a phase of a breadth-first schedule, for all microbatches.
        embedding, head = first | run_idle_stages, first[::-1] | run_idle_stages
        return counts | {"embedding_of_all_microbatches": embedding, "head_of_all_microbatches": head}

    def execution_fractions(self) -> dict[str, np.ndarray]:
        """float [stages]: the fraction of its evaluations in which each predicate is true."""
        counts, fractions = self.execution_counts(), {}
        for name, times in counts.items():
            half, predicate = name.split("_", 1)
            evaluated: Any = 1
            if half in self.ticks:
                evaluated = self.ticks[half] if predicate in PER_TICK else np.maximum(counts[f"{half}_active"], 1)
            fractions[name] = times / evaluated
        return fractions


@functools.lru_cache(maxsize=4)  # a plan asks for each several times; the longest takes a second
def schedule_table(s: Schedule) -> ScheduleTable:
    def blank() -> TaskFields[np.ndarray]:
        columns = {
            name: np.zeros((s.ticks, s.stages), bool if name in FLAGS else np.int32) for name in TaskFields._fields
        }
        return TaskFields(**columns | {"receive_slot": np.full((s.ticks, s.stages), IDLE, np.int32)})

    halves = blank(), blank()
    slots = [_fill_stage(s, stage, *halves) for stage in range(s.stages)]
    input_slots, output_grad_slots = map(max, zip(*slots, strict=True))
    return ScheduleTable(*halves, input_slots, output_grad_slots)


def _fill_stage(s: Schedule, stage: int, forward: TaskFields, backward: TaskFields) -> tuple[int, int]:
    """Fills one stage's columns of both halves; returns the number of slots of each kind that it needs."""
    ticks, inputs, grads = {}, {}, {}
    for task in s.forward_order:
        virtual_stage, microbatch = task.chunk * s.stages + stage, task.microbatch
        ticks[task] = s.ticks_of(virtual_stage, microbatch)
        if virtual_stage > 0:  # the tick before which the previous one's output arrives
            inputs[task] = s.ticks_of(virtual_stage - 1, microbatch)[0] + 1
        if virtual_stage < s.chunks * s.stages - 1:  # the tick in which the next one's gradient arrives
            grads[task] = s.ticks_of(virtual_stage + 1, microbatch)[1] + 1
    slots = _assign_slots({task: (inputs.get(task, first), last) for task, (first, last) in ticks.items()})
    output_grad_slots = _assign_slots({task: (first, ticks[task][1]) for task, first in grads.items()})
    for task, of_halves in ticks.items():
        for half, tick in zip((forward, backward), of_halves, strict=True):
            at = tick, stage
            half.active[at] = True
            half.chunk[at], half.microbatch[at] = task
            half.from_embedding[at], half.to_head[at] = task not in inputs, task not in grads
            half.input_slot[at], half.output_grad_slot[at] = slots[task], output_grad_slots.get(task, 0)
    for task, tick in inputs.items():
        forward.receive_slot[tick - 1, stage] = slots[task]
    for task, tick in grads.items():
        backward.receive_slot[tick, stage] = output_grad_slots[task]
    in_time = sorted((tick, is_backward, task.chunk) for task in ticks for is_backward, tick in enumerate(ticks[task]))
    chunks = [chunk for _, _, chunk in in_time]
    neighbours = zip([IDLE, *chunks[:-1]], [*chunks[1:], chunks[-1]], strict=True)
    for (tick, is_backward, chunk), (before, after) in zip(in_time, neighbours, strict=True):
        half = backward if is_backward else forward
        half.new_chunk[tick, stage] = chunk != before
        half.new_chunk_next[tick, stage], half.same_chunk_next[tick, stage] = chunk != after, chunk == after
    for chunk in range(s.chunks):
        of_chunk = [last for task, (_, last) in ticks.items() if task.chunk == chunk]
        backward.first_of_chunk[min(of_chunk), stage] = backward.last_of_chunk[max(of_chunk), stage] = True
    return 1 + max(slots.values()), 1 + max(output_grad_slots.values(), default=0)


def _assign_slots(intervals: dict[PipelineTask, tuple[int, int]]) -> dict[PipelineTask, int]:
    """Assigns each task a slot that no other task needs in the same tick.  intervals: first and last tick in which each
    needs it."""
    busy: list[tuple[int, int]] = []  # heaps: (the tick in which it is free again, slot), and the slots that are free
    free: list[int] = []
    slots: dict[PipelineTask, int] = {}
    for task, (first, last) in sorted(intervals.items(), key=lambda item: item[1]):
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slots[task] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last + 1, slots[task]))
    return slots
