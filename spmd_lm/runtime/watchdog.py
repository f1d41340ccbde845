"""Detects a step, a save or an evaluation that does not end: a deadlock, a device or a file system that hangs, a
stopped process of the job.

Heartbeats do not: another thread sends them.  Only a stopped process sends none, which ends the job with code 8 if
train.watchdog is more patient.  The stacks of all threads go to standard error, with the lagging process, and this
process ends with exit code 7, at once: a thread that waits for a collective cannot be interrupted."""

import faulthandler
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from spmd_lm.config.schema import Watchdog
from spmd_lm.errors import Exit
from spmd_lm.runtime.formatting import format_duration
from spmd_lm.runtime.processes import aborted, in_a_job, leave_job, leaving, publish, published

TICK_SECONDS = 1.0
ANSWER_SECONDS = 5.0  # for the coordinator, which may be the one that hangs
END_SECONDS = 20.0  # for all final messages
STEPS = 100  # in the median
PATIENCE = {"step": 1, "checkpoint": 15, "evaluation": 15}  # limits of activities, as multiples of a step's


class StepWatch:
    """Ends the process if a step takes longer than max(factor x median step, minimum), or another activity longer than
    its multiple in PATIENCE.

    activity: returns the current one; those not in PATIENCE have no limit.
    on_hang: called with a message before the end."""

    def __init__(self, limits: Watchdog, activity: Callable[[], str], on_hang: Callable[[str], None]):
        self._limits, self._activity, self._on_hang = limits, activity, on_hang
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._last, self._step = time.monotonic(), 0
        self._ended = threading.Event()

    def __enter__(self) -> "StepWatch":
        self._last = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        if in_a_job():
            threading.Thread(target=self._publish, name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def beat(self, step: int) -> None:  # step: the number of steps done
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last, self._step = now, step

    def limit(self) -> float:  # of a step, in seconds
        median = statistics.median(self._seconds) if self._seconds else 0.0
        return max(self._limits.factor * median, self._limits.minimum)

    def _watch(self) -> None:
        ticked, before_that = time.monotonic(), ""
        while not self._ended.wait(TICK_SECONDS):
            now, before = time.monotonic(), ticked
            ticked = now
            activity = self._activity()
            is_same, before_that = activity == before_that, activity
            # A late tick means that this process was stopped: that time does not count.
            self._last = min(now, self._last + max(0.0, now - before - TICK_SECONDS)) if is_same else now
            if now - self._last > PATIENCE.get(activity, math.inf) * self.limit():
                self._end(activity, now - self._last)

    def _publish(self) -> None:
        """Tells the other processes about this one's progress, in a thread that a stopped coordinator may block."""
        with suppress(Exception):  # the coordinator has ended, which ends this process too
            for ticks in itertools.count():
                publish("watchdog", json.dumps([self._step, ticks]))
                if self._ended.wait(TICK_SECONDS):
                    return

    def _end(self, activity: str, seconds: float) -> None:
        leaving.set()
        step = f"step {self._step + 1}" if activity == "step" else f"the {activity} of step {self._step + 1}"
        what = f"{step} has not ended in {format_duration(seconds)} (train.watchdog)"
        last = threading.Timer(END_SECONDS, os._exit, [int(Exit.HANG)])  # a file system or terminal may hang
        last.daemon = True
        last.start()
        try:
            if in_a_job():
                what += f": {self._lagging()}"
            self._on_hang(what)
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
            leave_job(int(Exit.HANG))
        finally:
            os._exit(Exit.HANG)

    def _lagging(self) -> str:
        """The process that the others wait for."""
        answers: list[dict[int, list[int]]] = []

        def ask() -> None:
            for seconds in (2.5 * TICK_SECONDS, 0.0):
                answers.append({process: json.loads(text) for process, text in published("watchdog").items()})
                time.sleep(seconds)

        threading.Thread(target=ask, daemon=True).start()
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < 2 and not aborted.is_set() and time.monotonic() < deadline:
            time.sleep(0.1)
        if len(answers) < 2:
            other = ", or jax has lost another: see what stands above" if aborted.is_set() else ""
            return f"process 0 does not answer{other}"
        first, second = answers
        silent = [process for process, (_, ticks) in second.items() if first.get(process, [0, -1])[1] == ticks]
        fewest = min(step for step, _ in second.values())
        lagging = silent or [process for process, (step, _) in second.items() if step == fewest]
        names = ", ".join(f"process {process} (last step {second[process][0]})" for process in sorted(lagging))
        return f"{names} {'sends nothing' if silent else 'is behind'}"
