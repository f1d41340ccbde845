"""How throughput grows with devices, and loss falls with parameters and tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from spmd_lm.plots.lines import add_legend
from spmd_lm.plots.style import CYCLE, GRAY, WIDTH, Figure, format_tick, house_style, new_axes, printable

Points = Sequence[tuple[float, float]]
"""Pairs of a number of devices and the throughput of all of them, in any unit."""


@house_style()
def efficiency(
    measured: Mapping[str, Points],
    published: Mapping[str, Points] | None = None,
    *,
    scaling: Literal["weak", "strong"] = "weak",
    title: str | None = None,
    width: float = WIDTH,
) -> Figure:
    """Throughput against devices, relative to each series' smallest number of devices, beside the ideal.

    scaling: weak, with work that grows with the devices, shows the efficiency (throughput per device); strong, with the
    same work on more devices, the speed-up.  Measured series are solid with filled points, published ones dashed with
    hollow points, and the legend says which is which."""
    weak = scaling == "weak"
    figure, axes = new_axes(width, 2.9)
    entries: dict[str, Any] = {}
    counts: set[float] = set()
    for kind, all_series in (("measured", measured), ("published", published or {})):
        for name, points in all_series.items():
            color = CYCLE[len(entries) % len(CYCLE)]
            devices, throughput = np.array(sorted(points), float).T
            relative = throughput / throughput[0] / (devices / devices[0] if weak else 1)
            x = devices if weak else devices / devices[0]
            style: dict[str, Any] = {"linestyle": "-", "marker": "o"}
            if kind == "published":
                style = {"linestyle": "--", "marker": "s", "markerfacecolor": "white"}
            (line,) = axes.plot(x, relative, color=color, linewidth=1.5, markersize=6, **style)
            entries[f"{printable(name)} ({kind})"] = line
            counts |= set(x)
    ticks = sorted(counts) or [1.0]
    ideal = [1.0, 1.0] if weak else [ticks[0], ticks[-1]]
    (entries["ideal"],) = axes.plot([ticks[0], ticks[-1]], ideal, color=GRAY, linewidth=1.0, linestyle=":")
    axes.set_xscale("log", base=2)
    _label_devices(axes.xaxis, ticks)
    if weak:
        axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    else:
        axes.set_yscale("log", base=2)
        _label_devices(axes.yaxis, ticks)
    axes.set_title(printable(title, 60) if title is not None else f"{scaling} scaling")
    axes.set(xlabel="devices" if weak else "times as many devices", ylabel="efficiency" if weak else "times as fast")
    add_legend(figure, entries)
    return figure


def _percent(value: float, _: object = None) -> str:
    return f"{value:.0%}"


def _label_devices(axis: Any, ticks: Sequence[float]) -> None:
    """A label for each number of devices, thinned out to at most 7."""
    axis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 7)]))
    axis.set_major_formatter(FuncFormatter(format_tick))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
