"""Formats numbers, lists, tables and JSON as text."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_NAMES = 8
LARGEST_COUNT = 2**31 - 1  # devices count steps in 32 bits
LARGEST_PRICE, LARGEST_TOKENS = 1e6, 1e18  # dollars for a device and hour; tokens of a run


def parse_count(text: str, most: int = LARGEST_COUNT) -> int | None:
    """The whole number written in digits 0 to 9; None for other text, or above `most`."""
    if not re.fullmatch("[0-9]{1,19}", text):
        return None
    return number if (number := int(text)) <= most else None


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_range(bounds: Iterable[float], write: Callable[[float], str]) -> str:
    """`1.9 to 3.4`, or one number if both are written alike."""
    return " to ".join(dict.fromkeys(map(write, bounds)))


def format_quantity(number: float) -> str:
    """Three digits and a unit: 31_400 is 31.4k."""
    unit = ""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            number, unit = number / size, name
            break
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"


def format_duration(seconds: float) -> str:
    """The two largest units: 0.4s, 12s, 1m12s, 3h05m, 2d04h."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    rounded = round(seconds)
    for size, unit, smaller_size, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if rounded >= size:
            return f"{rounded // size}{unit}{rounded % size // smaller_size:02d}{smaller_unit}"
    return f"{rounded}s"


def pluralize(count: int, noun: str) -> str:
    """`1 layer`, `2 layers`, `3 batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def abbreviate(names: Iterable[str]) -> str:
    """The first MAX_NAMES names, and the number of others."""
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """One line per row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with null for NaN and infinity, which it cannot express."""
    return json.dumps(without_nan(value), indent=indent, allow_nan=False)


def without_nan(value: Any) -> Any:
    """Replaces NaN and infinity by None."""
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
