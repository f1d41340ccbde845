"""Progress of `prepare`, and its report: the time of each stage, and the effect of each step on the documents."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spmd_lm.data.held_out import SHARE_MARGIN
from spmd_lm.prepare.chunks import MOST_TOLD, ChunkRecord
from spmd_lm.prepare.duplicates import EXACT, NEAR, count_labels
from spmd_lm.prepare.schema import Preparation
from spmd_lm.prepare.tokens import TokenizedChunk
from spmd_lm.runtime.formatting import format_duration, format_table, pluralize
from spmd_lm.runtime.outputs import unfailing

BAD_IN_ERROR = 3  # bad documents named in an error


class Stages:
    """Shows the stages on standard error: on a terminal as bars with the remaining time, else as a line at the end of
    each."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.seconds = log, dict[str, float]()
        self.console = Console(file=unfailing(sys.stderr), highlight=False)
        columns = TextColumn("{task.description:<18}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        left = TextColumn("ETA"), TimeRemainingColumn()
        self.bars = Progress(*columns, *left, console=self.console, disable=not self.console.is_terminal)

    def __enter__(self) -> "Stages":
        self.bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bars.stop()

    @contextmanager
    def stage(self, name: str, size: float | None) -> Iterator[Callable[[float], None]]:
        """Yields a function to call with the part of `size` that is done."""
        task, start = self.bars.add_task(name, total=size), time.perf_counter()
        yield lambda done: self.bars.update(task, completed=done)
        self.bars.update(task, total=size or 1, completed=size or 1)
        self.seconds[name] = round(time.perf_counter() - start, 3)
        if not self.console.is_terminal:
            self.log(f"{name}: {format_duration(self.seconds[name])}")


def make_steps(
    config: Preparation, records: list[ChunkRecord], labels: np.ndarray, tokenized: list[TokenizedChunk]
) -> list[dict[str, Any]]:
    """The steps that ran, in order: documents in and out, and reasons for removals or repairs, with counts."""
    counts: dict[str, Counter[str]] = {}
    for step, reason, count in (each for record in records for each in record.counts):
        counts.setdefault(step, Counter())[reason] += count
    by_label = count_labels(labels)
    few = sum(chunk.few_tokens for chunk in tokenized)
    steps = config.steps
    counts["exact_duplicates"] = Counter({"duplicate": by_label.get(EXACT, 0)})
    counts["near_duplicates"] = Counter({"near duplicate": by_label.get(NEAR, 0)})
    counts["min_tokens"] = Counter({f"fewer than {steps.min_tokens} tokens": few})
    asked = {"read": True, "utf8": steps.utf8 == "repair"}
    asked |= {name: bool(getattr(steps, name)) for name in STEP_ORDER}
    documents, told = sum(record.raw_documents for record in records), []
    for name in [name for name in asked if asked[name]]:
        reasons = {reason: count for reason, count in sorted(counts.get(name, {}).items()) if count}
        remaining = documents - (0 if name == "utf8" else sum(reasons.values()))
        told.append({"name": name, "in": documents, "out": remaining, "reasons": reasons})
        documents = remaining
    return told


def explain_nothing_left(steps: list[dict[str, Any]], bad: list[str]) -> str:
    """The reason why no document is left, and the remedy."""
    removed = {step["name"]: step for step in steps if step["out"] < step["in"]}
    told = [f"{name} removed {s['in'] - s['out']:,} ({format_reasons(s['reasons'])})" for name, s in removed.items()]
    ways = {"read": "mend the sources", "min_tokens": "lower steps.min_tokens"}
    ways |= {name: f"leave out steps.{name}" for name in ("language", "leaks")}
    way = ", or ".join(ways[name] for name in removed if name in ways).capitalize()
    lines = [f"no document is left of {steps[0]['in']:,}: {', '.join(told)}", *bad[:BAD_IN_ERROR]]
    return f"sources: {'; '.join(lines)}. {way}."


def find_warnings(
    config: Preparation, records: list[ChunkRecord], sources: list[dict[str, Any]], splits: dict[str, Any]
) -> list[str]:
    """Warnings about sources, and files of lines, that have bytes but no document, and about splits that are empty or
    far from their share of the text."""
    texts, problems = Counter[tuple[int, str]](), dict[tuple[int, str], str]()
    for index, file, count, problem in (each for record in records for each in record.read):
        for key in dict.fromkeys([(index, ""), (index, file)]):
            texts[key] += count
            problems[key] = problems.get(key) or problem
    told = []
    for i, (source, about) in enumerate(zip(config.sources, sources, strict=True)):
        unread = {file: (at, file) for at, file in texts if at == i and not texts[at, file]}
        if not texts[i, ""]:  # none of its files
            unread = {source.label: (i, "")} if about.get("bytes", 1) else {}
        told += [f"{name}: not one document of it was read: {problems.get(unread[name], 'none')}." for name in unread]
    if len(told) > MOST_TOLD:
        told[MOST_TOLD:] = [f"and not one of {len(told) - MOST_TOLD} more files."]
    text_bytes = sum(split["text_bytes"] for split in splits.values())
    for name, split in splits.items():
        wanted, found = getattr(config.split, name, 0), split["text_bytes"] / text_bytes
        if not split["documents"] and getattr(config.split, name, True):
            way = "Name more sources" if name == "train" else f"Raise split.{name}, or name more sources"
            told.append(f"no document is in the split {name}. {way}.")
        elif wanted and abs(found - wanted) > 2 * SHARE_MARGIN * min(wanted, 1 - wanted):
            why = "Name more sources, or lower steps.min_tokens"
            told.append(f"{found:.2%} of the text is in the split {name}, not split.{name}={wanted:.2%}. {why}.")
    return told


STEP_ORDER = ("language", "leaks", "exact_duplicates", "near_duplicates", "min_tokens")


def render_report(report: dict[str, Any]) -> str:
    rows = [("step", "in", "out", "")]
    for step in report["steps"]:
        rows.append((step["name"], f"{step['in']:,}", f"{step['out']:,}", format_reasons(step["reasons"])))
    shards = [("split", "shards", "documents", "tokens")]
    for name, split in report["splits"].items():
        shards.append((name, str(len(split["shards"])), f"{split['documents']:,}", f"{split['tokens']:,}"))
    bad = [f"bad input: {line}" for line in report.get("bad", [])]
    for each in report.get("not_read", []):
        count = pluralize(each["files"], "file")
        bad.append(f"not read: {each['path']}: {count}: {format_reasons(each['suffixes'])}. Name them by a glob.")
    done = "was finished before, and is left as it is" if report["finished_before"] else "finished"
    warnings = [f"warning: {line}" for line in report.get("warnings", [])]
    tables = [*format_table(rows), "", *format_table(shards), ""]
    return "\n".join([*bad, *tables, f"{report['out']}: {done}", *warnings])


def format_reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
