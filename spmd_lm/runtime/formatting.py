"""Figures and tables, for a person."""

from collections.abc import Sequence


def human(size: float) -> str:
    """Bytes, for a person."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def count(number: int, thing: str) -> str:
    plural = "es" if thing.endswith("ch") else "s"
    return f"{number} {thing}" + (plural if number != 1 else "")


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as aligned lines."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
