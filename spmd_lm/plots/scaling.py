"""Pictures of efficiency against devices, and of loss against parameters or tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from spmd_lm.plots.lines import add_legend, format_between_powers
from spmd_lm.plots.style import (
    CYCLE,
    GRAY,
    WIDTH,
    Figure,
    format_percent,
    format_tick,
    house_style,
    new_axes,
    printable,
)
from spmd_lm.runtime.formatting import format_quantity

EfficiencySeries = Mapping[str, Mapping[int, float]]  # by series and number of devices; 1.0 at the fewest


@house_style()
def efficiency(
    measured: EfficiencySeries,
    published: EfficiencySeries | None = None,
    *,
    title: str = "scaling efficiency",
    width: float = WIDTH,
) -> Figure:
    """Efficiency against devices.  Measured series are solid with filled points, published ones dashed with hollow
    points; 100% is a dotted line."""
    figure, axes = new_axes(width, 2.9)
    entries: dict[str, Any] = {}
    for kind, all_series in (("measured", measured), ("published", published or {})):
        for name, points in all_series.items():
            color = CYCLE[len(entries) % len(CYCLE)]
            style: dict[str, Any] = {"linestyle": "-", "marker": "o"}
            if kind == "published":
                style = {"linestyle": "--", "marker": "s", "markerfacecolor": "white"}
            (line,) = axes.plot(*zip(*sorted(points.items()), strict=True), color=color, linewidth=1.5, **style)
            entries[f"{printable(name)} ({kind})"] = line
    devices = sorted({n for series in (measured, published or {}) for points in series.values() for n in points})
    axes.axhline(1.0, color=GRAY, linewidth=1.0, linestyle=":")
    axes.set_xscale("log", base=2)
    _label_devices(axes.xaxis, devices or [1])
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(FuncFormatter(format_percent))
    axes.set_title(printable(title, 60))
    axes.set(xlabel="devices", ylabel="efficiency")
    add_legend(figure, entries)
    return figure


@house_style()
def scaling_law(
    points: Sequence[tuple[float, float, float]],
    law: Any,
    *,
    over: Literal["tokens", "parameters"] = "tokens",
    title: str = "loss (nats)",
    width: float = WIDTH,
) -> Figure:
    """Losses of finished runs, and the fitted law with its band: over tokens, a curve for each number of parameters;
    over parameters, a curve for each number of tokens.  Outliers of the fit are hollow.

    points: parameters, tokens and loss of each run.
    law: an analysis.scaling_law.ScalingLaw, or any object whose predict(parameters, tokens) returns the expected losses
      and the lower and upper ends of their band."""
    figure, axes = new_axes(width, 2.9)
    entries: dict[str, Any] = {}
    runs = np.array(points, float).reshape(-1, 3)
    x, y, groups = runs[:, int(over == "tokens")], runs[:, 2], runs[:, int(over == "parameters")]
    outlier = np.isin(np.arange(len(runs)), list(getattr(law, "outliers", ())))
    for i, group in enumerate(np.unique(groups)):
        color = CYCLE[i % len(CYCLE)]
        grid = np.geomspace(x.min() / 1.3, x.max() * 1.3, 100)
        fixed = np.full_like(grid, group)
        value, low, high = law.predict(fixed, grid) if over == "tokens" else law.predict(grid, fixed)
        axes.fill_between(grid, low, high, color=color, alpha=0.18, linewidth=0)
        (line,) = axes.plot(grid, value, color=color, linewidth=1.5)
        chosen = groups == group
        axes.plot(x[chosen & ~outlier], y[chosen & ~outlier], "o", color=color, markersize=6)
        axes.plot(x[chosen & outlier], y[chosen & outlier], "o", color=color, markersize=6, markerfacecolor="white")
        entries[f"{format_quantity(group)} {'parameters' if over == 'tokens' else 'tokens'}"] = line
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(format_tick))
    axes.xaxis.set_minor_formatter(FuncFormatter(format_between_powers))
    axes.yaxis.set_major_formatter(FuncFormatter(format_tick))
    axes.set_title(printable(title, 60))
    axes.set_xlabel(over)
    if entries:
        add_legend(figure, entries)
    return figure


def _label_devices(axis: Any, ticks: Sequence[float]) -> None:
    """Labels at most 7 numbers of devices."""
    axis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 7)]))
    axis.set_major_formatter(FuncFormatter(format_tick))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
