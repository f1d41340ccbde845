"""A run between two steps: the state that the loop shares with its hooks, which evaluate, log and save when due.

The host runs ahead of the devices: a step's metrics are read only when a hook needs them, or MAX_IN_FLIGHT steps
later.  A run with a non-finite loss, gradient or state ends before a checkpoint of it replaces a good one."""

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import jax
import numpy as np

from spmd_lm.checkpoints.checkpointer import make_meta
from spmd_lm.checkpoints.record import Meta
from spmd_lm.checkpoints.tiers import Tiers
from spmd_lm.config.own_modules import as_saved
from spmd_lm.config.suggest import did_you_mean
from spmd_lm.cost_model.flops import Utilization
from spmd_lm.data.corpus import Dataset
from spmd_lm.data.loader import Loader
from spmd_lm.errors import CheckpointError, ConfigError, Exit, NonFiniteError, OutputError
from spmd_lm.evaluation.evaluate import validation_metrics
from spmd_lm.evaluation.tasks.task import EvalTask
from spmd_lm.evaluation.zero_shot import score_tasks
from spmd_lm.models.context import STATISTICS
from spmd_lm.runtime.formatting import without_nan
from spmd_lm.runtime.metrics import Clock, MetricsLog, Record, Status, is_number
from spmd_lm.runtime.outputs import print_line
from spmd_lm.runtime.progress import Progress
from spmd_lm.step.guard import EXCLUDED, SKIP_REASONS
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.expert_load import CollapseWatch, load_figures
from spmd_lm.training.replicas import ReplicaCheck

MAX_IN_FLIGHT = 2  # steps dispatched but not awaited; each holds a batch, and none can be cancelled

MAX_OVERFLOWS = 20
"""Consecutive steps that may overflow at the smallest loss scale.  They leave the parameters unchanged, so the cause is
neither one odd batch nor too large a scale: the model has left float16's range."""


