"""Report of `spmd-lm plan --search`: the fastest layout, the cost of any other choice, and a published rule's."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd_lm.axes import MESH_AXES
from spmd_lm.config.load import dump
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.step_time import step_range
from spmd_lm.errors import CompilerError, OutputError
from spmd_lm.files import write_atomically
from spmd_lm.planning.search import CostedLayout, Search, best_of, speed
from spmd_lm.runtime.formatting import format_bytes, format_range, format_table

Audit = Callable[[RunConfig, str], dict[str, Any]]  # (configuration, topology) -> `audit` of its step

MARK = "# spmd-lm plan --search:"  # first line of a file that another search may replace
SHOWN = 8
"""Rows of the Pareto table that are printed."""
MOST_COMPILED = 8


def confirmed_best(search: Search, top: int, audit: Audit) -> tuple[CostedLayout, list[dict[str, Any]], str | None]:
    """(the fastest layout, what was compiled, why nothing could be; None otherwise).

    `audit` compiles the fastest of each topology, mesh and ZeRO stage, at most MOST_COMPILED, until `top` fit: the
    first of these is the fastest; if none does, the predicted one.  Raises ConfigError if no prediction fits."""
    best, compiled, fitting = search.fastest(), [], list[CostedLayout]()
    missing = [why for target in search.targets if (why := target.topology.lacks_compiler)]
    if missing and top:
        return best, [], f"not compiled: {missing[0]}"
    for layout in fastest_of_each(search, *MESH_AXES, "zero")[:MOST_COMPILED]:
        if len(fitting) == top:
            break
        compiled.append(confirm(layout, audit))
        fitting += [layout] * compiled[-1]["fits"]
    return fitting[0] if fitting else best, compiled, None


def describe(search: Search, best: CostedLayout, compiled: list[dict[str, Any]], notice: str | None) -> dict[str, Any]:
    """The search as plain data.  best, compiled, notice: of `confirmed_best`."""
    rule = follow_the_rule(search)
    return {
        "evaluated": len(search.layouts),
        "seconds": search.seconds,
        "best": describe_layout(best),
        "software": best.target.software.share,
        "range": step_range(best.parts, best.target.software),
        "pareto": [describe_layout(layout) for layout in search.pareto()],
        "by_topology": [describe_layout(layout) for layout in fastest_of_each(search)],
        "rejected": dict(search.rejected),
        "remedy": describe_remedy(search),
        "alternatives": list(alternatives(search, best)),
        "rule": describe_layout(rule) | {"why_slower": why_slower(rule, best)} if rule else None,
        "compiled": compiled,
        "notice": notice,
    }


def describe_layout(layout: CostedLayout) -> dict[str, Any]:
    return {
        "topology": str(layout.target.topology),
        "devices": layout.target.topology.size,
        "layout": layout.overrides,
        "step_seconds": layout.seconds,
        "parts": layout.parts,
        "memory": layout.memory,
        "bytes": layout.bytes,
    }


def describe_remedy(search: Search) -> dict[str, Any] | None:
    """The setting with which jax allocates more memory and more layouts fit, their number and the fastest; or None."""
    if more := best_of(search.remediable):
        return {"setting": more.remedy, "layouts": len(search.remediable), "fastest": describe_layout(more)}
    return None


def alternatives(search: Search, best: CostedLayout) -> Iterator[dict[str, Any]]:
    """For each choice of `best` its hardware's fastest layout without it, and the loss; the smallest if none fits."""
    same = [layout for layout in search.layouts if layout.target == best.target]
    for key, chosen in best.overrides.items():
        others = [layout for layout in same if layout.overrides[key] != chosen]
        fitting = best_of(layout for layout in others if layout.room >= 0)
        if not others:
            continue
        other = fitting or max(others, key=lambda layout: layout.room)
        slower = other.seconds / best.seconds - 1 if fitting else None
        why = why_slower(other, best) if fitting else f"{format_bytes(-other.room)} more than fits"
        yield {"key": key, "value": other.overrides[key], "layout": other.overrides, "slower": slower, "why": why}


