"""What happens between two steps: evaluate, log, save.  A hook is called after every step and knows when it is due.

The host runs ahead of the devices: a step's figures are read only when a hook needs them, or IN_FLIGHT steps later."""

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import Corpus
from spmd_lm.data.loader import make_validation_loader
from spmd_lm.data.tasks.dataset import Labelled
from spmd_lm.errors import CheckpointError, NonFiniteError
from spmd_lm.evaluation.evaluate import validation_figures
from spmd_lm.runtime.metrics import Clock, MetricsLog, Record, Status
from spmd_lm.runtime.progress import Progress
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState

IN_FLIGHT = 2  # steps sent to the devices and not waited for; each holds a batch, and none can be taken back


PATIENCE = 20
"""Steps in a row that may overflow at the least scale.  They leave the parameters as they are, so that it is neither
one odd batch nor a scale still too large: the model has left float16's range."""


@jax.jit
def all_finite(state: TrainState) -> jax.Array:
    """Whether every number in it is one: a bool, on devices."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


@dataclass
class Run:
    """One life of a run: what is fixed, and where it stands.  `log` is None in processes that write no files."""

    config: RunConfig
    program: Program
    corpus: Corpus | Labelled
    checkpoints: Checkpointer
    status: Status
    clock: Clock
    log: MetricsLog | None
    progress: Progress
    state: TrainState  # on devices
    step: int  # steps done
    metrics: dict[str, float] = field(default_factory=dict)  # of the newest step that was read
    record: Record = field(default_factory=dict)  # what this step has to say, for the log
    _flying: deque[tuple[int, dict[str, jax.Array]]] = field(default_factory=deque)
    _helpless: int = 0  # steps up to the newest that was read, in a row, that overflowed at the least scale

    @property
    def directory(self) -> Path:
        return self.config.run.directory

    def due(self, every: int) -> bool:
        """Whether what happens every so many steps, and at the end, happens now; never if `every` is 0."""
        return every > 0 and (self.step % every == 0 or self.step == self.config.train.steps)

    def follow(self, step: int, state: TrainState, metrics: dict[str, jax.Array]) -> None:
        """Takes over the outcome of `step`, and waits for the one IN_FLIGHT steps before it."""
        self.step, self.state = step, state
        self._flying.append((step, metrics))
        while len(self._flying) > IN_FLIGHT:
            self._land()

    def settle(self) -> None:
        """Waits for every step sent.  Raises NonFiniteError if one of them has lost its numbers."""
        with self.clock.time("step"):
            while self._flying:
                self._land()

    def _land(self) -> None:
        step, arrays = self._flying.popleft()
        arrays = jax.device_get(arrays)
        self.metrics = {name: arrays[name].item() for name in sorted(arrays, key=lambda name: name != "loss")}
        if self.metrics.get("skipped"):
            self._overflowed(step)
            return
        self._helpless = 0
        if not all(map(math.isfinite, self.metrics.values())):
            figures = ", ".join(f"{name} {value:g}" for name, value in self.metrics.items())
            raise self.lost(f"step {step}: {figures}", after=step - 1)

    def _overflowed(self, step: int) -> None:
        """Of a step that was skipped: as it should be, as long as there is a smaller scale to try.

        Raises NonFiniteError at the last of PATIENCE steps in a row without one."""
        least = self.config.precision.min_scale
        if self.metrics["loss_scale"] > least:
            return
        self._helpless += 1
        what = f"gradients overflow float16 at precision.min_scale={least:g}"
        self.progress.say(f"step {step}: {what}: skipped, and there is no smaller scale to go on with.")
        if self._helpless == PATIENCE:
            raise self.lost(f"steps {step - PATIENCE + 1} to {step}: {what}")

    def lost(self, what: str, after: int | None = None) -> NonFiniteError:
        """What to say and do about `what`.  after: the step that left the state from which it comes, and would come
        again."""
        with suppress(CheckpointError):
            self.checkpoints.wait()
        saved, advice = self.checkpoints.steps(), ""
        if saved and saved[-1] == after:  # it would end in the same way each time
            saved.pop()
            advice = f"Move {self.checkpoints.directory / str(after)} away: what was saved there is lost already. "
        unscaled = " precision.loss_scale=none" if self.config.precision.loss_scale == "dynamic" else ""
        return NonFiniteError(
            f"{what}. Training cannot go on from here. {advice}Lower optim.lr, lengthen optim.warmup, or set "
            f"precision.compute=float32{unscaled}, and train again: it will start from "
            f"{f'step {saved[-1]}, which was saved before' if saved else 'the beginning'}."
        )

    def save(self) -> None:
        """Saves this step.  Raises NonFiniteError rather than push out a good save with a state that is lost.

        A step's loss is of the state before its update: it does not vouch for the one that is saved."""
        self.settle()
        with self.clock.time("checkpoint"):
            if not all_finite(self.state):
                raise self.lost(f"the state after step {self.step} is not finite", after=self.step)
            meta = make_meta(
                self.config.model_dump(by_alias=True), self.step * self.config.train.batch, self.corpus.fingerprint
            )
            self.checkpoints.save(self.step, self.program.canonical(self.state), meta)

    def publish(self, **changes: object) -> None:
        """Brings status.json up to date."""
        self.clock.book()
        if self.log is not None:
            self.status.write(step=self.step, **changes)


class Evaluate:
    """Figures of what is held out, the same every time.  At the end too, unless train.eval_every is 0."""

    def __init__(self, run: Run):
        self.every = run.config.train.eval_every
        self.loader = make_validation_loader(run.config, run.corpus) if self.every else None

    def __call__(self, run: Run) -> None:
        if self.loader is None or not run.due(self.every):
            return
        run.settle()
        with run.clock.time("eval"):
            figures, _ = validation_figures(run.program, run.state.params, self.loader)
        if not math.isfinite(loss := figures["eval_loss"]):
            raise run.lost(f"evaluation after step {run.step}: loss {loss:g}", after=run.step)
        run.record |= figures


class Log:
    """Figures of a step and the speed since the last time; comes after the hooks that add to the record."""

    def __init__(self, run: Run):
        self.every = run.config.train.log_every
        self.step, self.seconds = run.step, self._training(run)

    def __call__(self, run: Run) -> None:
        run.progress.step(run.step)
        if run.due(self.every):
            run.settle()
            run.record = {**run.metrics, **self._speed(run), **run.record}
        if not run.record:
            return
        record, run.record = {"step": run.step, **run.record}, {}
        if run.log is not None:
            run.log.write(record)
        run.progress.record(record)
        run.publish()

    def _speed(self, run: Run) -> Record:
        steps, seconds = run.step - self.step, self._training(run) - self.seconds
        self.step, self.seconds = run.step, self.seconds + seconds
        each, program = seconds / steps, run.program
        return {
            "tokens": run.step * program.tokens_per_step,
            "tokens_per_second": program.tokens_per_step / each,
            "mfu": program.flops_per_step / each / program.peak_flops if program.peak_flops else None,
            "seconds": each,
        }

    @staticmethod
    def _training(run: Run) -> float:
        """Seconds spent on steps and their data: evaluation and checkpoints do not slow the steps down."""
        run.clock.book()
        return run.clock.seconds["step"] + run.clock.seconds["data"]


class Save:
    """A checkpoint every so many steps, and of the last one."""

    def __init__(self, run: Run):
        self.every = run.config.checkpoint.every

    def __call__(self, run: Run) -> None:
        if run.due(self.every):
            run.save()
            run.publish()
