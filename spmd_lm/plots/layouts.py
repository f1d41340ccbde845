"""Pictures of device meshes, and of the devices that hold each part of an array."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spmd_lm.axes import BATCH_AXES, CONTEXT, DATA, MODEL, OUTERMOST_FIRST, PIPE, axis_of
from spmd_lm.plots.style import (
    BLUE,
    CYCLE,
    GRAY,
    PALE,
    TEXT,
    WIDTH,
    Figure,
    abbreviated,
    draw_box,
    house_style,
    new_canvas,
    printable,
    text_width,
    tint,
)

LINE = 0.2  # inches between lines of text
MARGIN = 0.12  # inches
MOST_PANELS, MOST_ROWS, MOST_COLUMNS, MOST_NUMBERS = 4, 8, 8, 4


class DeviceGrid:
    """The mesh's axes, outermost first, and the devices at their coordinates."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = {axis: sizes[axis] for axis in sorted(sizes, key=_rank)}
        self.devices = math.prod(self.sizes.values())

    def axes(self, *names: str) -> list[str]:
        """Mesh axes of these names; a plan's `data` may be data0, data1, ..."""
        return [axis for axis in self.sizes if axis_of(axis) in names]

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def coordinates(self, axes: Sequence[str], index: int) -> dict[str, int]:
        """Coordinates of part `index` of an array divided over these axes."""
        coordinates = {}
        for axis in reversed(axes):
            index, coordinates[axis] = divmod(index, self.sizes[axis])
        return {axis: coordinates[axis] for axis in axes}

    def devices_at(self, coordinates: Mapping[str, int]) -> list[int]:
        """Devices with these coordinates; unnamed axes are free."""
        ranges = ([coordinates[axis]] if axis in coordinates else range(n) for axis, n in self.sizes.items())
        strides = [math.prod(list(self.sizes.values())[i + 1 :]) for i in range(len(self.sizes))]
        return [sum(map(operator.mul, each, strides)) for each in itertools.product(*ranges)]


def _rank(axis: str) -> tuple[int, str]:
    return OUTERMOST_FIRST.index(axis_of(axis)), axis


class BoxGrid(NamedTuple):
    """A grid of boxes for each of `panels`, with labelled rows and columns."""

    title: str
    notes: list[str]  # lines beneath
    panels: list[str]
    rows: list[str]
    columns: list[str]
    box: tuple[float, float]  # inches
    text: Callable[[int, int, int], str]  # by panel, row and column of the box
    color: Callable[[int, int, int], Any]


@house_style()
def draw_grid(t: BoxGrid) -> Figure:  # leaves out panels, rows and columns in the middle if there are too many
    limits = (MOST_PANELS, MOST_ROWS, MOST_COLUMNS)
    shown = [abbreviated(len(names), most) for names, most in zip((t.panels, t.rows, t.columns), limits, strict=True)]
    names = [["…" if i is None else all_[i] for i in s] for s, all_ in zip(shown, t[2:5], strict=True)]
    (panels, rows, columns), (panel_names, row_names, column_names) = shown, names
    gap, left = 0.18, MARGIN + max(map(text_width, row_names)) + 0.08
    panel_width, top = t.box[0] * len(columns), MARGIN + (3 if len(panels) > 1 else 2) * LINE + 0.16
    bottom, right = top + t.box[1] * len(rows), left + len(panels) * (panel_width + gap) - gap
    widest = max(text_width(line) for line in (t.title + "    ", *t.notes))
    figure, axes = new_canvas(max(WIDTH, right + MARGIN, widest), bottom + (len(t.notes) + 0.6) * LINE + MARGIN)
    left += max(0.0, (figure.get_size_inches()[0] - right - left) / 2)
    axes.text(MARGIN, MARGIN, t.title, va="top", weight="bold", size=TEXT + 1)
    for i, name in enumerate(row_names):
        axes.text(left - 0.08, top + (i + 0.5) * t.box[1], name, ha="right", va="center", color=GRAY)
    for number, (panel, panel_name) in enumerate(zip(panels, panel_names, strict=True)):
        x = left + number * (panel_width + gap)
        axes.text(x + panel_width / 2, top - LINE - 0.06, panel_name, ha="center", va="bottom")
        for j, name in enumerate(column_names):
            axes.text(x + (j + 0.5) * t.box[0], top - 0.05, name, ha="center", va="bottom", color=GRAY)
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
            corner = x + j * t.box[0], top + i * t.box[1]
            if panel is None or row is None or column is None:
                draw_box(axes, corner, t.box, "·", facecolor=PALE, color=GRAY)
            else:
                draw_box(axes, corner, t.box, t.text(panel, row, column), facecolor=t.color(panel, row, column))
    for i, note in enumerate(t.notes):
        axes.text(MARGIN, bottom + (i + 0.6) * LINE, note, va="top", color=GRAY)
    return figure


