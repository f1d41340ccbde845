"""A run between two steps: what the loop and its hooks share.

The host runs ahead of the devices: a step's metrics are read only when a hook needs them, or MAX_IN_FLIGHT steps
later."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import jax

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import Corpus
from spmd_lm.data.tasks.dataset import TaskDataset
from spmd_lm.runtime.metrics import Clock, MetricsLog, Record, Status
from spmd_lm.runtime.progress import Progress
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from spmd_lm.training.non_finite import NonFiniteGuard

MAX_IN_FLIGHT = 2  # steps dispatched and not waited for; each holds a batch, and none can be cancelled


@dataclass
class TrainingRun:
    """One start of a run: its fixed parts, and where it stands."""

    program: Program
    corpus: Corpus | TaskDataset
    checkpoints: Checkpointer
    status: Status
    clock: Clock
    metrics_log: MetricsLog | None  # None in processes that write no files
    progress: Progress
    state: TrainState  # on devices
    step: int  # steps done
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step that was read
    record: Record = field(default_factory=dict)  # what the hooks will log of this step
    _in_flight: deque[tuple[int, dict[str, jax.Array]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.guard = NonFiniteGuard(self.config, self.checkpoints, self.progress.log)

    @property
    def config(self) -> RunConfig:
        return self.program.config

    @property
    def directory(self) -> Path:
        return self.config.run.directory

    def is_due(self, every: int) -> bool:
        """Whether it is time for what happens every `every` steps and at the end; never if `every` is 0."""
        return every > 0 and (self.step % every == 0 or self.step == self.config.train.steps)

    def advance(self, step: int, state: TrainState, metrics: dict[str, jax.Array]) -> None:
        """Takes the results of `step`, still being computed, and waits for the step MAX_IN_FLIGHT before it."""
        self.step, self.state = step, state
        self._in_flight.append((step, metrics))
        while len(self._in_flight) > MAX_IN_FLIGHT:
            self._read_oldest()

    def wait(self) -> None:
        """Waits for every dispatched step.  NonFiniteError if one is not finite."""
        with self.clock.time("step"):
            while self._in_flight:
                self._read_oldest()

    def _read_oldest(self) -> None:
        step, arrays = self._in_flight.popleft()
        values = {name: array.item() for name, array in jax.device_get(arrays).items()}
        self.metrics = {"loss": values.pop("loss"), **values}
        self.guard.check_step(step, self.metrics)

    def save(self) -> None:
        """Saves a checkpoint of this step.  NonFiniteError, and no checkpoint, if its state is not finite."""
        self.wait()
        with self.clock.time("checkpoint"):
            self.guard.check_state(self.step, self.state)
            num_samples = self.step * self.config.train.batch
            meta = make_meta(self.config.model_dump(by_alias=True), num_samples, self.corpus.fingerprint)
            self.checkpoints.save(self.step, self.program.canonical(self.state), meta)

    def write_status(self, **changes: object) -> None:
        """Updates status.json."""
        self.clock.update()
        if self.metrics_log is not None:
            self.status.write(step=self.step, **changes)
