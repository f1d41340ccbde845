"""The files that report a run's progress: metrics.jsonl, TensorBoard events, status.json, loss.png.

metrics.jsonl is the source of truth: one record per logged step, however often the run was restarted, with step, loss,
grad_norm, lr, tokens (since step 1), tokens_per_second, mfu (null where the hardware's peak is unknown), seconds (per
step, since the record before), eval_loss, eval_perplexity and eval_accuracy.  An objective with several losses adds
NAME_loss, eval_NAME_loss and eval_NAME_accuracy; labelled examples have the metrics that evaluation/task_metrics.py
lists.  Loss scaling adds loss_scale, skipped (whether this step left the parameters unchanged; its grad_norm is then
not a number) and skipped_steps (since step 1)."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from spmd_lm.errors import CheckpointError

Record = dict[str, Any]
"""One line of metrics.jsonl."""

BUCKETS = ("init", "compile", "step", "eval", "checkpoint", "data", "other")
"""What wall-clock seconds are spent on: the keys of status.json's goodput."""


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file's text; a reader, or a crash, sees the old text or the new one, never a part."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl without a last line that a crash cut short; [] if there is no file."""
    if not path.exists():
        return []
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # text after the last newline is an unfinished line
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Move it away.") from error
    return [_parse_record(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]


def _parse_record(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8"))
        _check_types(record, {"step": int})
    except ValueError as error:
        raise CheckpointError(f"{where} is not a record ({error}). Fix that line, or move the file away.") from error
    return record


def _check_types(value: Any, types: dict[str, type]) -> None:
    """ValueError unless `value` is a JSON object with these keys of these types."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {value!r:.40}")
    for key, expected in types.items():
        if type(value.get(key)) is not expected:
            raise ValueError(f"'{key}' is {value.get(key, 'missing')!r:.40}")


class MetricsLog:
    """Appends records to metrics.jsonl and to TensorBoard, after dropping those beyond `resume_step`.

    A float is written as Python's shortest repr, which reads back as the same bits; NaN and infinity become null."""

    def __init__(self, directory: Path, resume_step: int = 0):
        self.path = directory / "metrics.jsonl"
        self._resume_step = resume_step
        records = [record for record in read_records(self.path) if record["step"] <= resume_step]
        self._last_step = max((record["step"] for record in records), default=0)
        write_atomically(self.path, "".join(map(_to_line, records)))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def missing_steps(self, log_every: int) -> tuple[int, int] | None:
        """First and last of the steps up to `resume_step` whose records are missing; None if none is."""
        due = self._last_step + log_every - self._last_step % log_every
        return (due, self._resume_step) if due <= self._resume_step else None

    def write(self, record: Record) -> None:
        self._file.write(_to_line(record))
        self._file.flush()
        for key, value in _without_nan(record).items():
            if key != "step" and value is not None:
                self._tensorboard.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def _without_nan(record: Record) -> Record:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _to_line(record: Record) -> str:
    return json.dumps(_without_nan(record), allow_nan=False) + "\n"


@dataclass
class Status:
    """status.json: where a run stands.  `goodput` is the wall-clock seconds of all its starts, by BUCKETS."""

    path: Path
    state: str = "running"  # running | done | preempted | failed
    step: int = 0  # steps done
    exit_code: int | None = None  # None while running
    restarts: int = 0
    goodput: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    compile_seconds: float | None = None  # of the last compilation: an estimate of the next one

    @classmethod
    def read(cls, directory: Path) -> "Status | None":
        """The status in a run's directory, None if there is none."""
        path = directory / "status.json"
        if not os.path.exists(path):  # unlike Path.exists, False without permission to look
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            _check_types(fields, {"state": str, "step": int, "restarts": int, "goodput": dict})
            for seconds in (*fields["goodput"].values(), fields.get("compile_seconds") or 0.0):
                if type(seconds) not in (int, float) or not math.isfinite(seconds):
                    raise ValueError(f"{seconds!r:.40} is not a number of seconds")
            return cls(path, **fields)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not a run's status ({error}). Move the file away.") from error

    def write(self, **changes: Any) -> None:
        for key, value in changes.items():
            setattr(self, key, value)
        write_atomically(self.path, json.dumps({k: v for k, v in asdict(self).items() if k != "path"}, indent=2) + "\n")


class Clock:
    """Adds every second to one bucket of `seconds`: the innermost one being timed, `other` if none is."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self._seconds_before = sum(seconds.values())
        self._buckets = ["other"]
        self._updated = time.perf_counter()

    def update(self) -> None:
        """Brings `seconds` up to now."""
        now = time.perf_counter()
        self.seconds[self._buckets[-1]] += now - self._updated
        self._updated = now

    def total(self) -> float:
        """Seconds up to now, including those of earlier starts of the run."""
        self.update()
        return sum(self.seconds.values())

    def since_start(self) -> float:
        return self.total() - self._seconds_before

    @contextmanager
    def time(self, bucket: str) -> Iterator[None]:
        assert bucket in self.seconds, bucket
        self.update()
        self._buckets.append(bucket)
        try:
            yield
        finally:
            self.update()
            self._buckets.pop()


def plot_loss(records: list[Record], path: Path, title: str) -> None:
    """Training and evaluation loss over steps, as a PNG."""
    from matplotlib.figure import Figure  # takes 0.5 s

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    train = [(r["step"], r["loss"]) for r in records if r.get("loss") is not None]
    evals = [(r["step"], r["eval_loss"]) for r in records if r.get("eval_loss") is not None]
    if train:
        axes.plot(*zip(*train, strict=True), color="#4c72b0", linewidth=1.4, label=f"training ({train[-1][1]:.3f})")
    if evals:
        label = f"evaluation ({evals[-1][1]:.3f})"
        axes.plot(*zip(*evals, strict=True), color="#dd8452", linewidth=1.4, marker="o", markersize=4, label=label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if train or evals:
        axes.legend(frameon=False)
    figure.savefig(path)
