"""A schedule as the interpreter reads it: what each stage does in each tick, in which slots, under which conditions."""

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule, Task

A = TypeVar("A")

Columns = dict[str, np.ndarray]
"""Arrays [ticks, stages] by name."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ticks(Generic[A]):
    """What each stage does in one direction: arrays [ticks, stages]; in the interpreter, scalars of one of each."""

    active: A  # whether there is a task
    microbatch: A
    chunk: A
    from_embedding: A  # its input comes from the embedding
    to_head: A  # its output goes to the head
    slot: A  # holds its input
    grad_slot: A  # holds the gradient of its output
    receive_slot: A  # in which to put what a neighbour has just sent; IDLE for none
    loads_chunk: A  # its chunk differs from that of the stage's previous task
    first_of_chunk: A
    last_of_chunk: A

    def at_ticks(self, ticks: Any) -> "Ticks[A]":
        """ticks: bool [ticks]."""
        return jax.tree.map(lambda column: column[ticks], self)


FLAGS = ("active", "from_embedding", "to_head", "loads_chunk", "first_of_chunk", "last_of_chunk")
CONDITIONS = ("active", "from_embedding", "to_head", "loads_chunk", "last_of_chunk")
"""Flags on which the interpreter branches."""

PER_TICK = ("active", "receives", "loads_chunk", "last_of_chunk")
"""Conditions that are evaluated in every tick; the others only where the task is active."""

ENDS = ("embedding_of_all", "head_of_all")
"""Conditions that a breadth-first pipeline evaluates once per step."""


@dataclasses.dataclass(frozen=True)
class ScheduleTable:
    """input_slots, grad_slots: how many slots a stage needs of each kind."""

    forward: Ticks[np.ndarray]
    backward: Ticks[np.ndarray]
    input_slots: int
    grad_slots: int

    @property
    def phases(self) -> list[tuple[Ticks[np.ndarray] | None, Ticks[np.ndarray] | None]]:
        """Ranges of ticks that run in one loop each, as (forward, backward); None for a half in which all stages are
        idle.

        Where no tick has both halves, each half has a loop of its own, and sends in one direction alone."""
        forward, backward = (np.any(half.active, axis=1) for half in (self.forward, self.backward))
        if (forward & backward).any():
            return [(self.forward, self.backward)]
        return [(self.forward.at_ticks(forward), None), (None, self.backward.at_ticks(backward))]

    @property
    def ticks(self) -> dict[str, int]:
        """How many ticks the loops with a forward half have, and those with a backward half."""
        counts = {"forward": 0, "backward": 0}
        for phase in self.phases:
            for name, half in zip(counts, phase, strict=True):
                counts[name] = max(counts[name], 0 if half is None else len(half.active))
        return counts

    def runs(self, run_idle_stages: bool = False) -> dict[str, np.ndarray]:
        """float [stages]: how often each condition of the interpreter is true in a step, by name.

        run_idle_stages: then both branches run wherever a condition is evaluated, as if it were always true."""
        runs: dict[str, np.ndarray] = {}
        for name, half in (("forward", self.forward), ("backward", self.backward)):
            true = {condition: (getattr(half, condition) & half.active).sum(0) for condition in CONDITIONS}
            true["receives"] = (half.receive_slot != IDLE).sum(0)
            for condition, count in true.items():
                always = np.full(len(count), self.ticks[name])
                runs[f"{name}_{condition}"] = always if run_idle_stages else count
        first = np.arange(self.forward.active.shape[1]) == 0
        runs["embedding_of_all"] = first | run_idle_stages
        runs["head_of_all"] = first[::-1] | run_idle_stages
        return runs

    def shares(self) -> dict[str, np.ndarray]:
        """float [stages]: how often each condition is true, of the times that it is evaluated."""
        runs = self.runs()
        shares = {name: runs[name] for name in ENDS}
        for name in sorted(runs.keys() - shares.keys()):
            half, condition = name.split("_", 1)
            evaluated = self.ticks[half] if condition in PER_TICK else np.maximum(runs[f"{half}_active"], 1)
            shares[name] = runs[name] / evaluated
        return shares


def schedule_table(schedule: Schedule) -> ScheduleTable:
    shape, names = (schedule.ticks, schedule.stages), [field.name for field in dataclasses.fields(Ticks)]

    def blank() -> Columns:
        columns = {name: np.zeros(shape, bool if name in FLAGS else np.int32) for name in names}
        return columns | {"receive_slot": np.full(shape, IDLE, np.int32)}

    forward, backward = blank(), blank()
    slots = [_StageFiller(schedule, stage, forward, backward).fill() for stage in range(schedule.stages)]
    input_slots, grad_slots = (max(counts) for counts in zip(*slots, strict=True))
    return ScheduleTable(Ticks(**forward), Ticks(**backward), input_slots, grad_slots)


Interval = tuple[int, int, Task]
"""First and last tick in which a task needs a slot."""


def _assign_slots(intervals: list[Interval]) -> dict[Task, int]:
    """A slot for each task, so that no two tasks need one slot in one tick."""
    free_from: list[int] = []
    slots = {}
    for first, last, task in sorted(intervals, key=lambda interval: interval[:2]):
        slot = next((i for i, tick in enumerate(free_from) if tick <= first), len(free_from))
        free_from[slot : slot + 1] = [last + 1]
        slots[task] = slot
    return slots


class _StageFiller:
    """Fills one stage's columns of both halves of the table."""

    def __init__(self, s: Schedule, stage: int, forward: Columns, backward: Columns):
        self.s, self.stage, self.forward, self.backward = s, stage, forward, backward
        self.forward_order = {task: i for i, task in enumerate(s.forward_order)}
        self.backward_order = {task: i + s.delay + s.stages - 1 for i, task in enumerate(s.backward_order)}

    def forward_tick(self, task: Task, stage: int) -> int:
        return self.forward_order[task] + stage

    def backward_tick(self, task: Task, stage: int) -> int:
        return self.backward_order[task] - stage

    def fill(self) -> tuple[int, int]:
        """How many slots of each kind the stage needs."""
        inputs, grads = self._arrivals()
        slots = _assign_slots([self._input_interval(task, inputs) for task in self.s.forward_order])
        grad_slots = _assign_slots([(tick, self.backward_tick(task, self.stage), task) for task, tick in grads.items()])
        for task in self.s.forward_order:
            self._fill_task(self.forward, self.forward_tick(task, self.stage), task, inputs, grads)
            self._fill_task(self.backward, self.backward_tick(task, self.stage), task, inputs, grads)
            for half, tick in self._halves(task):
                half["slot"][tick, self.stage] = slots[task]
                half["grad_slot"][tick, self.stage] = grad_slots.get(task, 0)
            if task in inputs:
                self.forward["receive_slot"][inputs[task], self.stage] = slots[task]
            if task in grads:
                self.backward["receive_slot"][grads[task], self.stage] = grad_slots[task]
        self._mark_chunks()
        return 1 + max(slots.values()), 1 + max(grad_slots.values(), default=0)

    def _halves(self, task: Task) -> list[tuple[Columns, int]]:
        stage = self.stage
        return [(self.forward, self.forward_tick(task, stage)), (self.backward, self.backward_tick(task, stage))]

    def _arrivals(self) -> tuple[dict[Task, int], dict[Task, int]]:
        """The ticks in which inputs arrive from the previous stage, and gradients of outputs from the next."""
        stages, chunks, stage = self.s.stages, self.s.chunks, self.stage
        inputs, grads = {}, {}
        for task in self.s.forward_order:
            chunk, microbatch = task.chunk, task.microbatch
            if stage > 0:
                inputs[task] = self.forward_tick(task, stage - 1) + 1
            elif chunk > 0:
                inputs[task] = self.forward_tick(Task(chunk - 1, microbatch), stages - 1) + 1
            if stage < stages - 1:
                grads[task] = self.backward_tick(task, stage + 1) + 1
            elif chunk < chunks - 1:
                grads[task] = self.backward_tick(Task(chunk + 1, microbatch), 0) + 1
        return inputs, grads

    def _input_interval(self, task: Task, inputs: dict[Task, int]) -> Interval:
        return inputs.get(task, self.forward_tick(task, self.stage)), self.backward_tick(task, self.stage), task

    def _fill_task(self, half: Columns, tick: int, task: Task, inputs: dict, grads: dict) -> None:
        at = tick, self.stage
        half["active"][at] = True
        half["microbatch"][at], half["chunk"][at] = task.microbatch, task.chunk
        half["from_embedding"][at], half["to_head"][at] = task not in inputs, task not in grads

    def _mark_chunks(self) -> None:
        """When a stage changes to another chunk, and begins and ends backward of one."""
        tasks = [(self.forward_tick(task, self.stage), 0, task) for task in self.s.forward_order]
        tasks += [(self.backward_tick(task, self.stage), 1, task) for task in self.s.backward_order]
        loaded = None
        for tick, is_backward, task in sorted(tasks, key=lambda entry: entry[:2]):
            half = self.backward if is_backward else self.forward
            half["loads_chunk"][tick, self.stage] = task.chunk != loaded
            loaded = task.chunk
        for chunk in range(self.s.chunks):
            ticks = [self.backward_tick(task, self.stage) for task in self.s.forward_order if task.chunk == chunk]
            self.backward["first_of_chunk"][min(ticks), self.stage] = True
            self.backward["last_of_chunk"][max(ticks), self.stage] = True
