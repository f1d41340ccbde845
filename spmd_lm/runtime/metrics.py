"""The files that report a run's progress: metrics.jsonl, TensorBoard events, status.json.

metrics.jsonl is the source of truth: one record per logged step, however often the run was restarted, with step, loss,
grad_norm, lr, tokens (since step 1), tokens_per_second, mfu (null where the hardware's peak is unknown), seconds (per
step, since the record before), eval_loss, eval_perplexity and eval_accuracy.  An objective with several losses adds
NAME_loss, eval_NAME_loss and eval_NAME_accuracy; labelled examples have the metrics that evaluation/task_metrics.py
lists.  Loss scaling adds loss_scale, skipped (whether this step left the parameters unchanged; its grad_norm is then
not a number) and skipped_steps (since step 1).  A step that train.guard skipped has skipped, reason and samples: the
positions of the first and the last of its samples, counted from the run's first."""

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

Record = dict[str, Any]
"""One line of metrics.jsonl."""

BUCKETS = ("init", "compile", "step", "eval", "checkpoint", "data", "other", "lost", "idle")
"""What wall-clock seconds are spent on: the keys of status.json's goodput.  lost: on steps that were done again.  idle:
between the end of one start and the next."""

CUT_SHORT = (None, Exit.PREEMPTED, Exit.HANG, Exit.PEER_LOST)
"""Exit codes of starts after which a run goes on by itself; None is that of a process that was killed."""

RunId = Annotated[str, Field(pattern=r"^\w*$", max_length=64)]
"""Random, of one run; it is the name of a directory.  Empty: not known."""

MAX_LIVES = 100
"""Starts that status.json remembers: a spot machine's run may have thousands."""

MAX_STATUS_BYTES, MAX_METRICS_BYTES = 2**20, 2**28  # of what is read; a million records have 2**28 bytes

NONE_SAVED = -1
"""status.json's saved_step before the first checkpoint."""


def is_number(value: Any) -> bool:
    """Whether a metric can have this value: no text, nothing that is not finite or that no axis could have."""
    return isinstance(value, int | float) and abs(value) < 1e100


def lower_is_better(figure: str) -> bool:
    """Whether the lower of two values of a figure of metrics.jsonl is the better one: by the words of its name."""
    return bool({"loss", "perplexity", "nats"} & {*figure.split("_")})


def read_records(path: Path) -> list[Record]:
    """The records of a metrics.jsonl without a last line that a crash cut short; [] if there is no file."""
    if not path.exists():
        return []
    try:
        *lines, _ = read_bytes(path, MAX_METRICS_BYTES).split(b"\n")  # what follows the last one is unfinished
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
        """First and last of the steps up to `resume_step` whose records are missing; None if none is."""
        due = self._last_step + log_every - self._last_step % log_every
        return (due, self._resume_step) if due <= self._resume_step else None

    def write(self, record: Record) -> None:
        """OutputError if it cannot be written, or nobody would find it: nothing may be written after it."""
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
            with suppress(OSError):  # what could not be written is still in its buffer
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


class Life(BaseModel):
    """One start of a run: what it ran on, and how far it came."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    started: Annotated[str, AfterValidator(valid_time)]  # ISO 8601, UTC
    first_step: StepNumber
    last_step: StepNumber  # done so far; before its first step, the one before that
    seconds: Seconds = 0.0
    exit_code: int | None = None  # None while running, and of a process that was killed
    devices: Annotated[int, Field(ge=1, le=MOST)]
    platform: str
    device_kind: str
    processes: int
    recovery: Seconds | None = None  # seconds from the end of the start before, which was cut short, to the first step
    peak_bytes: NonNegative | None = None  # the most on one device of the first process; None where it is not measured

    @classmethod
    def begin(cls, steps_done: int) -> "Life":
        """Of this process, on all of jax's devices."""
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
        """Seconds since the epoch: of its last sign of life."""
        return datetime.fromisoformat(self.started).timestamp() + self.seconds

    def measure(self) -> None:
        """Updates peak_bytes, where the backend counts."""
        import jax

        with suppress(RuntimeError):  # of a device that is lost: the error that tells so must not be hidden
            stats = [device.memory_stats() or {} for device in jax.local_devices()]
            peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
            self.peak_bytes = max(peaks, default=self.peak_bytes)


