"""The files that report a run's progress: metrics.jsonl, TensorBoard events, status.json.

metrics.jsonl is the source of truth: one record per logged step, however often the run was restarted, with step, loss,
grad_norm, lr, tokens (since step 1), tokens_per_second, mfu (null where the hardware's peak is unknown), seconds (per
step, since the record before), eval_loss, eval_perplexity and eval_accuracy.  An objective with several losses adds
NAME_loss, eval_NAME_loss and eval_NAME_accuracy; labelled examples have the metrics that evaluation/task_metrics.py
lists.  Loss scaling adds loss_scale, skipped (true if this step left the parameters unchanged; its grad_norm is then
not a number) and skipped_steps (since step 1).  A step skipped by train.guard has skipped, reason and samples: the
positions of its first and last sample, counted from the run's first.  Experts add balance_loss, router_z_loss, and the
figures of training/expert_load.py."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from spmd_lm.config.types import MOST
from spmd_lm.errors import CheckpointError, Exit, OutputError
from spmd_lm.files import open_regular, parse_json, read_bytes, write_atomically
from spmd_lm.runtime.formatting import to_json, without_nan
from spmd_lm.runtime.outputs import writing
from spmd_lm.runtime.tensorboard import EventFile

Record = dict[str, Any]  # one line of metrics.jsonl

BUCKETS = ("init", "compile", "step", "eval", "checkpoint", "data", "other", "lost", "idle")
"""Categories of wall-clock time: the keys of status.json's goodput.  lost: steps that were repeated.  idle: between
attempts."""

CUT_SHORT = (None, Exit.PREEMPTED, Exit.HANG, Exit.PEER_LOST)  # exit codes of resumable attempts; None: killed

RunId = Annotated[str, Field(pattern=r"^\w*$", max_length=64)]  # random, also names a directory; '' if unknown

MAX_ATTEMPTS = 100  # kept in status.json: a spot machine's run may have thousands

MAX_STATUS_BYTES, MAX_METRICS_BYTES = 2**20, 2**28  # read at most; a million records take 2**28 bytes

NONE_SAVED = -1  # status.json's saved_step before the first checkpoint


def is_number(value: Any) -> bool:
    """True for a plausible value of a metric: finite, and small enough for a plot's axis."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def lower_is_better(figure: str) -> bool:
    """True for the name of a loss, a perplexity or nats in metrics.jsonl."""
    return bool({"loss", "perplexity", "nats"} & {*figure.split("_")})


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl, without a last line that a crash cut short; [] if there is no file."""
    if not path.exists():
        return []
    try:
        *lines, _ = read_bytes(path, MAX_METRICS_BYTES).split(b"\n")  # the last part is unfinished
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Move it away.") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError(f"{record!r:.40} is no object with an integer 'step'")
            for key, value in record.items():
                if isinstance(value, int) and abs(value) >= 2**63:
                    raise ValueError(f"no run has a {key:.40} of {value!r:.40}")
        except ValueError as error:
            where = f"{path}: line {number}"
            raise CheckpointError(
                f"{where} is not a record ({error}). Fix that line, or move the file away."
            ) from error
        records.append(record)
    return records


class MetricsLog:
    """Appends records to metrics.jsonl and to TensorBoard, after dropping those beyond `resume_step`.

    A float is written as Python's shortest repr, which reads back as the same bits; NaN and infinity become null."""

    def __init__(self, directory: Path, resume_step: int = 0):
        self.path = directory / "metrics.jsonl"
        self._resume_step = resume_step
        records = [record for record in read_records(self.path) if record["step"] <= resume_step]
        self._last_step = max((record["step"] for record in records), default=0)
        text = "".join(to_json(record) + "\n" for record in records)
        with writing(self.path, len(text)):
            write_atomically(self.path, text)
            self._file = open(self.path, "a", encoding="utf-8", opener=open_regular)  # noqa: SIM115 (closed by close)
        events = directory / "tensorboard"
        with writing(events):
            self._tensorboard = EventFile(events, first_step=resume_step + 1)
        self.listeners: list[Callable[[Record], None]] = []  # called with each record

    def missing_steps(self, log_every: int) -> tuple[int, int] | None:
        """The first and last step up to `resume_step` with a missing record, or None."""
        due = self._last_step + log_every - self._last_step % log_every
        return (due, self._resume_step) if due <= self._resume_step else None

    def write(self, record: Record) -> None:
        """Raises OutputError if it cannot be written, or would be lost: nothing may be written after it."""
        line = to_json(record) + "\n"
        if not self.path.exists() or not os.path.samefile(self.path, self._file.fileno()):
            raise OutputError(f"{self.path}: was moved, replaced or removed while the run wrote it. Move it back.")
        with writing(self.path, len(line)):
            self._file.write(line)
            self._file.flush()
        scalars = {
            key: value for key, value in without_nan(record).items() if key != "step" and isinstance(value, int | float)
        }
        with writing(self._tensorboard.path):
            self._tensorboard.write(record["step"], scalars)
        for listener in self.listeners:
            listener(record)

    def close(self) -> None:
        for file in (self._file, self._tensorboard):
            with suppress(OSError):  # unwritten data is still in its buffer
                file.close()