def mesh(plan: Mapping[str, Any]) -> Figure:
    """The devices as a grid along the mesh's axes: a panel per pipeline stage, a row per part of the batch, and the
    devices that share a layer side by side.  A large mesh is abbreviated.  plan: anything with a "mesh", such as a plan
    or an audit."""
    grid = DeviceGrid(plan["mesh"])
    stages, parts, shards = (grid.axes(*names) for names in ([PIPE], BATCH_AXES, [CONTEXT, MODEL]))

    def device(stage: int, part: int, shard: int) -> str:
        indices = zip((stages, parts, shards), (stage, part, shard), strict=True)
        coordinates = {axis: i for axes, index in indices for axis, i in grid.coordinates(axes, index).items()}
        return str(grid.devices_at(coordinates)[0])

    notes = ["rows: parts of the batch", "columns: parts of each layer"]
    if plan.get("platform") == "tpu":
        notes.append("counted along the mesh; a TPU's own ids follow its torus")
    divided = [axis for axis in parts if grid.sizes[axis] > 1] or [DATA]
    rows = [
        ", ".join(f"{axis} {i}" for axis, i in grid.coordinates(parts, row).items() if axis in divided)
        for row in range(grid.size(parts))
    ]
    divides = [axis for axis in shards if axis_of(axis) == MODEL or grid.sizes[axis] > 1]
    columns = [
        ", ".join(f"{axis} {i}" for axis, i in grid.coordinates(shards, column).items() if axis in divides)
        for column in range(grid.size(shards))
    ]
    return draw_grid(
        BoxGrid(
            title=" × ".join(f"{axis} {size}" for axis, size in plan["mesh"].items()),
            notes=notes,
            panels=[f"stage {i}" for i in range(grid.size(stages))] if grid.size(stages) > 1 else [""],
            rows=rows,
            columns=columns,
            box=(max(map(text_width, columns)) + 0.12, 0.34),
            text=device,
            color=lambda stage, part, shard: tint(CYCLE[stage % len(CYCLE)], 0.3),
        )
    )


class Dimension(NamedTuple):
    name: str
    size: int
    axes: tuple[str, ...]  # mesh axes that divide it
    bounds: list[tuple[int, int]]  # [start, stop) of each part

    @property
    def note(self) -> str:
        over = f" over {' × '.join(self.axes)}" if self.axes else ""
        parts = f"{len(self.bounds)} parts{over}" if len(self.bounds) > 1 else "not divided"
        return f"{self.name}, {self.size:,}: {parts}"


def sharding(plan: Mapping[str, Any], parameter_name: str) -> Figure:
    """A parameter's shards between two steps, with the numbers of the devices that hold each.  Raises KeyError, listing
    the parameters, for an unknown one."""
    parameters = {each["name"]: each for each in plan["parameters"]}
    if parameter_name not in parameters:
        raise KeyError(f"{parameter_name}: no such parameter. There are {', '.join(parameters)}.")
    parameter, grid = parameters[parameter_name], DeviceGrid(plan["mesh"])
    dimensions = []
    for name, size, axes in zip(*(parameter[key] for key in ("names", "shape", "spec")), strict=True):
        divided = tuple(axis for axis in grid.axes(*axes) if grid.sizes[axis] > 1)
        part = size // (count := grid.size(divided))
        bounds = [(i * part, (i + 1) * part) for i in range(count)]
        dimensions.append(Dimension(name or "size", size, divided, bounds))

    def holders(parts: Sequence[int]) -> list[int]:
        found: dict[str, int] = {}
        for dimension, index in zip(dimensions, parts, strict=True):
            found |= grid.coordinates(dimension.axes, index)
        return grid.devices_at(found)

    return draw_shards(parameter_name, dimensions, holders)


