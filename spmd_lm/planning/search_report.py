"""What `spmd-lm plan --search` tells of the layouts that it costed: the fastest, what any other choice would cost, and
what the published rule of thumb would choose."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spmd_lm.config.load import dump
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.step_time import step_range
from spmd_lm.errors import CompilerError, ConfigError
from spmd_lm.files import write_atomically
from spmd_lm.planning.search import CostedLayout, Search, best_of
from spmd_lm.runtime.formatting import format_bytes, format_range, format_table

Audit = Callable[[RunConfig, str], dict[str, Any]]  # of the step of a configuration, on a topology

MARK = "# spmd-lm plan --search:"  # how what it writes begins, which another search may replace
SHOWN = 8
"""Rows of the Pareto table that are printed."""


def describe(search: Search, top: int, audit: Audit) -> dict[str, Any]:
    """The search as plain data.  top: the fastest layouts that `audit` compiles, to confirm memory and traffic.

    Raises ConfigError if no layout fits, or there is no compiler."""
    best = search.fastest()
    rule = follow_the_rule(search)
    return {
        "evaluated": len(search.layouts),
        "seconds": search.seconds,
        "best": describe_layout(best),
        "software": best.target.profile.software,
        "range": step_range(best.parts, best.target.profile),
        "pareto": [describe_layout(layout) for layout in search.pareto()],
        "by_topology": [describe_layout(layout) for layout in fastest_of_each_topology(search)],
        "rejected": dict(search.rejected),
        "remedy": describe_remedy(search),
        "alternatives": list(alternatives(search, best)),
        "rule": describe_layout(rule) | {"why_slower": why_slower(rule, best)} if rule else None,
        "compiled": [confirm(layout, audit) for layout in fastest_of_each_mesh(search)[:top]],
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
    """What fits if jax allocates more of a GPU: the setting, how many layouts, and the fastest of them; None if nothing
    more does."""
    more = best_of(search.remediable)
    if not more:
        return None
    return {"setting": more.remedy, "layouts": len(search.remediable), "fastest": describe_layout(more)}


def alternatives(search: Search, best: CostedLayout) -> Iterator[dict[str, Any]]:
    """For each choice, the fastest layout on the same hardware that makes another one, and what it loses by that; the
    smallest one, if none fits."""
    same = [layout for layout in search.layouts if layout.target == best.target]
    for key, chosen in best.overrides.items():
        others = [layout for layout in same if layout.overrides[key] != chosen]
        fitting = best_of(layout for layout in others if layout.room >= 0)
        if not others:
            continue
        other = fitting or max(others, key=lambda layout: layout.room)
        found = {"key": key, "value": other.overrides[key], "layout": other.overrides}
        if fitting:
            yield found | {"slower": other.seconds / best.seconds - 1, "why": why_slower(other, best)}
        else:
            yield found | {"slower": None, "why": f"{format_bytes(-other.room)} more than fits"}


def why_slower(layout: CostedLayout, best: CostedLayout) -> str:
    """The part of a step in which it loses most to `best`; '' if it loses nothing."""
    lost = {name: seconds - best.parts[name] for name, seconds in layout.parts.items()}
    name = max(lost, key=lambda part: lost[part])
    return f"{name} {lost[name]:+.3g} s" if lost[name] > 0 else ""


def follow_the_rule(search: Search) -> CostedLayout | None:
    """PTD-P's takeaways (arXiv:2104.04473, section 3): as little model parallelism as fits, tensor parallelism first,
    as far as fast links reach, then stages, and data parallelism for the rest; the best microbatch."""
    plain = [layout for layout in search.fitting if layout.overrides["zero"] <= 1 and layout.overrides["replica"] == 1]
    if not plain:
        return None

    def model_parallelism(layout: CostedLayout) -> tuple[int, int]:
        """Its degree; of one degree, stages last."""
        p = layout.config.parallel
        return p.model * p.pipe, p.pipe

    least = min(map(model_parallelism, plain))
    return best_of(layout for layout in plain if model_parallelism(layout) == least)


def fastest_of_each_topology(search: Search) -> list[CostedLayout]:
    """The fastest first; topologies on which nothing fits are not among them."""
    fastest: dict[Any, CostedLayout] = {}
    for layout in sorted(search.fitting, key=lambda each: (each.seconds, each.memory)):
        fastest.setdefault(layout.target.topology, layout)
    return list(fastest.values())


def fastest_of_each_mesh(search: Search) -> list[CostedLayout]:
    """Of layouts that differ in mesh or ZeRO, each with the rest of its choices at their best, the fastest first."""
    fastest: dict[Any, CostedLayout] = {}
    for layout in sorted(search.fitting, key=lambda each: (each.seconds, each.memory)):
        p = layout.config.parallel
        fastest.setdefault((layout.target.topology, p.pipe, p.replica, p.data, p.model, p.zero), layout)
    return list(fastest.values())


def confirm(layout: CostedLayout, audit: Audit) -> dict[str, Any]:
    """What the compiler makes of it, beside what was predicted; None for all of it, and `refused`, if it refuses it."""
    try:
        audited = audit(layout.config, str(layout.target.topology))
    except CompilerError as error:
        unknown = ("matches_theory", "compiled_bytes", "compiled_peak", "compiled_step_seconds", "compile_seconds")
        return describe_layout(layout) | dict.fromkeys(unknown) | {"refused": error.reason}
    found = sum(row["bytes"] for row in audited["collectives"])
    exposed = audited["exposed"]
    return describe_layout(layout) | {
        "matches_theory": audited["ok"],
        "compiled_bytes": found,
        "compiled_peak": audited["memory"]["peak"],
        "compiled_step_seconds": exposed and exposed["step_seconds"],
        "compile_seconds": audited["compile_seconds"],
        "refused": None,
    }


def write_best(search: Search, path: Path) -> None:
    """The run under the fastest layout, as a file that can be run.  Raises ConfigError if it cannot be written."""
    best = search.fastest()
    topology = best.target.topology
    comment = f"{MARK} {best.seconds:.4g} s a step on {topology}, by the cost model.\n"
    comment += f"# spmd-lm preflight {path.name} --topology {topology} compiles it.\n"
    try:
        write_atomically(path, comment + dump(best.config))
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}. Choose another file.") from error


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
        lines.append(
            f"compiled {_layout(each['layout'])}: peak {peak} ({format_bytes(each['memory'])} predicted), "
            f"sends {sent}, {verdict}"
        )
    lines.append(
        f"assumes that products reach {d['software']:.0%} of the hardware's rate; steps that differ by less than 5% tie"
    )
    most, least = d["range"]["software"]
    if most > least:
        seconds = format_range(d["range"]["step_seconds"], "{:.3g}".format)
        lines.append(f"best    takes {seconds} s a step if they reach {most:.0%} to {least:.0%}, as in published runs")
    return "\n".join(lines)


def _otherwise(alternatives: list[dict[str, Any]]) -> Iterator[str]:
    """Choices that one layout makes are on one line."""
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
    """Without what makes no difference."""
    trivial = {"pipe": 1, "replica": 1, "sequence": False, "zero": 0, "reduce_once": False, "chunks": 1}
    shown = {key: value for key, value in overrides.items() if trivial.get(key, ...) != value}
    if overrides["pipe"] == 1:
        shown.pop("schedule")
    return " ".join(f"{key}={str(value).lower()}" for key, value in shown.items())


def _rejections(rejected: dict[str, int]) -> str:
    return ", ".join(f"{count:,} rejected: {reason}" for reason, count in rejected.items()) or "none rejected"