def valid_time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except (OverflowError, OSError) as error:
        raise ValueError(f"no time of any run: {error}") from None
    return text


NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
StepNumber = Annotated[int, Field(ge=-1, lt=2**63)]
Seconds = Annotated[float, Field(ge=-1, lt=1e12)]


class Attempt(BaseModel):
    """One start of a run: its devices and progress."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    started: Annotated[str, AfterValidator(valid_time)]  # ISO 8601, UTC
    first_step: StepNumber
    last_step: StepNumber  # done so far; before its first step, the preceding one
    seconds: Seconds = 0.0
    exit_code: int | None = None  # None while running, and of a process that was killed
    devices: Annotated[int, Field(ge=1, le=MOST)]
    platform: str
    device_kind: str
    processes: int
    recovery: Seconds | None = None  # from an attempt that was cut short to this one's first step
    peak_bytes: NonNegative | None = None  # most on one device of the first process; None if not measured

    @classmethod
    def begin(cls, steps_done: int) -> "Attempt":
        """An attempt by this process, on all of jax's devices."""
        import jax  # a run's status is read without it

        device = jax.devices()[0]
        return cls(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            first_step=steps_done + 1,
            last_step=steps_done,
            devices=jax.device_count(),
            platform=device.platform,
            device_kind=device.device_kind,
            processes=jax.process_count(),
        )

    def ended(self) -> float:
        """Time of its last update, in seconds since the epoch."""
        return datetime.fromisoformat(self.started).timestamp() + self.seconds

    def measure(self) -> None:
        import jax

        with suppress(RuntimeError):  # a lost device: this must not hide the error that reports it
            stats = [device.memory_stats() or {} for device in jax.local_devices()]
            peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
            self.peak_bytes = max(peaks, default=self.peak_bytes)


