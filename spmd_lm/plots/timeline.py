"""The timeline of one step by stage: computing, waiting for communication, and idle."""

import itertools
import operator
from typing import Any

from spmd_lm.parallel.pipeline.schedule import IDLE, Schedule
from spmd_lm.plots.pipelines import BACKWARD_TIME, MOST_STAGES
from spmd_lm.plots.style import BLUE, GREEN, ORANGE, PALE, PURPLE, RED, WIDTH, Figure, abbreviated, house_style, tint

COLORS = {
    "forward": tint(BLUE, 0.4),
    "backward": tint(ORANGE, 0.4),
    "idle": PALE,
    "exposed": RED,
    "host": PURPLE,
    "optimizer": GREEN,
}


@house_style()
def timeline(schedule: Schedule, parts: dict[str, float]) -> Figure:
    """A bar for each stage, in seconds.
    parts: compute, exposed, bubble, host and optimizer of a step; exposed time is drawn after the work, wherever it
      occurs."""
    stages = abbreviated(schedule.stages, MOST_STAGES)
    figure = Figure(figsize=(1.6 * WIDTH, 1.1 + 0.28 * len(stages)), layout="constrained")
    axes = figure.add_subplot()
    shown = [stage for stage in stages if stage is not None]
    for row, stage in enumerate(shown):
        for kind, start, seconds in spans(schedule, stage, parts):
            axes.barh(row, seconds, left=start, height=0.8, color=COLORS[kind], edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(shown)), [f"stage {stage}" for stage in shown] if schedule.stages > 1 else ["step"])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.grid(axis="y", visible=False)
    used = [kind for kind in COLORS if any(kind == each for each, *_ in spans(schedule, shown[0], parts))]
    handles: list[Any] = [axes.barh(0, 0, color=COLORS[kind]) for kind in used]
    figure.legend(handles, used, loc="outside upper left", ncols=len(used))
    return figure


def spans(schedule: Schedule, stage: int, parts: dict[str, float]) -> list[tuple[str, float, float]]:
    """(kind, start, seconds) of a stage, in order of time.  A tick takes as long as its busiest stage."""
    halves = ("forward", schedule.forward, 1.0), ("backward", schedule.backward, BACKWARD_TIME)
    units = [
        (kind if table[tick, stage] != IDLE else "idle", length)
        for tick in range(schedule.ticks)
        for kind, table, length in halves
        if (table[tick] != IDLE).any()
    ]
    unit = (parts["compute"] + parts["bubble"]) / sum(length for _, length in units)
    found, now = list[tuple[str, float, float]](), 0.0
    for kind, group in itertools.groupby(units, key=operator.itemgetter(0)):
        lengths = [length * unit for _, length in group]
        for seconds in [sum(lengths)] if kind == "idle" else lengths:
            found.append((kind, now, seconds))
            now += seconds
    for kind in ("exposed", "host", "optimizer"):
        if parts[kind]:
            found.append((kind, now, parts[kind]))
            now += parts[kind]
    return found
