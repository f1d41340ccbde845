"""A sweep's report.html: its cells side by side, their losses and costs, how they scale, and a scaling law."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spmd_lm import plots
from spmd_lm.analysis.scaling_law import fit
from spmd_lm.config.data_sections import Synthetic
from spmd_lm.errors import FitError
from spmd_lm.reports.page import Content, Html, Page, cards, details, facts, figure, notice, table
from spmd_lm.reports.runs import RunFiles, metric_figures
from spmd_lm.runtime.formatting import format_bytes, format_quantity, pluralize
from spmd_lm.runtime.metrics import Record
from spmd_lm.sweeps.cells import Cell
from spmd_lm.sweeps.scaling import efficiencies, losses

MOST_CURVES = 12  # as many as a legend has entries
MOST_BARS = 24


def make_report(
    name: str,
    cells: Sequence[Cell],
    records: Sequence[Record],
    runs: Mapping[str, RunFiles],
    published: Mapping[str, Any],
) -> str:
    """The page as HTML.

    records: rows of `CellTable`, in the order of `cells`.
    runs: files of started cells, by ID.
    published: the section of the sweep's file."""
    counts = Counter(record["status"] for record in records)
    page = Page(f"Sweep {name}", f"{pluralize(len(cells), 'cell')}: {_list_counts(counts)}")
    page.section("", _facts(cells, records), *_failures(records))
    page.section("Cells", _cell_table(cells, records))
    page.section("Training", *_curves(cells, runs))
    page.section("Speed and memory", *_costs(records, runs))
    page.section("Scaling", *_scaling(cells, records, published))
    page.section("Scaling law", *_scaling_law(records))
    return page.html()


def _list_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _facts(cells: Sequence[Cell], records: Sequence[Record]) -> Content:
    """The best figures among all cells, without MFU on simulated devices: each start measures its CPU's peak anew."""
    found: dict[str, object] = {}
    figures = [
        ("eval_loss", "lowest evaluation loss", min, "{:.4f}".format),
        ("loss", "lowest loss", min, "{:.4f}".format),
        ("tokens_per_second", "most tokens/s", max, format_quantity),
    ]
    if not any(cell.config.run.simulate_devices for cell in cells):
        figures.append(("mfu", "highest MFU", max, "{:.1%}".format))
    for key, title, best, text in figures:
        if known := [(record[key], record["id"]) for record in records if record.get(key) is not None]:
            value, cell = best(known)
            found[f"{title}: {cell}"] = text(value)
    tokens = sum(record.get("tokens") or 0 for record in records)
    return facts(found | ({"tokens, all cells": format_quantity(tokens)} if tokens else {}))


def _failures(records: Sequence[Record]) -> Iterator[Content]:
    for record in records:
        if record["status"] == "failed":
            yield notice(f"{record['id']} failed with exit code {record['exit_code']}: {record['reason']}")
        elif record["reason"]:
            yield notice(f"{record['id']}: {record['reason']}")


