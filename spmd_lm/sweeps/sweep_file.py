"""A sweep's file: keys of a configuration that vary, and the resulting cells.

    name: widths
    config: ../debug.yaml                        # relative to this file, or the name of a shipped one
    grid:                                        # every combination
      parallel.model: [1, 2, 4]
      optim.lr: {geomspace: [1e-4, 1e-2, 3]}     # first, last, count; as numpy's
      train.steps: 20                            # a single value: the same in all cells
    zip:                                         # keys that vary together; a list of such mappings is crossed
      id: [small, large]                         # optional: names in a cell's ID
      model.width: [64, 128]
      model.heads: [4, 8]
    when: parallel.model <= model.heads          # one condition or a list: conditions.py
    published:                                   # efficiencies to compare with the measured ones, and their source
      source: arXiv:1909.08053, Figure 5
      efficiency: {model parallel: {1: 1.0, 2: 0.95}}

A cell's ID names its values from the lists, as in `model-2_lr-0.001_small`; it stays the same if values are added."""

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm.config.load import locate, read_yaml_file
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.errors import ConfigError
from spmd_lm.sweeps.conditions import Condition

KEYS = ("name", "config", "grid", "zip", "when", "published")
CELL_KEYS = ("run.dir", "run.name")
MOST_CELLS = 10_000
LONGEST_ID = 100  # characters; file systems allow names of 255 bytes

Values = dict[str, Any]  # by section.key


class Alternative(NamedTuple):
    """Values that occur together in a cell."""

    values: Values
    name: str | None = None  # stands for the values in the cell's ID


@dataclass(frozen=True)
class SweepFile:
    path: Path
    name: str
    config: Path
    factors: list[list[Alternative]]  # a cell has one alternative from each list
    constants: Values
    conditions: list[Condition]
    published: dict[str, Any] = field(default_factory=dict)

    def combinations(self) -> list[tuple[str, Values]]:
        """ID and values of every cell, before `when`.  Raises ConfigError if there are too many."""
        if (count := math.prod(map(len, self.factors))) > MOST_CELLS:
            raise ConfigError(f"{self.path}: {count:,} cells. Vary less: at most {MOST_CELLS:,}.")
        cells = [*itertools.product(*self.factors)]
        values = [{key: each.values[key] for each in cell for key in each.values} for cell in cells]
        return [*zip(cell_ids(cells), values, strict=True)]


def read_sweep(path: Path) -> SweepFile:
    """Raises ConfigError with one line per problem."""
    problems: list[str] = []
    path = locate(path)
    tree = read_yaml_file(str(path), str(path), problems)
    if problems or tree is None:
        raise ConfigError(*(problems or [f"{path}: empty. Give {', '.join(KEYS[:3])}."]))
    for key in [key for key in tree if key not in KEYS]:
        near = did_you_mean(str(key), KEYS)
        advice = f"Did you mean {near}?" if near else f"Known: {', '.join(KEYS)}."
        problems.append(f"{key}: unknown key. {advice}")
    name, config = tree.get("name"), tree.get("config")
    if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]{0,99}", name):
        problems.append(f"name: expected letters, digits, '.', '_' or '-', got {name!r:.40}.")
    if not isinstance(config, str):
        problems.append(f"config: expected the name of a configuration, relative to this file, got {config!r:.40}.")
    factors, constants = _read_factors(tree, problems)
    conditions = _read_conditions(tree.get("when", []), problems)
    published = _read_published(tree.get("published", {}), problems)
    if problems:
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    config = locate(path.parent / str(config), str(config))
    return SweepFile(path, str(name), config, factors, constants, conditions, published)


def _read_factors(tree: Mapping[str, Any], problems: list[str]) -> tuple[list[list[Alternative]], Values]:
    """The factors of `grid` and `zip`, and the constants."""
    grid, zips = tree.get("grid", {}), tree.get("zip", [])
    zips = [zips] if isinstance(zips, dict) else zips
    factors: list[list[Alternative]] = []
    constants: Values = {}
    if not isinstance(grid, dict) or not isinstance(zips, list) or not all(isinstance(each, dict) for each in zips):
        problems.append("grid and zip: expected mappings of section.key to lists of values.")
        return factors, constants
    for key, given in grid.items():
        values = _read_values(f"grid: {key}", given, problems)
        if values is None:
            constants[key] = given
        else:
            factors.append([Alternative({key: value}) for value in values])
    factors += (_read_zip(group, problems) for group in zips)
    repeated = Counter(key for key in [*grid, *itertools.chain(*zips)] if key != "id" or key in grid)
    problems += [f"{key}: stands twice in grid and zip. Leave one." for key, n in repeated.items() if n > 1]
    problems += [f"{key}: expected section.key." for key in repeated if not re.fullmatch(r"\w+(\.\w+)+", str(key))]
    problems += [f"{key}: the sweep sets it for each cell. Remove it." for key in repeated if key in CELL_KEYS]
    parts = [(key, other) for key in repeated for other in repeated if str(other).startswith(f"{key}.")]
    problems += [f"{key}: {other} is a part of it. Leave one." for key, other in parts]
    if not factors and not problems:
        problems.append("grid: nothing varies. Give a key and a list of its values, as in parallel.model: [1, 2].")
    return factors, constants