def why_slower(layout: CostedLayout, best: CostedLayout) -> str:
    """The part of a step that loses most against `best`, and its seconds; '' if none does."""
    lost = {name: seconds - best.parts[name] for name, seconds in layout.parts.items()}
    name = max(lost, key=lambda part: lost[part])
    return f"{name} {lost[name]:+.3g} s" if lost[name] > 0 else ""


def follow_the_rule(search: Search) -> CostedLayout | None:
    """The layout by PTD-P's takeaways (arXiv:2104.04473, section 3): the least model parallelism that fits, tensor
    parallelism first, within fast links, then stages, data parallelism for the rest; the best microbatch."""
    plain = [layout for layout in search.fitting if layout.overrides["zero"] <= 1 and layout.overrides["replica"] == 1]
    if not plain:
        return None

    def model_parallelism(layout: CostedLayout) -> tuple[int, int]:
        """Degree of model parallelism; of equal ones, fewest stages."""
        p = layout.config.parallel
        return p.model * p.pipe, p.pipe

    least = min(map(model_parallelism, plain))
    return best_of(layout for layout in plain if model_parallelism(layout) == least)


def fastest_of_each(search: Search, *keys: str) -> list[CostedLayout]:
    """The fastest fitting layout for each topology and each choice of the keys of `parallel`, the fastest first."""
    fastest: dict[Any, CostedLayout] = {}
    for layout in sorted(search.fitting, key=speed):
        fastest.setdefault((layout.target.topology, *map(layout.overrides.get, keys)), layout)
    return list(fastest.values())


def confirm(layout: CostedLayout, audit: Audit) -> dict[str, Any]:
    """Compiled figures of a layout, beside the predicted ones; None, and `refused`, if the compiler refuses it."""
    try:
        audited = audit(layout.config, str(layout.target.topology))
    except CompilerError as error:
        unknown = ("matches_theory", "compiled_bytes", "compiled_peak", "compiled_step_seconds", "compile_seconds")
        return describe_layout(layout) | dict.fromkeys(unknown) | {"refused": error.reason, "fits": False}
    found = sum(row["bytes"] for row in audited["collectives"])
    exposed = audited["exposed"]
    return describe_layout(layout) | {
        "matches_theory": audited["ok"],
        "compiled_bytes": found,
        "compiled_peak": audited["memory"]["peak"],
        "fits": audited["memory"]["peak"] <= layout.target.capacity.usable,
        "compiled_step_seconds": exposed and exposed["step_seconds"],
        "compile_seconds": audited["compile_seconds"],
        "refused": None,
    }


def write_best(best: CostedLayout, path: Path) -> None:
    """Writes a configuration file of the run under the best layout.  Raises OutputError if it cannot be written."""
    topology = best.target.topology
    comment = f"{MARK} {best.seconds:.4g} s a step on {topology}, by the cost model.\n"
    comment += f"# spmd-lm preflight {path.name} --topology {topology} compiles it.\n"
    try:
        write_atomically(path, comment + dump(best.config))
    except OSError as error:
        raise OutputError(f"--out {path}: cannot be written: {error.strerror}. Choose another file.") from error