@dataclass
class TrainingRun:
    """One attempt at a run: its fixed parts, and its current state."""

    program: Program
    corpus: Dataset
    vocabulary: str  # its hash; '' for data without text
    rules: int  # version of the rules that turn documents into tokens
    validation: Loader | None  # the same batches every time; None if train.eval_every is 0
    tiers: Tiers
    status: Status
    clock: Clock
    metrics_log: MetricsLog | None  # None in processes that write no files
    progress: Progress
    state: TrainState  # on devices
    base: Meta = field(default_factory=dict)  # checkpoints' metadata about a base that they do not hold
    metrics: dict[str, float] = field(default_factory=dict)  # the newest step's that was read
    counts: dict[str, np.ndarray] = field(default_factory=dict)  # STATISTICS of the same step
    record: Record = field(default_factory=dict)  # to be logged for this step
    logged: Record = field(default_factory=dict)  # the newest record
    tasks: Sequence[EvalTask] = ()  # those in train.eval_tasks
    _in_flight: deque[tuple[int, dict[str, jax.Array]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.config, self.step = self.program.config, self.status.step  # steps done
        self._directory = os.stat(self.config.run.directory)
        self.profiling = False
        self._first_step = self.step + 1
        self.replica_check = ReplicaCheck(self.program) if self.config.train.replica_check_every else None
        self.failure: OutputError | None = None  # the first file that could not be written: the run saves and ends
        self.overflows = 0  # steps in a row that overflowed at the smallest loss scale
        self.skips_in_a_row = 0  # without steps in train.guard.exclude
        self.collapse_watch = CollapseWatch(self.config.optim.warmup)
        self._measured = self.step, self.clock.seconds["step"] + self.clock.seconds["data"]  # at the last `speed`

    @cached_property
    def utilization(self) -> Utilization:
        return Utilization.of(self.config, self.program.plan, self.program.device)

    @property
    def profile_directory(self) -> Path:
        return self.config.run.directory / "profile"

    def steps_of_first_executions(self) -> set[int]:
        """Steps during or after which a program with attention is first executed: the train step, and evaluation."""
        train, first = self.config.train, self._first_step
        first_evaluation = -(-first // train.eval_every) * train.eval_every if train.eval_every else first
        return {first, min(first_evaluation, train.steps)}

    def is_due(self, every: int) -> bool:
        """True every `every` steps and at the end; never if `every` is 0."""
        return every > 0 and (self.step % every == 0 or self.step == self.config.train.steps)

    def advance(self, step: int, state: TrainState, metrics: dict[str, jax.Array]) -> None:
        """Takes the results of `step`, still being computed, and waits for the step MAX_IN_FLIGHT before it."""
        self.step, self.state = step, state
        self._in_flight.append((step, metrics))
        self._read(MAX_IN_FLIGHT)

    def wait(self) -> None:
        """Waits for every dispatched step.  Raises NonFiniteError if one is not finite."""
        with self.clock.time("step"):
            self._read(0)

    def _read(self, max_in_flight: int) -> None:
        while len(self._in_flight) > max_in_flight:
            step, arrays = self._in_flight.popleft()
            arrays = jax.device_get(arrays)
            self.counts = {name: arrays[name] for name in STATISTICS if name in arrays}
            values = {name: array.item() for name, array in arrays.items() if name not in STATISTICS}
            if step == self._first_step:
                self.status.first_step_done()
            reason = values.pop("skip_reason", 0)
            self.metrics = {"loss": values.pop("loss"), **values}
            if reason:
                self._log_skip(step, reason)
            else:
                self._check_step(step)
                self.skips_in_a_row = 0

    def _log_skip(self, step: int, reason: int) -> None:
        """Logs a skipped step, with its samples.  Raises NonFiniteError after too many in a row."""
        batch, max_skips, why = self.config.train.batch, self.config.train.guard.max_skips, SKIP_REASONS[reason]
        first, last = (step - 1) * batch, step * batch - 1  # samples, counted from the run's first
        skip = {"skipped": True, "reason": why, "samples": [first, last]}
        self.skips_in_a_row += reason != EXCLUDED
        ends = self.skips_in_a_row > max_skips
        if step == self.step and self.is_due(self.config.train.log_every) and not ends:
            self.record |= skip  # `log` writes it
        elif self.metrics_log is not None:
            self.report(partial(self.metrics_log.write, {"step": step, **skip}))
        if reason != EXCLUDED:
            self.progress.log(f"step {step} was skipped, samples {first} to {last}: {why}")
        if ends:
            steps = f"steps {step - max_skips} to {step}" if max_skips else f"step {step}"
            raise self.non_finite(f"{steps}: {why}; train.guard.max_skips={max_skips}")

    def _check_step(self, step: int) -> None:
        """Requires finite values, except for skipped steps while the loss scale can be lowered."""
        metrics, smallest = self.metrics, self.config.precision.min_scale
        if not metrics.get("skipped"):
            self.overflows = 0
            if not all(map(math.isfinite, metrics.values())):
                values = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
                raise self.non_finite(f"step {step}: {values}", cause=step - 1)
        elif metrics["loss_scale"] <= smallest:
            self.overflows += 1
            overflow = f"gradients overflow float16 at precision.min_scale={smallest:g}"
            self.progress.log(f"step {step}: {overflow}: skipped, and there is no smaller scale to try.")
            if self.overflows == MAX_OVERFLOWS:
                raise self.non_finite(f"steps {step - MAX_OVERFLOWS + 1} to {step}: {overflow}")

    def non_finite(self, problem: str, cause: int | None = None) -> NonFiniteError:
        """The error, with advice.  cause: the step whose state leads to it, and would again if resumed from."""
        with suppress(CheckpointError):
            self.tiers.durable.wait()
        directories, advice = self.tiers.directories(), ""
        if cause in directories:
            of_cause = " and ".join(map(str, directories.pop(cause)))
            advice = f"Move {of_cause} away: resuming from it would fail again. "
        saved = [*directories]
        scaling = " precision.loss_scale=none" if self.config.precision.loss_scale == "dynamic" else ""
        restart = f"resume from step {saved[-1]}, the last good checkpoint" if saved else "start from step 0"
        return NonFiniteError(
            f"{problem}. Training cannot continue. {advice}Lower optim.lr, lengthen optim.warmup, or set "
            f"precision.compute=float32{scaling}, and train again: it will {restart}."
        )

    def save(self, durable: bool = True, local: bool = False) -> None:
        """Saves a checkpoint of this step.  Raises NonFiniteError, without saving, if its state is not finite."""
        self.require_directory()
        self.wait()
        with self.clock.time("checkpoint"):
            self.wait_for_save()
            num_samples = self.step * self.config.train.batch
            config = as_saved(self.config).model_dump(by_alias=True)
            meta = make_meta(config, num_samples, self.corpus.fingerprint, self.vocabulary, self.rules)
            figures = self.logged if self.logged.get("step") == self.step else {}
            meta |= {"start": self.status.restarts, "devices": jax.device_count(), "figures": without_nan(figures)}
            saved = self.step, self.program.saved_part(self.program.to_save(self.state)), meta | self.base
            try:
                if local:
                    self._or_end(lambda: self.tiers.save_local(*saved))
                if durable:
                    self.tiers.durable.save(*saved)
            except NonFiniteError as error:  # the loss, of the state before the update, does not show it
                raise self.non_finite(str(error), cause=self.step) from None

    def wait_for_save(self, seconds: float | None = None) -> None:
        """Waits for the save in progress, at most for `seconds`.  Raises CheckpointError if it failed."""
        self._or_end(lambda: self.tiers.wait_local(seconds))
        saved_step = self.tiers.durable.wait(seconds)
        if saved_step is not None and saved_step != self.status.saved_step:
            self.status.saved_step = saved_step
            self.write_status()

    def _or_end(self, act: Callable[[], None]) -> None:
        """Ends the run, with a durable checkpoint, if a local one cannot be saved."""
        try:
            act()
        except OutputError as error:
            self.failure = self.failure or error

    def require_directory(self) -> None:
        """Raises OutputError if the run's directory is gone or replaced: orbax would create a new one; or if another
        process has taken over its bucket."""
        if self.tiers.bucket_run:
            self.tiers.bucket_run.require()
        directory = self.config.run.directory
        try:
            in_place = os.path.samestat(os.stat(directory), self._directory)
        except OSError:
            in_place = False
        if self.metrics_log is not None:  # other processes may see files later
            in_place = in_place and self.status.path.exists()
        if not in_place:
            raise OutputError(f"{directory}: was moved, replaced or removed while the run wrote it. Move it back.")

    def end_profile(self) -> None:
        """Writes the trace of the steps so far, if one was started."""
        if self.profiling:
            self.wait()
            self.profiling = False
            self.report(self._write_profile)

    def _write_profile(self) -> None:
        try:
            jax.profiler.stop_trace()
        except (OSError, jax.errors.JaxRuntimeError) as error:
            raise OutputError(f"{self.profile_directory}: the trace cannot be written: {error}. Mend that.") from error
        self.progress.log(f"traced until step {self.step}: xprof --logdir {self.profile_directory}")

    def report_hang(self, what: str) -> None:
        """Reports a hang; called from another thread, because this one hangs."""
        print_line(f"error: {what}", sys.stderr)
        with suppress(OSError, RuntimeError):
            self.write_status(state="failed", exit_code=int(Exit.HANG))

    def write_status(self, **changes: object) -> None:
        self.clock.update()
        if self.metrics_log is not None:
            self.report(self.require_directory)
            self.report(partial(self.status.write, self.clock, step=self.step, **changes))

    def report(self, write: Callable[[], None]) -> None:
        """Calls a function that writes a file about this run, unless an earlier one failed."""
        if self.failure is None:
            try:
                write()
            except OutputError as error:
                self.failure = error

    def speed(self) -> Record:
        """Speed since the last call.  Only steps and their data count, not evaluations and checkpoints."""
        self.clock.update()
        (last_step, last_seconds), program = self._measured, self.program
        self._measured = self.step, self.clock.seconds["step"] + self.clock.seconds["data"]
        step_seconds = (self._measured[1] - last_seconds) / (self.step - last_step)
        return {
            "tokens": self.step * program.tokens_per_step,
            "tokens_per_second": program.tokens_per_step / step_seconds,
            "mfu": self.utilization.mfu(step_seconds),
            "seconds": step_seconds,
        }


def evaluate(run: TrainingRun) -> None:
    """Evaluates on the validation data, after the last step too."""
    if run.validation is None or not run.is_due(run.config.train.eval_every):
        return
    run.wait()
    with run.clock.time("eval"):
        metrics, _ = validation_metrics(run.program, run.state.params, run.validation)
        metrics |= task_figures(run)
    if not math.isfinite(metrics["eval_loss"]):
        raise run.non_finite(f"evaluation after step {run.step}: loss {metrics['eval_loss']:g}", cause=run.step)
    run.record |= metrics


def task_figures(run: TrainingRun) -> Record:
    """Figures of the zero-shot tasks, as eval_TASK_METRIC."""
    try:
        figures = score_tasks(run.program, run.state.params, run.tasks)
    except NonFiniteError as error:
        raise run.non_finite(f"evaluation after step {run.step}: {error}", cause=run.step) from None
    return {f"eval_{task}_{name}": value for task, each in figures.items() for name, value in each.metrics.items()}


def log(run: TrainingRun) -> None:
    """Writes the record: a step's metrics, the speed since the last one, and additions by earlier hooks."""
    run.progress.step(run.step)
    if run.is_due(run.config.train.log_every):
        run.wait()
        of_experts = load_figures(run.counts)
        run.record = run.metrics | of_experts | run.speed() | run.record
        if of_experts and (problem := run.collapse_watch.problem(run.step, of_experts["expert_load"])):
            run.progress.log(problem)
    if not run.record:
        return
    record, run.record = {"step": run.step, **run.record}, {}
    run.logged = record
    if run.metrics_log is not None:
        run.report(partial(run.metrics_log.write, record))
    run.progress.record(record)
    run.write_status()


def check_replicas(run: TrainingRun) -> None:  # before a checkpoint is saved
    if run.is_due(run.config.train.replica_check_every):
        run.wait()
        assert run.replica_check is not None
        run.replica_check.check(run.state, run.step)


def save_checkpoint(run: TrainingRun) -> None:
    """Saves when due; after every step also checks the save in progress, which may have failed."""
    run.wait_for_save(seconds=0)
    options = run.config.checkpoint
    durable, local = run.is_due(options.every), run.is_due(options.local.every if options.local else 0)
    if durable or local:
        run.save(durable, local)
        run.write_status()
    if durable and options.keep_best and options.keep_best not in run.logged:
        figures = [name for name, value in run.logged.items() if is_number(value) and name != "step"]
        near = did_you_mean(options.keep_best, figures)
        way = f"Did you mean {near}?" if near else f"Use one of {', '.join(figures)}."
        raise ConfigError(f"checkpoint.keep_best={options.keep_best}: step {run.step} has no such figure. {way}")


def start_profile(run: TrainingRun) -> None:
    """Starts the trace before its first step.  jax.named_scope marks embedding, blocks and head, and communication."""
    profile = run.config.train.profile
    if profile and run.step == profile.steps[0] - 1:
        run.wait()
        jax.profiler.start_trace(run.profile_directory)
        run.profiling = True


def stop_profile(run: TrainingRun) -> None:
    """Stops the trace after its last step."""
    profile = run.config.train.profile
    if profile and run.step == profile.steps[1]:
        run.end_profile()


HOOKS: tuple[Callable[[TrainingRun], None], ...] = (
    stop_profile,
    evaluate,
    log,
    check_replicas,
    save_checkpoint,
    start_profile,
)
"""Called after every step; each acts when due."""
