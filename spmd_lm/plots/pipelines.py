"""A pipeline's schedule, to scale."""

from collections.abc import Mapping
from typing import Any, get_args

from spmd_lm.parallel.pipeline.schedule import IDLE, Kind, PipelineTask, Schedule, make_schedule
from spmd_lm.plots.style import (
    BLUE,
    GRAY,
    INK,
    ORANGE,
    PALE,
    TEXT,
    WIDTH,
    Figure,
    abbreviated,
    draw_box,
    house_style,
    new_canvas,
    text_width,
    tint,
)

MARGIN, LINE, HEIGHT = 0.12, 0.24, 0.34  # inches
MOST_TICKS, MOST_STAGES = 40, 16
BACKWARD_TIME = 2  # relative to a forward task's


def schedule(plan: Mapping[str, Any] | Kind, stages: int = 4, microbatches: int = 8, chunks: int = 1) -> Figure:
    """The microbatches that each stage runs forward and backward, over time; idle time is hatched.  A backward task
    takes twice as long as a forward one, and a tick as long as its busiest stage.
    plan: the plan of a run with a pipeline, or the name of a schedule, which the other arguments complete.  Raises
      ValueError for a plan without a pipeline, or an unknown schedule."""
    if isinstance(plan, str):
        if plan not in get_args(Kind):
            raise ValueError(f"{plan}: no such schedule. There are {', '.join(get_args(Kind))}.")
        return draw_schedule(make_schedule(plan, stages, microbatches, chunks))
    if (p := plan["pipeline"]) is None:
        raise ValueError("The plan has no pipeline: set parallel.pipe to 2 or more.")
    return draw_schedule(make_schedule(p["schedule"], p["stages"], p["microbatches"], p["chunks"]))


@house_style()
def draw_schedule(s: Schedule) -> Figure:
    halves = (s.forward, s.forward_order, 1, BLUE), (s.backward, s.backward_order, BACKWARD_TIME, ORANGE)
    widest = max(text_width(_name(s, task)) for task in s.forward_order)
    unit = max(0.24, widest + 0.04)  # inches of a forward task
    stages = abbreviated(s.stages, MOST_STAGES)
    left, top = MARGIN + text_width("stage 00"), MARGIN + 2.3 * LINE
    columns, gaps = [], []  # (start, width, tick, half) of each half tick with work; starts of gaps
    x = left
    for tick in abbreviated(s.ticks, MOST_TICKS):
        if tick is None:
            gaps.append(x)
            x += unit
            continue
        for half in halves:
            if (half[0][tick] != IDLE).any():
                columns.append((x, half[2] * unit, tick, half))
                x += half[2] * unit
    figure, axes = new_canvas(max(WIDTH, x + MARGIN), top + HEIGHT * len(stages) + 2.2 * LINE + MARGIN)
    what = f"{s.kind}: {s.stages} stages, {s.microbatches} microbatches"
    axes.text(MARGIN, MARGIN, what, va="top", weight="bold", size=TEXT + 1)
    work = f"{s.chunks} chunks per stage, " if s.chunks > 1 else ""
    axes.text(MARGIN, MARGIN + LINE, f"{work}bubble {s.bubble:.1%} of the work", va="top", color=GRAY)
    for i, stage in enumerate(stages):
        y = top + i * HEIGHT
        name = "⋮" if stage is None else f"stage {stage}"
        axes.text(left - 0.08, y + HEIGHT / 2, name, ha="right", va="center", color=GRAY)
        for start, width, tick, (table, order, _, color) in columns if stage is not None else []:
            size, index = (width, HEIGHT), table[tick, stage]
            if index == IDLE:
                draw_box(axes, (start, y), size, "", facecolor=PALE, hatch="////")
            else:
                shade = tint(color, 0.3 + 0.35 * order[index].chunk / max(1, s.chunks - 1))
                draw_box(axes, (start, y), size, _name(s, order[index]), facecolor=shade, color=INK)
        for start in gaps:
            axes.text(start + unit / 2, y + HEIGHT / 2, "…", ha="center", va="center", color=GRAY)
    _draw_legend(axes, top + HEIGHT * len(stages) + 0.5 * LINE)
    return figure


def _name(s: Schedule, task: PipelineTask) -> str:
    """The microbatch's number, with a letter for the chunk if there are several."""
    letter = chr(ord("a") + task.chunk % 26) if s.chunks > 1 else ""
    return f"{task.microbatch}{letter}"


def _draw_legend(axes: Any, y: float) -> None:
    x = MARGIN
    for name, options in (
        ("forward", {"facecolor": tint(BLUE, 0.4)}),
        ("backward", {"facecolor": tint(ORANGE, 0.4)}),
        ("idle", {"facecolor": PALE, "hatch": "////"}),
    ):
        draw_box(axes, (x, y), (0.24, 0.2), "", **options)
        axes.text(x + 0.3, y + 0.1, name, va="center")
        x += 0.3 + text_width(name) + 0.2
    axes.text(x, y + 0.1, "→ time", va="center", color=GRAY)
