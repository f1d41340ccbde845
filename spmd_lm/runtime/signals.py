"""SIGTERM and Ctrl-C as a wish to stop between two steps, never in the middle of one.

A handler only takes a note: XLA cannot be interrupted, and a checkpoint can only be written between steps.  Whoever
presses Ctrl-C a second time means it, and gets KeyboardInterrupt at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

CAUGHT = (signal.SIGTERM, signal.SIGINT)

# What Ctrl-C is answered, by when it comes: there is nothing to save before the first step.
BEFORE = "Stopping before the next step. Ctrl-C again stops at once."
DURING = "Stopping after this step and saving. Ctrl-C again stops at once, without saving."
AFTER = "Ending: no more steps. Ctrl-C again stops at once."


class StopSignals:
    """Within the `with` block, `received` is the first signal that asked to stop.

    Python lets only the main thread set handlers; in any other thread this is a no-op and `received` stays None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interrupts = 0
        self._answer = BEFORE
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._take_note) for number in CAUGHT}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def until_received(self, steps: Iterable[int]) -> Iterator[int]:
        """`steps`, ended before the next one once a signal has come."""
        for step in steps:
            if self.received is not None:
                break
            self._answer = DURING
            yield step
        self._answer = AFTER

    def _take_note(self, number: int, _: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            # os.write: print() is not reentrant, and a handler may run within one.
            os.write(2, f"\n{self._answer}\n".encode())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once, in silence; a shell calls that 130.  For where nothing has to be saved.

    A KeyboardInterrupt would come too late, or never: XLA holds it up, and extension modules that are being imported
    swallow it or make an ImportError of it."""
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before not in (signal.SIG_IGN, None)
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
