"""SIGTERM and Ctrl-C stop a run between two steps, never in the middle of one.

A handler only takes a note: XLA cannot be interrupted, and a checkpoint can only be written between steps.  A second
Ctrl-C raises KeyboardInterrupt at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

# The answer to Ctrl-C, by when it comes: there is nothing to save before the first step.
BEFORE_STEPS = "Stopping before the next step. Ctrl-C again stops at once."
DURING_STEPS = "Stopping after this step and saving. Ctrl-C again stops at once, without saving."
AFTER_STEPS = "Ending: no more steps. Ctrl-C again stops at once."


class StopSignals:
    """Within the `with` block, `received` is the first signal that asked to stop.

    Python lets only the main thread set handlers; in any other thread this is a no-op and `received` stays None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = 0
        self._answer = BEFORE_STEPS
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def until_received(self, steps: Iterable[int]) -> Iterator[int]:
        """Yields `steps`, but none after a signal has come."""
        for step in steps:
            if self.received is not None:
                break
            self._answer = DURING_STEPS
            yield step
        self._answer = AFTER_STEPS

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            # os.write: print() is not reentrant, and a handler may run within one.
            os.write(2, f"\n{self._answer}\n".encode())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, Ctrl-C ends the process at once and silently, with the shell's code 130: for code that has
    nothing to save.

    A KeyboardInterrupt would come too late, or never: XLA delays it, and extension modules swallow it during their
    import or turn it into an ImportError."""
    previous = signal.getsignal(signal.SIGINT)
    replace = threading.current_thread() is threading.main_thread() and previous not in (signal.SIG_IGN, None)
    if replace:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if replace:
            signal.signal(signal.SIGINT, previous)
