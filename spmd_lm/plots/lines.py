"""Metrics of runs over steps or tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from spmd_lm.plots.style import (
    CYCLE,
    DASHES,
    GRAY,
    ORANGE,
    WIDTH,
    Figure,
    format_percent,
    format_tick,
    house_style,
    new_axes,
    printable,
    text_width,
)
from spmd_lm.runtime.metrics import is_number

MOST_POINTS = 1000  # per line: more than it has pixels

LABELS = {
    "loss": "loss (nats)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU (share of peak FLOP/s)",
    "loss_scale": "loss scale",
}
MOST_NAMES = 12  # in a legend

Records = Sequence[Mapping[str, Any]]


@house_style()
def curves(
    runs: Mapping[str, Records] | Records,
    key: str = "loss",
    *,
    over: str = "step",
    title: str | None = None,
    log: bool = False,
    size: tuple[float, float] = (WIDTH, 2.9),
) -> Figure:
    """One metric of several runs laid over each other; its evaluations, such as eval_loss for loss, are markers.

    runs: records of metrics.jsonl by the run's name, or the records of one run.
    over: "step" or "tokens".
    log: a logarithmic scale.
    size: inches.

    Long runs are thinned out to MOST_POINTS, keeping their extreme values; a value that is not a number leaves a
    gap."""
    named = runs if isinstance(runs, Mapping) else {"": runs}
    alone = len(named) == 1
    figure, axes = new_axes(*size)
    entries: dict[str, Any] = {}  # legend entries; evaluations come last
    evaluation: dict[str, Any] = {}
    for i, (name, records) in enumerate(named.items()):
        color, dashes = CYCLE[i % len(CYCLE)], DASHES[i // len(CYCLE) % len(DASHES)]
        label = "training" if alone else _unique(name, entries)
        x, y = series(records, key, over)
        if np.isfinite(y).any():
            (line,) = axes.plot(x, y, dashes, color=color, linewidth=1.5, marker=".", markevery=isolated(y))
            entries[label] = line
        x, y = series(records, f"eval_{key}", over)
        if np.isfinite(y).any():
            color = ORANGE if alone else color
            (dots,) = axes.plot(x, y, linewidth=0.8, color=color, marker="o", markersize=5, markeredgecolor="white")
            if alone or label in entries:  # otherwise training never recorded it
                evaluation.setdefault("evaluation", dots)
            else:
                entries[label] = dots
    label = LABELS.get(key, printable(key))
    axes.set_title(label if title is None else printable(title, 60))
    axes.set(xlabel=over, ylabel="" if title is None else label)
    _finish(axes, log, format_percent if key == "mfu" or key.endswith("accuracy") else format_tick)
    entries |= evaluation
    if entries and [*entries] != ["training"]:
        add_legend(figure, entries)
    if not entries:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GRAY)
        axes.set(xticks=[], yticks=[])
    return figure


def series(records: Records, key: str, over: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of a metric, thinned out: float arrays, with NaN for gaps."""
    points = [(each[over], each[key]) for each in records if key in each and isinstance(each.get(over), int | float)]
    x, y = np.array([[_number(a), _number(b)] for a, b in points], float).reshape(-1, 2).T
    return thin_out(x, np.where(np.isfinite(y), y, np.nan))


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def thin_out(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: the least and the greatest of each stretch, and a NaN if it has one."""
    if len(y) <= most:
        return x, y
    chosen = []
    for stretch in np.array_split(np.arange(len(y)), most // 3):
        values, gaps = y[stretch], np.isnan(y[stretch])
        if gaps.any():
            chosen.append(stretch[gaps.argmax()])
        if not gaps.all():
            chosen += [stretch[np.nanargmin(values)], stretch[np.nanargmax(values)]]
    points = np.unique([0, *chosen, len(y) - 1])
    return x[points], y[points]


def isolated(y: np.ndarray) -> list[int]:
    """Points between two gaps, which a line alone would not show."""
    padded = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    return [int(i) for i in np.flatnonzero(padded[1:-1] & ~padded[:-2] & ~padded[2:])]


def _unique(name: str, entries: Mapping[str, Any]) -> str:
    """A label that no other entry has; matplotlib would leave out one that begins with _."""
    label = printable(name)
    label = f" {label}" if label.startswith("_") else label
    while label in entries or label == "evaluation":
        label += " "
    return label


def _finish(axes: Any, log: bool, format_value: Callable[..., str]) -> None:
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines] or [np.ones(1)])
    if log and (values[np.isfinite(values)] > 0).all():
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(FuncFormatter(format_between_powers))
    axes.yaxis.set_major_formatter(FuncFormatter(format_value))
    axes.xaxis.set_major_formatter(FuncFormatter(format_tick))
    if not log:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def format_between_powers(value: float, position: object) -> str:
    """Labels of a logarithmic scale's minor ticks: 2 and 5 of each decade."""
    return format_tick(value) if f"{value:.0e}"[0] in "25" else ""


def add_legend(figure: Figure, entries: Mapping[str, Any]) -> None:
    """Adds a legend beneath the axes, which keep their height.  Beyond MOST_NAMES, entries are counted."""
    labels, handles = [*entries][:MOST_NAMES], [*entries.values()][:MOST_NAMES]
    if len(entries) > MOST_NAMES:
        labels[-1] = f"and {len(entries) - MOST_NAMES + 1} more"
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int((width - 0.2) / (max(map(text_width, labels)) + 0.55))))
    figure.set_size_inches(width, height + 0.21 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, handlelength=1.6, columnspacing=1.2)
