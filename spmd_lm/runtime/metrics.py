"""What a run leaves behind for eyes and scripts: metrics.jsonl, TensorBoard events, status.json, loss.png.

metrics.jsonl is the truth, one object per step: step, loss, grad_norm, lr, tokens (since step 1), tokens_per_second,
mfu (null where the hardware's peak is unknown), seconds (per step, since the record before), eval_loss,
eval_perplexity, eval_accuracy; of an objective with several losses NAME_loss, eval_NAME_loss and eval_NAME_accuracy; of
labelled examples see evaluation/task_metrics.py; where the loss is scaled, loss_scale, skipped (whether this
step left the parameters as they were, and its grad_norm is no number) and skipped_steps (since step 1). A step stands
there once, however often the run was resumed."""

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

BUCKETS = ("init", "compile", "step", "eval", "checkpoint", "data", "other")


def write_atomically(path: Path, text: str) -> None:
    """A reader, or a crash, sees the old text or the new one, never a part."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl, less a last line that a crash cut short; none where there is no file."""
    if not path.exists():
        return []
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # what follows the last newline was never finished
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Move it away.") from error
    return [_record(line, f"{path}: line {number}") for number, line in enumerate(lines, 1)]


def _record(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8"))
        _expect(record, {"step": int})
    except ValueError as error:
        raise CheckpointError(
            f"{where} is not a step's record ({error}). Mend that line, or move the file away."
        ) from error
    return record


def _expect(value: Any, kinds: dict[str, type]) -> None:
    """Raises ValueError unless it is a JSON object with these keys of these types."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {value!r:.40}")
    for key, kind in kinds.items():
        if type(value.get(key)) is not kind:
            raise ValueError(f"'{key}' is {value.get(key, 'missing')!r:.40}")


class MetricsLog:
    """Appends to metrics.jsonl and to TensorBoard, from step `after` + 1 on; what stood beyond `after` is dropped.

    A number is written as Python's shortest repr, which reads back as the same bits; NaN and infinity become null."""

    def __init__(self, directory: Path, after: int = 0):
        self.path = directory / "metrics.jsonl"
        self._after = after
        kept = [record for record in read_records(self.path) if record["step"] <= after]
        self._last = max((record["step"] for record in kept), default=0)
        write_atomically(self.path, "".join(map(_line, kept)))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=after + 1)

    def missing(self, every: int) -> tuple[int, int] | None:
        """First and last of the steps up to `after` that a file with a record `every` so many steps lacks."""
        due = self._last + every - self._last % every
        return (due, self._after) if due <= self._after else None

    def write(self, record: Record) -> None:
        self._file.write(_line(record))
        self._file.flush()
        for key, value in _finite(record).items():
            if key != "step" and value is not None:
                self._tensorboard.add_scalar(key, value, record["step"])

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def _finite(record: Record) -> Record:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _line(record: Record) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


@dataclass
class Status:
    """status.json: where a run stands.  `goodput` is the wall-clock seconds of all its lives, by what they went to."""

    path: Path
    state: str = "running"  # running | done | preempted | failed
    step: int = 0  # steps done
    exit_code: int | None = None  # None while running
    restarts: int = 0
    goodput: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    compile_seconds: float | None = None  # of the newest compilation: what the next one may take

    @classmethod
    def read(cls, directory: Path) -> "Status | None":
        """The status in a run's directory, None where there is none."""
        path = directory / "status.json"
        if not os.path.exists(path):  # unlike Path.exists, false where it may not look
            return None
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            _expect(fields, {"state": str, "step": int, "restarts": int, "goodput": dict})
            for seconds in (*fields["goodput"].values(), fields.get("compile_seconds") or 0.0):
                if type(seconds) not in (int, float) or not math.isfinite(seconds):
                    raise ValueError(f"{seconds!r:.40} is no number of seconds")
            return cls(path, **fields)
        except (OSError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: not a status that we wrote ({error}). Move the file away.") from error

    def write(self, **changes: Any) -> None:
        for key, value in changes.items():
            setattr(self, key, value)
        write_atomically(self.path, json.dumps({k: v for k, v in asdict(self).items() if k != "path"}, indent=2) + "\n")


class Clock:
    """Books every second to one bucket of `seconds`: the innermost that is open, `other` where none is."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self._before = sum(seconds.values())
        self._open = ["other"]
        self._since = time.perf_counter()

    def book(self) -> None:
        """Brings `seconds` up to now."""
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def total(self) -> float:
        """Seconds up to now, those that were booked before this clock was made among them."""
        self.book()
        return sum(self.seconds.values())

    def this_life(self) -> float:
        return self.total() - self._before

    @contextmanager
    def time(self, bucket: str) -> Iterator[None]:
        assert bucket in self.seconds, bucket
        self.book()
        self._open.append(bucket)
        try:
            yield
        finally:
            self.book()
            self._open.pop()


def plot_loss(records: list[Record], path: Path, title: str) -> None:
    """Training and evaluation loss over steps, as a PNG."""
    from matplotlib.figure import Figure  # 0.5 s, and only here

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