def _cell_table(cells: Sequence[Cell], records: Sequence[Record]) -> Content:
    """A row for each cell: the keys that vary, and its figures."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.values))
    formats: dict[str, Callable[[Any], str]] = {
        "devices": str,
        "parameters": "{:,}".format,
        "tokens": "{:,}".format,
        "loss": "{:.4f}".format,
        "eval_loss": "{:.4f}".format,
        "tokens_per_second": "{:,.0f}".format,
        "mfu": "{:.1%}".format,
        "memory_bytes": format_bytes,
        "bubble": "{:.1%}".format,
    }
    columns = [name for name in formats if any(record.get(name) is not None for record in records)]

    def row(record: Record) -> list[object]:
        figures = ["" if record.get(name) is None else formats[name](record[name]) for name in columns]
        return [record["id"], record["status"], *("" if record[key] is None else record[key] for key in keys), *figures]

    names = [name.removesuffix("_bytes").replace("_", " ") for name in columns]
    return table(["cell", "status", *keys, *names], map(row, records))


def _curves(cells: Sequence[Cell], runs: Mapping[str, RunFiles]) -> Iterator[Content]:
    """Metrics over steps and, if cells differ in tokens per step, the loss over tokens."""
    started = {cell_id: run.records for cell_id, run in list(runs.items())[:MOST_CURVES] if run.records}
    if not started:
        return
    yield from metric_figures(started)
    if len({cell.config.train.batch * cell.config.model.context for cell in cells}) > 1:
        yield cards(figure(plots.curves(started, over="tokens", title="loss over tokens"), "loss-over-tokens"))
    if len(runs) > MOST_CURVES:
        yield f"The first {MOST_CURVES} of {len(runs)} cells."
    entropies = {cell.config.data.entropy for cell in cells if isinstance(cell.config.data, Synthetic)}
    if len(entropies) == 1:
        yield f"The text is synthetic: no loss can be expected below {entropies.pop():.4f} nats."


def _costs(records: Sequence[Record], runs: Mapping[str, RunFiles]) -> Iterator[Content]:
    """Median tokens/s and MFU of each cell, and its planned memory."""
    pictures = []
    for key in ("tokens_per_second", "mfu"):
        known = {record["id"]: record[key] for record in records[:MOST_BARS] if record.get(key) is not None}
        if known:
            pictures.append(figure(plots.compare(known, key), f"median-{key}".replace("_", "-")))
    plans = {cell_id: run.plan for cell_id, run in list(runs.items())[:MOST_BARS] if run.plan}
    if plans:
        pictures.append(figure(plots.memory(plans), "memory", "Planned, where a step holds most."))
    yield cards(*pictures)
    if len(records) > MOST_BARS:
        yield f"The first {MOST_BARS} of {len(records)} cells."


def _scaling(cells: Sequence[Cell], records: Sequence[Record], published: Mapping[str, Any]) -> Iterator[Content]:
    """Measured efficiencies, with published ones for comparison."""
    found = efficiencies(cells, records)
    if found is None:
        return
    scaling = "strong" if found.strong else "weak"
    if found.simulated:
        yield notice(
            f"These devices are simulated: all of them share the {os.cpu_count()} cores of one machine. More of them "
            "compute no faster, so the measured efficiency is the whole machine's model FLOP/s, relative to the fewest "
            "devices: what dividing the work costs here, not what hardware would reach."
        )
    series = dict(published.get("efficiency", {}))
    picture = figure(plots.efficiency(found.measured, series, title=f"{scaling} scaling"), "efficiency")
    rows = [
        (name, devices, f"{value:.1%}", source)
        for all_series, source in ((found.measured, "measured here"), (series, f"published: {published.get('source')}"))
        for name, points in all_series.items()
        for devices, value in sorted(points.items())
    ]
    yield cards(picture)
    yield details("The figures", table(["series", "devices", "efficiency", "source"], rows))


def _scaling_law(records: Sequence[Record]) -> Iterator[Content]:
    """The fit of Chinchilla's form, if the sweep has at least three sizes and three budgets."""
    points = losses(records)
    if min(len({n for n, _, _ in points}), len({d for _, d, _ in points})) < 3:
        return
    try:
        law = fit(*zip(*points, strict=True))
    except FitError as error:
        yield notice(str(error))
        return
    form = "L(N, D) = E + A / N<sup>α</sup> + B / D<sup>β</sup>"
    yield Html(
        f"<p>{form} (arXiv:2203.15556) of N parameters, embeddings included, and D tokens, fitted to the last losses "
        f"of {law.points} cells. A single run deviates from it by {law.residual:.1%}. Bands hold 95%.</p>"
    )
    meanings = {
        "E": "the loss of an infinite model on infinite data, nats",
        "A": "weight of the size",
        "B": "weight of the data",
        "alpha": "exponent of the size",
        "beta": "exponent of the data",
        "a": "the best N grows as compute to this power",
        "b": "the best D grows as compute to this power",
    }
    rows = [(name, *(f"{float(x):.4g}" for x in getattr(law, name)), about) for name, about in meanings.items()]
    yield cards(
        figure(plots.scaling_law(points, law), "scaling-law-tokens"),
        figure(plots.scaling_law(points, law, over="parameters"), "scaling-law-parameters"),
    )
    yield table(["", "value", "from", "to", ""], rows)
    if law.outliers:
        left_out = ", ".join(f"{points[i][0]:,} parameters on {points[i][1]:,} tokens" for i in law.outliers)
        yield notice(f"Left out, as too far from all others: {left_out}.")