def render(description: dict[str, Any]) -> str:
    d = description
    lines = [f"{d['evaluated']:,} layouts in {d['seconds']:.1f} s; {_rejections(d['rejected'])}", ""]
    rows: list[tuple[str, ...]] = [
        ("fastest that fit", "devices", "step", "memory", "sent", "compute", "exposed", "bubble"),
        *map(_row, d["pareto"][:SHOWN]),
        *(_row(each) for each in d["by_topology"] if each not in d["pareto"][:SHOWN]),
    ]
    lines += [*format_table(rows), "", f"best    {_layout(d['best']['layout'])}"]
    if remedy := d["remedy"]:
        more = remedy["fastest"]
        lines.append(
            f"memory  with {remedy['setting']} {remedy['layouts']:,} more fit, the fastest in "
            f"{more['step_seconds']:.4g} s on {more['topology']}: {_layout(more['layout'])}"
        )
    if rule := d["rule"]:
        slower = rule["step_seconds"] / d["best"]["step_seconds"] - 1
        what = f"{slower:.1%} slower: {rule['why_slower']}" if slower > 1e-6 else "as fast"
        lines.append(f"rule    {_layout(rule['layout'])}: {what}")
    lines += ["", "otherwise", *_otherwise(d["alternatives"])]
    for each in d["compiled"]:
        if each["refused"]:
            planned, why = format_bytes(each["memory"]), each["refused"]
            lines.append(f"compiled {_layout(each['layout'])}: REFUSED by the compiler ({planned} predicted): {why}")
            continue
        sent, peak = format_bytes(each["compiled_bytes"]), format_bytes(each["compiled_peak"])
        verdict = "matches theory" if each["matches_theory"] else "does NOT match theory"
        fits = "fits" if each["fits"] else "does NOT fit"
        lines.append(
            f"compiled {_layout(each['layout'])}: {fits}, peak {peak} ({format_bytes(each['memory'])} predicted), "
            f"sends {sent}, {verdict}"
        )
    if d["compiled"] and not any(each["fits"] for each in d["compiled"]):
        lines.append(f"none of these {len(d['compiled'])} fits, compiled: search on more devices")
    lines += filter(None, [d["notice"]])
    lines.append(
        f"assumes that products reach {d['software']:.0%} of the hardware's rate; steps that differ by less than 5% tie"
    )
    most, least = d["range"]["software"]
    if most > least:
        seconds = format_range(d["range"]["step_seconds"], "{:.3g}".format)
        lines.append(f"best    takes {seconds} s a step if they reach {most:.0%} to {least:.0%}, as in published runs")
    return "\n".join(lines)


def _otherwise(alternatives: list[dict[str, Any]]) -> Iterator[str]:
    """One line for each layout, with its choices."""
    for layout in {_layout(each["layout"]): None for each in alternatives}:
        chosen = [each for each in alternatives if _layout(each["layout"]) == layout]
        choices = ", ".join(f"{each['key']}={str(each['value']).lower()}" for each in chosen)
        loss = f"{chosen[0]['slower']:.1%} slower" if chosen[0]["slower"] is not None else "does not fit"
        yield f"        {choices}: {loss}{', ' + chosen[0]['why'] if chosen[0]['why'] else ''}: {layout}"


def _row(layout: dict[str, Any]) -> tuple[str, ...]:
    parts = (f"{layout['parts'][name] / layout['step_seconds']:.0%}" for name in ("compute", "exposed", "bubble"))
    sizes = (format_bytes(layout[key]) for key in ("memory", "bytes"))
    seconds = f"{layout['step_seconds']:.4g} s"
    return (_layout(layout["layout"]), f"{layout['devices']} x {layout['topology']}", seconds, *sizes, *parts)


def _layout(overrides: dict[str, Any]) -> str:
    """Text of a layout, without choices of no effect."""
    trivial: dict[str, Any] = {"pipe": 1, "replica": 1, "sequence": False, "zero": 0, "reduce_once": False, "chunks": 1}
    trivial |= {"expert": 1, "context": 1, "offload": "none"}
    shown = {key: value for key, value in overrides.items() if trivial.get(key, ...) != value}
    if overrides["pipe"] == 1:
        shown.pop("schedule")
    return " ".join(f"{key}={str(value).lower()}" for key, value in shown.items())


def _rejections(rejected: dict[str, int]) -> str:
    return ", ".join(f"{count:,} rejected: {reason}" for reason, count in rejected.items()) or "none rejected"
