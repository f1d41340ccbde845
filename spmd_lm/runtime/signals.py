"""SIGTERM, Ctrl-C and SIGHUP (a closed terminal) stop a run between two steps, never within one.

A handler only sets a flag: XLA cannot be interrupted, and checkpoints can only be written between steps.  A second
Ctrl-C raises KeyboardInterrupt at once.

Processes of one job stop after the same step, whichever of them was signalled.  They agree through jax, which takes
SIGTERM over from the first step on; other signals are converted to it."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

from spmd_lm.runtime.processes import in_a_job, start_preemption_service

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Answers to Ctrl-C, by phase: there is nothing to save before the first step.
BEFORE_STEPS = "Stopping before the next step. Ctrl-C again stops at once."
DURING_STEPS = "Stopping after this step and saving. Ctrl-C again stops at once, without saving."
AFTER_STEPS = "Ending: no more steps. Ctrl-C again stops at once."
DURING_SWEEP = "Stopping: the cells that run are saved. Ctrl-C again stops at once."


@contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> Iterator[None]:
    """Lets `handler` answer these signals within the block.  Only the main thread may set handlers: in any other thread
    this is a no-op."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if in_main_thread else {}
    try:
        yield
    finally:
        for number, former in previous.items():
            # None stands for a handler that was not installed from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if former is None else former)


def name_of_signal(number: int) -> str:
    """SIGTERM for 15; the real-time signals between the first and the last have no names."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """The signals that this process does not ignore, as a shell's background job ignores Ctrl-C."""
    return [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]


def interruptible() -> AbstractContextManager[None]:
    """Lets Ctrl-C end the process at once and silently within the block, with the shell's code 130: nothing is lost.
    KeyboardInterrupt would come too late, or never: XLA delays it, and extension modules swallow it during their import
    or turn it into an ImportError."""
    return handle_signals(not_ignored(signal.SIGINT), signal.SIG_DFL)


class StopSignals:
    """Records in `received` the first stop signal; outside the main thread it sees none."""

    def __init__(self, answer: str = BEFORE_STEPS) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = 0
        self._answer = answer

    def __enter__(self) -> "StopSignals":
        self._left_to_jax = False  # True once jax handles SIGTERM
        hangup = not_ignored(signal.SIGHUP)  # nohup ignores it, so that a run survives its terminal
        self._handlers = handle_signals([signal.SIGTERM, signal.SIGINT, *hangup], self._handle)
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handlers.__exit__(*error)

    def stop(self) -> None:
        """Acts as SIGTERM does."""
        self.received = self.received or signal.SIGTERM
        if in_a_job():  # jax informs the others
            signal.raise_signal(signal.SIGTERM)

    def until_received(self, steps: Iterable[int]) -> Iterator[int]:
        """Yields `steps` until a signal has come, to this process or to another one of its job."""
        if in_a_job() and not self._left_to_jax:
            start_preemption_service()
            self._left_to_jax = True
            if self.received is not None:  # before jax took SIGTERM over
                signal.raise_signal(signal.SIGTERM)
        for step in steps:
            if self._stops_before(step):
                break
            self._answer = DURING_STEPS
            yield step
        self._answer = AFTER_STEPS

    def _stops_before(self, step: int) -> bool:
        if not in_a_job():
            return self.received is not None
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        stops = reached_preemption_sync_point(step)
        self.received = self.received or (signal.SIGTERM if stops else None)
        return stops

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if number != signal.SIGTERM and in_a_job():
            signal.raise_signal(signal.SIGTERM)
        if number == signal.SIGINT:  # os.write: print() is not reentrant, and a handler may run within one
            with suppress(OSError):
                os.write(2, f"\n{self._answer}\n".encode())