class Status(BaseModel):
    """status.json: where a run stands."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    path: Path = Field(exclude=True)
    state: str  # running | done | preempted | failed
    step: StepNumber  # done
    exit_code: int | None = None  # None while running
    run_id: RunId = ""  # random; its checkpoints have the same.  Empty: of a version without
    saved_step: StepNumber | None = None  # of the newest checkpoint, or NONE_SAVED.  None: of an older version
    restarts: NonNegative
    goodput: dict[str, Seconds]  # wall-clock seconds of all its starts, by BUCKETS
    compile_seconds: Seconds | None = None  # of the last compilation: an estimate of the next one
    recovery: dict[str, Seconds] | None = None  # count, p50 and max of its lives' recoveries, in seconds
    lives: list[Life] = []  # the last MAX_LIVES starts, the newest last; none of versions that did not write them

    @classmethod
    def read(cls, directory: Path) -> "Status | None":
        """The status in a run's directory, None if there is none."""
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

    def spent_until(self, resume_step: int) -> dict[str, float]:
        """goodput at the next start, which resumes after this step."""
        spent = dict.fromkeys(BUCKETS, 0.0) | self.goodput
        if not self.lives:
            return spent
        last, done = self.lives[-1], sum(max(0, life.last_step - life.first_step + 1) for life in self.lives)
        if lost_steps := max(0, last.last_step - resume_step):
            seconds = spent["step"] * min(1.0, lost_steps / done)
            spent |= {"step": spent["step"] - seconds, "lost": spent["lost"] + seconds}
        if last.exit_code != Exit.DONE:
            spent["idle"] += max(0.0, time.time() - last.ended())
        return spent

    def leads_through(self, step: int, start: int) -> bool:
        """Whether today's run came through the state after `step` as its start of this number, from 0, computed it: no
        later start resumed from an earlier step."""
        num_later = self.restarts - start
        later = self.lives[len(self.lives) - num_later :]
        went_on = [life for life in later if life.last_step >= life.first_step]
        return 0 <= num_later <= len(self.lives) and all(life.first_step > step for life in went_on)

    def first_step_done(self) -> None:
        """Takes the time that the run needed to go on, if it was cut short."""
        if len(self.lives) > 1 and self.lives[-2].exit_code in CUT_SHORT:
            self.lives[-1].recovery = max(0.0, time.time() - self.lives[-2].ended())
        if recoveries := [life.recovery for life in self.lives if life.recovery is not None]:
            median = statistics.median(recoveries)
            self.recovery = {"count": len(recoveries), "p50": median, "max": max(recoveries)}

    def write(self, clock: "Clock | None" = None, **changes: Any) -> None:
        """clock: of this start, whose life is then brought up to date too.  OutputError if it cannot be written."""
        for key, value in changes.items():
            setattr(self, key, value)
        if clock is not None and self.lives:
            life = self.lives[-1]
            life.seconds, life.last_step, life.exit_code = clock.elapsed()[0], self.step, self.exit_code
            life.measure()
        text = to_json(self.model_dump(), indent=2) + "\n"
        with writing(self.path, len(text)):
            write_atomically(self.path, text)


class Clock:
    """Adds every second to one bucket of `seconds`: the innermost one being timed, `other` if none is."""

    def __init__(self, seconds: dict[str, float]):
        self.seconds = seconds
        self._seconds_before = sum(seconds.values())
        self._buckets = ["other"]
        self._updated = time.perf_counter()

    @property
    def bucket(self) -> str:
        """What is being timed."""
        return self._buckets[-1]

    def update(self) -> None:
        """Brings `seconds` up to now."""
        now = time.perf_counter()
        self.seconds[self._buckets[-1]] += now - self._updated
        self._updated = now

    def elapsed(self) -> tuple[float, float]:
        """Seconds of this start of the run, and of all its starts, up to now."""
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
