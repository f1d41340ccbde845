"""Closed forms of what `schedule_table` counts tick by tick (runs, sends and slots), for planners that compare
thousands of layouts."""

import functools
from typing import NamedTuple, Self

from spmd_lm.parallel.pipeline.schedule import Kind


class ScheduleCounts(NamedTuple):
    """Means over the stages, of one step, except for ticks and slots, which all stages have.

    ticks: of the loops with a forward half, and of those with a backward half.  active: tasks in each half.  first,
    last: tasks that begin with the embedding, or end in the head.  received: tasks whose input, or whose output's
    gradient, another stage sends.  new_chunks, chunk_ends: how often a stage of a breadth-first schedule starts on
    another chunk, forward and backward, and completes a chunk's gradients.  per_step: 1 / stages, for what only one
    stage runs once.  input_slots, output_grad_slots: of `ScheduleTable`."""

    ticks: int
    active: float
    first: float
    last: float
    received: float
    new_chunks: float
    chunk_ends: float
    per_step: float
    bubble: float
    input_slots: int
    output_grad_slots: int

    def with_idle_stages(self) -> Self:
        """Counts where idle stages compute too, and discard the result: every tick runs all that it may."""
        n = self.ticks
        return self._replace(active=n, first=n, last=n, received=2 * n, new_chunks=2 * n, chunk_ends=n, per_step=1.0)


@functools.cache
def schedule_counts(kind: Kind, stages: int, microbatches: int, chunks: int = 1) -> ScheduleCounts:
    """Counts of `make_schedule` with the same arguments."""
    p, m, v = stages, microbatches, chunks
    depth_first = kind in ("1f1b", "interleaved")
    return ScheduleCounts(
        # Depth-first schedules have both halves in one loop.
        ticks=m * v + p - 1 + (v * p - 1 if depth_first else 0),
        active=m * v,
        first=m / p,
        last=m / p,
        received=2 * m * (v * p - 1) / p,
        new_chunks=2 * v - 1,  # backward begins with the chunk that forward ended with
        chunk_ends=v,
        per_step=1 / p,
        bubble=(p - 1) / (v * m),
        input_slots=min(m * v, v * p + p - 1) if depth_first else m * v,
        output_grad_slots=1 if depth_first or v == 1 else m - p + 1,
    )
