"""Shared style: colors, sizes of text, and a figure that notebooks display without pyplot.

Text is 11 pt in figures 4.2 inches wide, which is 12.4 pixels on a phone, where such a figure is 340 CSS pixels wide.
Text is never parsed as TeX: a run may be called `a_$b$`."""

import io
import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.patches import Rectangle

WIDTH = 4.2  # inches, of a figure with one pair of axes
TEXT = 11.0  # points, at least
PIXELS_PER_INCH = 81  # in an SVG: WIDTH is 340 CSS pixels

# Okabe and Ito's colors, which color-blind readers can tell apart; without their yellow, too pale on white.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "#555555")
DASHES = ("-", "--", ":", "-.")  # for the runs after the first of each color
INK, GRAY, PALE = "#1f2328", "#59636e", "#eef1f4"

STYLE: Any = {
    "axes.edgecolor": "#8c959f",
    "axes.formatter.use_mathtext": False,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": TEXT + 1,
    "axes.titleweight": "bold",
    "axes.unicode_minus": True,
    "figure.constrained_layout.h_pad": 0.05,
    "figure.constrained_layout.w_pad": 0.06,
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": TEXT,
    "grid.alpha": 0.7,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.7,
    "hatch.color": "#b6bec7",
    "hatch.linewidth": 0.8,
    "legend.fontsize": TEXT,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": GRAY,
    "xtick.labelsize": TEXT,
    "xtick.minor.pad": 3.5,
    "xtick.minor.size": 3.5,  # that of major ticks, so that labels of both are level
    "ytick.color": GRAY,
    "ytick.labelsize": TEXT,
}

FONTS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


@contextmanager
def house_style() -> Iterator[None]:
    """Applies STYLE while a figure is made, and while it is drawn, which makes its ticks; also a decorator."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a name in a script without glyphs
        yield


class Figure(MatplotlibFigure):
    """A matplotlib figure that a notebook displays, and that `savefig` writes to a file."""

    _number = itertools.count()

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """Renders at twice the displayed size, for fine screens."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=200)
        width, height = self.get_size_inches()
        return buffer.getvalue(), {"width": round(100 * width), "height": round(100 * height)}

    def savefig(self, *args: Any, **options: Any) -> None:
        with house_style():
            super().savefig(*args, **options)

    def to_svg(self, name: str = "") -> str:
        """An <svg> element for an HTML page, without namespaces, which HTML does not need.
        name: unique prefix of its ids on the page; by default a new one each time."""
        buffer, prefix = io.StringIO(), name or f"figure{next(self._number)}"
        with matplotlib.rc_context({"svg.hashsalt": prefix}):
            self.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        box = re.search(r'viewBox="[^"]*"', svg)
        assert box
        width = self.get_size_inches()[0] * PIXELS_PER_INCH
        svg = re.sub(r"^<svg[^>]*>", f'<svg {box[0]} style="min-width:{width:.0f}px">', svg)
        svg = svg.replace("xlink:href", "href").replace("'DejaVu Sans'", FONTS)
        svg = re.sub(r' id="(?![pmh][0-9a-f]{10})[^"]*"', "", svg)  # ids of groups, to which nothing refers
        return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size in inches, with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def new_canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure to draw on in inches, from the upper left corner."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    return figure, axes


def draw_box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], text: str, **options: Any) -> None:
    """Draws a rectangle with a text in it.  options: matplotlib's for Rectangle, and the text's `color`."""
    color = options.pop("color", INK)
    style: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.0} | options
    axes.add_patch(Rectangle(corner, *size, **style))
    axes.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", color=color)


def text_width(text: str, size: float = TEXT) -> float:
    """Upper bound of a line's width in inches: letters of DejaVu Sans are at most 0.6 of their size wide."""
    return 0.62 * len(text) * size / 72


def printable(text: object, most: int = 32) -> str:
    """An arbitrary name as a label: on one line, of at most `most` characters, valid in XML."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    return line if len(line) <= most else f"{line[: most - 8]}…{line[-7:]}"


def tint(color: str, share: float) -> tuple[float, float, float]:
    """`color` mixed with white.  share: the color's part of the mixture."""
    red, green, blue = matplotlib.colors.to_rgb(color)
    return 1 - share * (1 - red), 1 - share * (1 - green), 1 - share * (1 - blue)


def abbreviated(count: int, most: int) -> list[int | None]:
    """The numbers below `count`; beyond `most`, None stands for those left out of the middle."""
    if count <= most:
        return [*range(count)]
    return [*range(most // 2), None, *range(count - (most - 1) // 2, count)]


def format_tick(value: float, _: object = None) -> str:
    """A tick's label: 0.25, 12, 31.4k, 2M; powers of ten for very small values."""
    size = abs(value)
    for unit_size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit_size:
            return f"{value / unit_size:.6g}{unit}"
    if 1e-12 < size < 1e-2:
        digits, exponent = f"{value:.5e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value if size > 1e-12 else 0:.6g}"


def format_percent(value: float, _: object = None) -> str:
    return f"{100 * value:.6g}%"