def _read_zip(group: Mapping[str, Any], problems: list[str]) -> list[Alternative]:
    lists = {key: _read_values(f"zip: {key}", given, problems) for key, given in group.items()}
    lengths = {key: len(values or []) for key, values in lists.items()}
    if None in lists.values() or len({*lengths.values()}) > 1:
        said = ", ".join(f"{key} {length or 'no'}" for key, length in lengths.items())
        problems.append(f"zip: expected lists of the same length, got {said} values.")
        return []
    names = lists.pop("id", None)
    rows = zip(*(values or [] for values in lists.values()), strict=True)
    alternatives = [dict(zip(lists, row, strict=True)) for row in rows]
    if not lists:
        problems.append("zip: nothing varies. Give keys and lists of their values, or remove it.")
    elif names and _have_equal([_as_text(str(name)) for name in names]):
        problems.append("zip: id: a name stands twice. Letters, digits, '.', '_' and '-' must tell them apart.")
    elif not names and _have_equal(alternatives):
        problems.append(f"zip: {', '.join(lists)}: the same values stand twice. Leave one, or give each an id.")
    return [Alternative(each, str(names[i]) if names else None) for i, each in enumerate(alternatives)]


def _read_values(where: str, given: Any, problems: list[str]) -> list[Any] | None:
    """The values of a list or a range; None for a single value."""
    if isinstance(given, dict) and given.keys() == {"geomspace"}:
        return _geomspace(where, given["geomspace"], problems)
    if not isinstance(given, list):
        return None
    if not given:
        problems.append(f"{where}: no values. Give some, or remove the key.")
    if where.startswith("grid") and _have_equal(given):
        problems.append(f"{where}: a value stands twice. Leave one.")
    return given


def _have_equal(values: Sequence[Any]) -> bool:
    return len({json.dumps(value, default=str) for value in values}) < len(values)


def _geomspace(where: str, arguments: Any, problems: list[str]) -> list[Any]:
    """Values with equal ratios, both ends included, at six digits; integers if both ends are."""
    match arguments:
        case [int() | float() as first, int() | float() as last, int() as count] if (
            min(first, last) > 0 and first != last and 2 <= count <= MOST_CELLS
        ):
            values = [float(f"{first * (last / first) ** (i / (count - 1)):.6g}") for i in range(count)]
            integers = isinstance(first, int) and isinstance(last, int)
            values = [round(value) for value in values] if integers else values
            if len({*values}) == count:
                return values
    problems.append(
        f"{where}: expected geomspace: [first, last, count] of 2 to {MOST_CELLS:,} different positive values, "
        f"got {arguments!r:.40}."
    )
    return []


def _read_conditions(given: Any, problems: list[str]) -> list[Condition]:
    conditions = []
    for text in given if isinstance(given, list) else [given]:
        try:
            if not isinstance(text, str):
                raise ConfigError(f"when: expected a condition, as in parallel.model <= 4, got {text!r:.40}.")
            conditions.append(Condition(text))
        except ConfigError as error:
            problems += error.problems
    return conditions


def _read_published(given: Any, problems: list[str]) -> dict[str, Any]:
    match given:
        case {"source": str(), "efficiency": dict() as series, **rest} if not rest and all(
            isinstance(points, dict)
            and points
            and all(
                type(n) is int and n > 0 and isinstance(x, int | float) and 0 < x < math.inf for n, x in points.items()
            )
            for points in series.values()
        ):
            return given
        case dict() if not given:
            return {}
    problems.append(
        "published: expected source: text, efficiency: {series: {devices: efficiency}}, as in {1: 1.0, 2: 0.95}."
    )
    return {}


def cell_ids(cells: Iterable[Sequence[Alternative]]) -> list[str]:
    """A name for each cell's directory, made of its values."""
    cells = list(cells)
    keys = dict.fromkeys(key for cell in cells for each in cell for key in each.values)
    last_words = Counter(key.rpartition(".")[2] for key in keys)

    def text(each: Alternative) -> str:
        if each.name is not None:
            return _as_text(each.name)
        words = [(key, key.rpartition(".")[2]) for key in each.values]
        names = [word if last_words[word] == 1 else key.replace(".", "-") for key, word in words]
        return "_".join(f"{name}-{_as_text(value)}" for name, value in zip(names, each.values.values(), strict=True))

    ids = ["_".join(map(text, cell)) for cell in cells]
    count = Counter(ids)
    return [
        id if len(id) <= LONGEST_ID and count[id] == 1 else f"{id[: LONGEST_ID - 9]}-{_digest(cell)}"
        for id, cell in zip(ids, cells, strict=True)
    ]


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return re.sub(r"[^\w.-]+", "-", text).strip(".") or "empty"


def _digest(cell: Sequence[Alternative]) -> str:
    return hashlib.sha256(json.dumps([each.values for each in cell], default=str).encode()).hexdigest()[:8]