def sharding_of(array: Any, name: str = "array") -> Figure:
    """Shards of any jax.Array, with the ids of the devices that hold each."""
    bounds_of = {
        device.id: tuple(index.indices(size)[:2] for index, size in zip(indices, array.shape, strict=True))
        for device, indices in array.sharding.devices_indices_map(array.shape).items()
    }
    spec = tuple(getattr(array.sharding, "spec", ())) + (None,) * array.ndim
    dimensions = []
    for i, size in enumerate(array.shape):
        axes = spec[i] if isinstance(spec[i], tuple) else (spec[i],) if spec[i] else ()
        dimensions.append(Dimension(f"dimension {i}", size, axes, sorted({each[i] for each in bounds_of.values()})))

    def holders(parts: Sequence[int]) -> list[int]:
        wanted = tuple(dimension.bounds[index] for dimension, index in zip(dimensions, parts, strict=True))
        return sorted(device for device, bounds in bounds_of.items() if bounds == wanted)

    return draw_shards(name, dimensions, holders)


def draw_shards(name: str, dimensions: list[Dimension], holders: Callable[[Sequence[int]], list[int]]) -> Figure:
    """Draws all shards.  holders: maps a shard's index along each dimension to the devices that hold it."""
    divided = [i for i, dimension in enumerate(dimensions) if len(dimension.bounds) > 1]
    others = sorted(set(range(len(dimensions))) - set(divided), key=lambda i: -dimensions[i].size)
    chosen = sorted((divided + others)[: max(2, len(divided))])
    panels, rows, columns = drawn = ([None, None, None, *chosen])[-3:]  # dimensions, or None

    def parts(i: int | None) -> list[str]:
        if i is None or len(dimensions[i].bounds) == 1:
            return [""]
        return [f"{start}:{stop}" for start, stop in dimensions[i].bounds]

    def devices(panel: int, row: int, column: int) -> str:
        index = [0] * len(dimensions)
        for i, part in zip(drawn, (panel, row, column), strict=True):
            if i is not None:
                index[i] = part
        return _abbreviated_numbers(holders(index))

    labels = zip(("panels", "down", "across"), drawn, strict=True)
    notes = [f"{label}: {dimensions[i].note}" for label, i in labels if i is not None]
    notes += [f"each shard has all of {d.name}, {d.size:,}" for i, d in enumerate(dimensions) if i not in chosen]
    undrawn = [dimensions[i] for i in chosen if i not in drawn]
    notes += [f"{d.note}; drawn are the shards of {d.name} {':'.join(map(str, d.bounds[0]))}" for d in undrawn]
    copies = len(holders([0] * len(dimensions)))
    notes.append("numbers: the devices that hold a shard" + (f", {copies} for each" if copies > 1 else ""))
    texts = [devices(i, j, k) for i, j, k in itertools.product(*(range(len(parts(d))) for d in drawn))]
    widest_text = max(texts + parts(columns), key=len)
    box = max(0.5, text_width(widest_text) + 0.06), 0.44
    grid = BoxGrid(
        title=printable(f"{name} [{', '.join(str(d.size) for d in dimensions)}]", 60),
        notes=notes,
        panels=[""] if panels is None else [f"{dimensions[panels].name} {part}" for part in parts(panels)],
        rows=parts(rows),
        columns=parts(columns),
        box=box,
        text=devices,
        color=lambda panel, row, column: tint(BLUE, 0.34 if (panel + row + column) % 2 else 0.18),
    )
    return draw_grid(grid)


def _abbreviated_numbers(numbers: list[int]) -> str:
    if len(numbers) <= MOST_NUMBERS:
        return " ".join(map(str, numbers))
    return f"{numbers[0]} {numbers[1]} … {numbers[-1]}"
