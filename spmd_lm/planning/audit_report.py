"""The result of `spmd-lm audit` as text: expected collectives, compiled collectives, and where they differ."""

from collections.abc import Sequence
from typing import Any

from spmd_lm.analysis.ring import ALL_REDUCE, REDUCE_SCATTER
from spmd_lm.planning.audit import SLACK
from spmd_lm.runtime.formatting import format_bytes, format_table


def render(result: dict[str, Any]) -> str:
    """The whole report.  result: of `audit`."""
    r, mesh = result, " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items())
    sent, expected = (sum(row["bytes"] for row in r[key]) for key in ("collectives", "theory"))
    lines = [r["notice"]] if r["notice"] else []
    lines += [
        f"step of {r['config']} on {r['topology']}: {mesh}, compiled in {r['compile_seconds']:.1f} s",
        "",
        *_table("theory", r["theory"], "formula"),
        "",
        *_table("compiled", r["collectives"], "lowered_as"),
        "",
        *(_difference(d) for d in r["differences"] if d["missing_bytes"] + d["excess_bytes"] > SLACK),
        *_all_reduces_for_reduce_scatters(r["differences"]),
        f"wire    {format_bytes(sent)} per device and step; theory {format_bytes(expected)}; "
        f"missing {format_bytes(r['missing_bytes'])}, excess {format_bytes(r['excess_bytes'])} "
        f"(tolerance {format_bytes(r['tolerance_bytes'])})",
        *_stages(r["bytes_by_stage"]),
        *(f"waits   {each}: stages in different branches would wait here" for each in r["stages_that_may_wait"]),
        f"memory  {_memory(r['memory'])} per device",
        "matches theory" if r["ok"] else "does NOT match theory",
    ]
    return "\n".join(lines)


def _table(title: str, rows: list[dict[str, Any]], last: str) -> list[str]:
    cells = [(title, "over", "part", "dtype", "count", "wire", last.replace("_", " "))]
    for row in rows:
        count, wire = f"{row['count']:,.6g}", format_bytes(row["bytes"])
        cells.append((row["kind"], _axes(row), row["part"], row["dtype"], count, wire, row[last] or ""))
    return format_table(cells)


def _axes(row: dict[str, Any]) -> str:
    return " x ".join(row["axes"])


def _stages(sent: Sequence[float]) -> list[str]:
    if len(sent) < 2:
        return []
    busiest = max(range(len(sent)), key=lambda stage: sent[stage])
    return [f"stages  {format_bytes(min(sent))} to {format_bytes(sent[busiest])}, the most on stage {busiest}"]


def _memory(m: dict[str, Any]) -> str:
    """The compiler's figures: for some chips only the peak; a CPU's peak leaves temporaries out, and is not shown."""
    if not m["temporaries"]:
        return f"{format_bytes(m['arguments'])} arguments; peak {format_bytes(m['peak'])}"
    arguments, temporaries, total = (format_bytes(m[key]) for key in ("arguments", "temporaries", "total"))
    total = f"{arguments} arguments + {temporaries} temporaries = {total}"
    return total if m["peak"] < m["temporaries"] else f"{total}; peak {format_bytes(m['peak'])}"


def _difference(d: dict[str, Any]) -> str:
    amount = (
        f"{format_bytes(d['missing_bytes'])} missing"
        if d["missing_bytes"]
        else f"{format_bytes(d['excess_bytes'])} in excess"
    )
    return f"differs {d['kind']} over {_axes(d)}: {amount}"


def _all_reduces_for_reduce_scatters(differences: list[dict[str, Any]]) -> list[str]:
    """Reduce-scatters that were compiled to plain all-reduces, and what that costs."""
    missing = {_axes(d): d["missing_bytes"] for d in differences if d["kind"] == REDUCE_SCATTER}
    excess = {_axes(d): d["excess_bytes"] for d in differences if d["kind"] == ALL_REDUCE}
    return [
        f"cost    over {axes} an all-reduce replaces a reduce-scatter: "
        f"{format_bytes(excess[axes])} for {format_bytes(missing[axes])}"
        for axes in sorted(missing.keys() & excess.keys())
        if min(missing[axes], excess[axes]) > SLACK
    ]
