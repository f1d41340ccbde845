"""What the experts of a run receive."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from spmd_lm.plots.style import BLUE, ORANGE, WIDTH, Figure, house_style, new_axes

BALANCED = LinearSegmentedColormap.from_list("balanced", [BLUE, "white", ORANGE])


@house_style()
def expert_load(load: Sequence[Sequence[float]], *, width: float = WIDTH) -> Figure:
    """Tokens that choose each expert in one step, in multiples of an even share: a row for each layer with experts.

    load: expert_load of metrics.jsonl, [layers with experts, experts]."""
    shares = np.array(load, float)
    layers, experts = shares.shape
    figure, axes = new_axes(width, min(6.0, 1.6 + 0.22 * layers))
    image = axes.imshow(shares, cmap=BALANCED, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
    axes.set_title("load of experts")
    axes.set(xlabel="expert", ylabel="layer with experts")
    axes.grid(visible=False)
    for axis, size in ((axes.xaxis, experts), (axes.yaxis, layers)):
        axis.set_major_locator(MaxNLocator(nbins=min(size, 6), integer=True))
    axes.set(xlim=(-0.5, experts - 0.5), ylim=(layers - 0.5, -0.5))
    bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 2], extend="max" if shares.max() > 2 else "neither")
    bar.ax.set_yticklabels(["none", "even", "twice"])
    return figure
