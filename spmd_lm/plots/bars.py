"""Bar charts of a step's memory and traffic per device, and of how a run's time was spent."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch

from spmd_lm.plots.lines import LABELS, add_legend
from spmd_lm.plots.style import (
    BLUE,
    CYCLE,
    GRAY,
    INK,
    ORANGE,
    PALE,
    RED,
    WIDTH,
    Figure,
    house_style,
    new_axes,
    printable,
    tint,
)
from spmd_lm.runtime.formatting import format_bytes, format_duration, format_quantity

BAR, LABEL = 0.22, 0.26  # inches: heights of a bar, and of the label above it


@house_style()
def memory(plans: Mapping[str, Any], capacity: float | None = None, *, width: float = WIDTH) -> Figure:
    """Planned bytes per device, stacked by kind: a bar for each plan.

    plans: plans or audits by name, as {"ZeRO-0": plan0, "ZeRO-3": plan3}; or one of them.
    capacity: bytes of a device, drawn as a line."""
    named = plans if all(isinstance(plan, Mapping) and "memory" in plan for plan in plans.values()) else {"": plans}
    tables = {name: plan["memory"].get("planned", plan["memory"]) for name, plan in named.items()}
    kinds = list(dict.fromkeys(kind for table in tables.values() for kind in table))
    colors = dict(zip(kinds, (tint(color, 0.75) for color in CYCLE * 3), strict=False))
    most = max([sum(table.values()) for table in tables.values()] + [capacity or 0])
    figure, axes = new_axes(width, 0.75 + len(tables) * (BAR + LABEL + 0.08))
    for i, (name, table) in enumerate(tables.items()):
        start = 0.0
        for kind, size in table.items():
            axes.barh(i + 0.16, size, left=start, height=0.42, color=colors[kind], edgecolor="white", linewidth=0.8)
            start += size
        label = f"{printable(name, 28)}:  " if name else ""
        axes.text(0, i - 0.12, f"{label}{format_bytes(start)}", va="bottom", color=INK)
    if capacity is not None:
        middles = [i + 0.16 for i in range(len(tables))]
        lowest, highest = ([y + shift for y in middles] for shift in (-0.3, 0.3))
        axes.vlines([capacity] * len(middles), lowest, highest, color=RED, linewidth=2)
    axes.set_title("memory per device")
    finish_bars(axes, len(tables), most)
    entries: dict[str, Any] = {kind: Patch(color=color) for kind, color in colors.items()}
    if capacity is not None:
        entries[f"limit {format_bytes(capacity)}"] = axes.collections[0]
    add_legend(figure, entries)
    return figure


def finish_bars(axes: Any, count: int, most: float) -> None:
    """Orders bars from the top down, and removes the axes."""
    axes.set(xlim=(0, most * 1.02 or 1), ylim=(count - 0.45, -0.5), xticks=[], yticks=[])
    axes.spines[["bottom", "left"]].set_visible(False)
    axes.grid(False)


@house_style()
def collectives(
    reports: Mapping[str, Any] | Sequence[Mapping[str, Any]], title: str | None = None, *, width: float = WIDTH
) -> Figure:
    """Bytes on the wire per device and step, by kind of collective and mesh axes: theory, and compiled if audited.
    reports: audits, or rows of theory, by name; or one of them."""
    alone = not isinstance(reports, Mapping) or {"theory", "collectives"} <= reports.keys()
    named: Any = {"": reports} if alone else reports
    bars: dict[str, list[tuple[str, float, Any]]] = defaultdict(list)
    for i, (name, report) in enumerate(named.items()):
        color = CYCLE[i % len(CYCLE)]
        hollow = {"facecolor": "white", "hatch": "////", "edgecolor": color}
        filled = {"facecolor": color, "edgecolor": color}
        audited = isinstance(report, Mapping)
        sources = [("theory", report["theory"] if audited else report, hollow)]
        sources += [("compiled", report["collectives"], filled)] if audited else []
        for source, rows, style in sources:
            for what, size in _by_axes(rows).items():
                bars[what].append((f"{printable(name, 24)} {source}".strip(), size, style))
    ranked = sorted(bars.items(), key=lambda item: -max(size for _, size, _ in item[1]))
    heights = [0.3 + 0.24 * len(each) for _, each in ranked]
    figure, axes = new_axes(width, 0.55 + sum(heights))
    most = max([size for _, each in ranked for _, size, _ in each], default=1)
    entries: dict[str, Any] = {}
    y = 0.0
    for (what, each), height in zip(ranked, heights, strict=True):
        axes.text(0, y + 0.2, what, va="bottom", color=INK)
        for j, (name, size, style) in enumerate(each):
            middle = y + 0.34 + 0.24 * j
            axes.barh(middle, size, height=0.18, linewidth=0.8, **style)
            axes.text(size + 0.02 * most, middle, format_bytes(size), va="center", color=GRAY)
            entries.setdefault(name, Patch(linewidth=0.8, **style))
        y += height
    axes.set_title("bytes sent per device and step" if title is None else printable(title, 60))
    finish_bars(axes, 1, most * 1.35)
    axes.set_ylim(y + 0.02, 0)
    if not ranked:
        axes.text(0.5, 0.5, "a step sends nothing", transform=axes.transAxes, ha="center", color=GRAY)
    elif len(entries) > 1:
        add_legend(figure, entries)
    return figure


def _by_axes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sizes: dict[str, float] = defaultdict(float)
    for row in rows:
        sizes[f"{row['kind']} over {' × '.join(row['axes'])}"] += row["bytes"]
    return sizes


BUCKET_COLORS = {
    "step": BLUE,
    "compile": ORANGE,
    **dict(zip(("init", "data", "eval", "checkpoint", "other"), CYCLE[2:], strict=True)),
    "lost": INK,
    "idle": PALE,
}


@house_style()
def goodput(runs: Mapping[str, Mapping[str, float]], *, width: float = WIDTH) -> Figure:
    """Shares of each run's wall-clock time.  runs: status.json's goodput, seconds by bucket, by the run's name."""
    figure, axes = new_axes(width, 0.5 + len(runs) * (BAR + LABEL + 0.08))
    entries: dict[str, Any] = {}
    for i, (name, spent) in enumerate(runs.items()):
        seconds = Counter[str]()
        for bucket, value in spent.items():  # other versions may have other buckets
            seconds[bucket if bucket in BUCKET_COLORS else "other"] += max(value, 0.0)  # type: ignore[assignment]
        total, start = sum(seconds.values()), 0.0
        for bucket in sorted(seconds, key=list(BUCKET_COLORS).index):
            share, color = seconds[bucket] / (total or 1), tint(BUCKET_COLORS[bucket], 0.75)
            axes.barh(i + 0.16, share, left=start, height=0.42, color=color, edgecolor="white", linewidth=0.8)
            start += share
            entries.setdefault(bucket, Patch(color=color))
        steps = seconds.get("step", 0) / (total or 1)
        label = f"{printable(name, 20)}:  " if len(runs) > 1 else ""
        axes.text(0, i - 0.12, f"{label}{format_duration(total)}, {steps:.0%} in steps", va="bottom")
    axes.set_title("time spent")
    finish_bars(axes, len(runs), 1.0)
    add_legend(figure, entries)
    return figure


@house_style()
def compare(values: Mapping[str, float], key: str, *, width: float = WIDTH) -> Figure:
    """One metric of several runs, a bar for each run."""
    figure, axes = new_axes(width, 0.55 + len(values) * (BAR + LABEL + 0.08))
    for i, (name, value) in enumerate(values.items()):
        axes.barh(i + 0.16, value, height=0.42, color=tint(BLUE, 0.75))
        text = f"{value:.1%}" if key == "mfu" else format_quantity(value)
        axes.text(0, i - 0.12, f"{printable(name)}:  {text}", va="bottom", color=INK)
    axes.set_title(LABELS.get(key, printable(key)))
    finish_bars(axes, len(values), max(values.values(), default=1.0))
    return figure
