"""Attention of rows that a ring of devices shares, hop by hop."""

import numpy as np
from matplotlib.patches import Patch

from spmd_lm.plots.style import CYCLE, GRAY, PALE, WIDTH, Figure, abbreviated, house_style, tint

MOST_HOPS, PER_LINE = 8, 4


def chunks_of_device(device: int, devices: int, causal: bool) -> list[int]:
    """The chunks of a row whose tokens a device has: with a causal mask one from each end, in zig-zag."""
    return [device, 2 * devices - 1 - device] if causal else [device]


def ring_scores(hop: int, devices: int, causal: bool) -> dict[tuple[int, int], int]:
    """The device that computes the scores of (chunk of queries, chunk of keys), for those computed in this hop."""
    return {
        (i, j): device
        for device in range(devices)
        for i in chunks_of_device(device, devices, causal)
        for j in chunks_of_device((device - hop) % devices, devices, causal)
        if j <= i or not causal
    }


@house_style()
def ring(devices: int, causal: bool = True, *, width: float = 1.6 * WIDTH) -> Figure:
    """The scores of a row that each device computes with the keys and values at hand: a panel for each hop, queries
    from top to bottom, keys from left to right, in the color of the device.  Gray: computed in a hop before.  Beyond
    eight hops those in the middle are left out, and beyond fourteen devices colors repeat."""
    hops, chunks = abbreviated(devices, MOST_HOPS), devices * len(chunks_of_device(0, devices, causal))
    lines, per_line = -(-len(hops) // PER_LINE), min(PER_LINE, len(hops))
    figure = Figure(figsize=(width, lines * (width / per_line + 0.3) + 0.7), layout="constrained")
    panels = figure.subplots(lines, per_line, squeeze=False).flat
    colors = [tint(CYCLE[i % len(CYCLE)], 0.85 if i < len(CYCLE) else 0.35) for i in range(devices)]
    picture, hop = np.ones((chunks, chunks, 3)), 0
    for axes, shown in zip(panels, [*hops, *[None] * (lines * per_line - len(hops))], strict=True):
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.spines[:].set_visible(True)
        if shown is None:
            axes.set_axis_off()
            if figure.axes.index(axes) < len(hops):
                axes.text(0.5, 0.5, "…", ha="center", transform=axes.transAxes)
            continue
        while hop <= shown:  # those left out too
            picture[(picture != 1).any(-1)] = tint(GRAY, 0.25)
            for pair, device in ring_scores(hop, devices, causal).items():
                picture[pair] = colors[device]
            hop += 1
        axes.imshow(picture.copy(), interpolation="nearest", extent=(0, chunks, chunks, 0))
        axes.set_title(f"hop {shown}" if shown else "own keys", weight="normal")
    entries = [Patch(facecolor=color, label=str(i)) for i, color in enumerate(colors[: len(CYCLE) + 1])]
    entries += [Patch(facecolor=PALE, label="…")] * (devices > len(entries))
    figure.legend(
        handles=entries,
        loc="outside lower left",
        ncols=len(entries),
        handlelength=0.8,
        columnspacing=0.8,
        title="device",
    )
    return figure
