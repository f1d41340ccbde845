"""What `prepare` tells: how far each stage is, how long it took, and what each step did to the documents."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spmd_lm.prepare.chunks import ChunkRecord
from spmd_lm.prepare.duplicates import EXACT, NEAR, count_fates
from spmd_lm.prepare.schema import Preparation
from spmd_lm.prepare.tokens import TokenizedChunk
from spmd_lm.runtime.formatting import format_duration, format_table
from spmd_lm.runtime.outputs import unfailing


class Stages:
    """Shows the stages on standard error: a bar with the time that is left on a terminal, else a line at the end of
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
        """Yields a function that takes how much of `size` is done."""
        task, start = self.bars.add_task(name, total=size), time.perf_counter()
        yield lambda done: self.bars.update(task, completed=done)
        self.bars.update(task, total=size or 1, completed=size or 1)
        self.seconds[name] = round(time.perf_counter() - start, 3)
        if not self.console.is_terminal:
            self.log(f"{name}: {format_duration(self.seconds[name])}")


def make_steps(
    config: Preparation, records: list[ChunkRecord], fates: np.ndarray, tokenized: list[TokenizedChunk]
) -> list[dict[str, Any]]:
    """The steps that ran, in their order: documents in and out, and why the others, or what was done to how many."""
    counts: dict[str, Counter[str]] = {}
    for step, reason, count in (each for record in records for each in record.counts):
        counts.setdefault(step, Counter())[reason] += count
    by_fate = count_fates(fates)
    few = sum(chunk.few_tokens for chunk in tokenized)
    steps = config.steps
    counts["exact_duplicates"] = Counter({"duplicate": by_fate.get(EXACT, 0)})
    counts["near_duplicates"] = Counter({"near duplicate": by_fate.get(NEAR, 0)})
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


STEP_ORDER = ("language", "leaks", "exact_duplicates", "near_duplicates", "min_tokens")


def render_report(report: dict[str, Any]) -> str:
    """For people."""
    rows = [("step", "in", "out", "")]
    for step in report["steps"]:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in step["reasons"].items())
        rows.append((step["name"], f"{step['in']:,}", f"{step['out']:,}", reasons))
    shards = [("split", "shards", "documents", "tokens")]
    for name, split in report["splits"].items():
        shards.append((name, str(len(split["shards"])), f"{split['documents']:,}", f"{split['tokens']:,}"))
    bad = [f"bad input: {line}" for line in report.get("bad", [])]
    done = "was finished before, and is left as it is" if report["finished_before"] else "finished"
    return "\n".join([*bad, *format_table(rows), "", *format_table(shards), "", f"{report['out']}: {done}"])
