"""Numbers, lists and tables as text."""

from collections.abc import Iterable, Sequence

MAX_NAMES = 8


def format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def pluralize(count: int, noun: str) -> str:
    """`1 layer`, `2 layers`, `3 batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{ending}"


def abbreviate(names: Iterable[str]) -> str:
    """The first MAX_NAMES names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """One line per row, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