class Status(BaseModel):
    """The state of a run, status.json."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    path: Path = Field(exclude=True)
    state: str  # running | done | preempted | failed
    step: StepNumber  # done
    exit_code: int | None = None  # None while running
    run_id: RunId = ""  # random, also in its checkpoints; empty in older versions
    saved_step: StepNumber | None = None  # the newest checkpoint's, or NONE_SAVED; None in older versions
    restarts: NonNegative
    goodput: dict[str, Seconds]  # wall-clock seconds of all its attempts, by BUCKETS
    compile_seconds: Seconds | None = None  # the last compilation's: an estimate of the next one's
    recovery: dict[str, Seconds] | None = None  # count, p50 and max of its attempts' recoveries, in seconds
    # the last MAX_ATTEMPTS ones, the newest last; empty in older versions
    attempts: list[Attempt] = Field(default=[], validation_alias="lives", serialization_alias="lives")

    @classmethod
    def read(cls, directory: Path) -> "Status | None":
        """The status in a run's directory, or None."""
        path = directory / "status.json"
        if not os.path.exists(path):  # unlike Path.exists, False without permission to look
            return None
        try:
            values = parse_json(read_bytes(path, MAX_STATUS_BYTES))
            if not isinstance(values, dict) or "path" in values:
                raise ValueError(f"expected an object of its keys, got {values!r:.40}")
            return cls(path=path, **values)
        except (OSError, TypeError, ValueError) as error:
            problem = str(error)
            if isinstance(error, ValidationError):
                faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r:.40}" for e in error.errors()]
                problem = "; ".join(faults)
            raise CheckpointError(f"{path}: not a run's status ({problem}). Move the file away.") from error

    def goodput_until(self, resume_step: int) -> dict[str, float]:
        """`goodput` when the next attempt begins, which resumes after this step."""
        spent = dict.fromkeys(BUCKETS, 0.0) | self.goodput
        if not self.attempts:
            return spent
        last, done = self.attempts[-1], sum(max(0, each.last_step - each.first_step + 1) for each in self.attempts)
        if lost_steps := max(0, last.last_step - resume_step):
            seconds = spent["step"] * min(1.0, lost_steps / done)
            spent |= {"step": spent["step"] - seconds, "lost": spent["lost"] + seconds}
        if last.exit_code != Exit.DONE:
            spent["idle"] += max(0.0, time.time() - last.ended())
        return spent

    def is_ancestor(self, step: int, start: int) -> bool:
        """True if the state after `step`, as computed by attempt number `start` (from 0), is in the run's history: no
        later attempt resumed from an earlier step."""
        num_later = self.restarts - start
        later = self.attempts[len(self.attempts) - num_later :]
        went_on = [attempt for attempt in later if attempt.last_step >= attempt.first_step]
        return 0 <= num_later <= len(self.attempts) and all(attempt.first_step > step for attempt in went_on)

    def first_step_done(self) -> None:
        """Records the recovery time of a run that was cut short."""
        if len(self.attempts) > 1 and self.attempts[-2].exit_code in CUT_SHORT:
            self.attempts[-1].recovery = max(0.0, time.time() - self.attempts[-2].ended())
        if recoveries := [attempt.recovery for attempt in self.attempts if attempt.recovery is not None]:
            median = statistics.median(recoveries)
            self.recovery = {"count": len(recoveries), "p50": median, "max": max(recoveries)}

    def write(self, clock: "Clock | None" = None, **changes: Any) -> None:
        """Writes the file.  Raises OutputError if it cannot be written.
        clock: this attempt's; the attempt is then updated too."""
        for key, value in changes.items():
            setattr(self, key, value)
        if clock is not None and self.attempts:
            attempt = self.attempts[-1]
            attempt.seconds, attempt.last_step, attempt.exit_code = clock.elapsed()[0], self.step, self.exit_code
            attempt.measure()
        text = to_json(self.model_dump(by_alias=True), indent=2) + "\n"
        with writing(self.path, len(text)):
            write_atomically(self.path, text)


class Clock:
    """Adds every second to one bucket of `seconds`: the innermost one being timed, else `other`."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self._seconds_before = sum(seconds.values())
        self._buckets = ["other"]
        self._updated = time.perf_counter()

    @property
    def bucket(self) -> str:
        return self._buckets[-1]

    def update(self) -> None:
        now = time.perf_counter()
        self.seconds[self._buckets[-1]] += now - self._updated
        self._updated = now

    def elapsed(self) -> tuple[float, float]:
        """Seconds of this attempt, and of all attempts, up to now."""
        self.update()
        total = sum(self.seconds.values())
        return total - self._seconds_before, total

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
