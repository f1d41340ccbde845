"""Ends a run whose loss, gradients or state are no longer finite, before a checkpoint of it replaces a good one."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress

import jax
import jax.numpy as jnp

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import CheckpointError, NonFiniteError
from spmd_lm.step.state import TrainState

MAX_OVERFLOWS = 20
"""Steps in a row that may overflow at the smallest loss scale.  They leave the parameters unchanged, so the cause is
neither one odd batch nor a scale still too large: the model has left float16's range."""


@jax.jit
def all_finite(state: TrainState) -> jax.Array:
    """Whether every number of the state is finite: a bool, on devices."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


class NonFiniteGuard:
    """Checks steps, evaluations and states, and raises NonFiniteError with advice."""

    def __init__(self, config: RunConfig, checkpoints: Checkpointer, log: Callable[[str], None]):
        self._precision, self._checkpoints, self._log = config.precision, checkpoints, log
        self._overflows = 0  # steps in a row that overflowed at the smallest loss scale

    def check_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A skipped step may overflow while there is a smaller loss scale to try; any other must be finite."""
        if metrics.get("skipped"):
            if metrics["loss_scale"] <= self._precision.min_scale:
                self._count_overflow(step)
            return
        self._overflows = 0
        if not all(map(math.isfinite, metrics.values())):
            values = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
            raise self._error(f"step {step}: {values}", cause=step - 1)

    def _count_overflow(self, step: int) -> None:
        self._overflows += 1
        overflow = f"gradients overflow float16 at precision.min_scale={self._precision.min_scale:g}"
        self._log(f"step {step}: {overflow}: skipped, and there is no smaller scale to try.")
        if self._overflows == MAX_OVERFLOWS:
            raise self._error(f"steps {step - MAX_OVERFLOWS + 1} to {step}: {overflow}")

    def check_evaluation(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._error(f"evaluation after step {step}: loss {loss:g}", cause=step)

    def check_state(self, step: int, state: TrainState) -> None:
        """A step's loss is of the state before its update: it says nothing about the state after it."""
        if not all_finite(state):
            raise self._error(f"the state after step {step} is not finite", cause=step)

    def _error(self, problem: str, cause: int | None = None) -> NonFiniteError:
        """cause: the step whose state leads to the problem, and would again if training resumed from it."""
        with suppress(CheckpointError):
            self._checkpoints.wait()
        saved, advice = self._checkpoints.steps(), ""
        if saved and saved[-1] == cause:
            saved.pop()
            advice = f"Move {self._checkpoints.directory / str(cause)} away: resuming from it would fail again. "
        scaling = " precision.loss_scale=none" if self._precision.loss_scale == "dynamic" else ""
        restart = f"resume from step {saved[-1]}, the last good checkpoint" if saved else "start from step 0"
        return NonFiniteError(
            f"{problem}. Training cannot continue. {advice}Lower optim.lr, lengthen optim.warmup, or set "
            f"precision.compute=float32{scaling}, and train again: it will {restart}."
        )
