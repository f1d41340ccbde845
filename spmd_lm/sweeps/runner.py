"""Runs the cells of a sweep, a limited number at once, until all are done or the sweep is stopped.

The same command leaves finished cells alone, resumes interrupted ones from their newest checkpoint, and retries failed
ones."""

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from spmd_lm.config.load import CONFIG_FILE
from spmd_lm.errors import Exit
from spmd_lm.runtime.directories import is_locked
from spmd_lm.runtime.formatting import format_duration, pluralize
from spmd_lm.runtime.signals import StopSignals
from spmd_lm.sweeps.cells import STOPPED, Cell, Outcome
from spmd_lm.sweeps.jobs import Jobs

SECONDS_BETWEEN_POLLS = 0.2
BEGINNINGS = {"interrupted": "resuming", "preempted": "resuming", "failed": "trying again"}


class Runner:
    """Runs cells.  log: prints a line.  is_first: this process writes the cells' files, as the first of its job."""

    def __init__(
        self, cells: Sequence[Cell], jobs: Jobs, at_once: int, log: Callable[[str], None], is_first: bool = True
    ):
        self._cells, self._jobs, self._log, self._is_first = cells, jobs, log, is_first
        self._free_slots = list(reversed(range(min(at_once, len(cells)))))
        self._postponed: set[str] = set()  # IDs of cells that another process still trains
        self._running: dict[str, tuple[Cell, int, float]] = {}  # by ID, with slot and start
        self.outcomes = {cell.id: cell.outcome() for cell in cells}
        self._waiting = deque(cell for cell in cells if self.outcomes[cell.id].status != "done")

    def run(self, signals: StopSignals, on_change: Callable[[], None]) -> Exit:
        """The exit code of the sweep: a signal's, 3 if a cell was preempted, 1 if one failed, else 0.
        on_change: called whenever a cell has started or ended."""
        if done := self._done():
            self._log(f"{done} of {pluralize(len(self._cells), 'cell')} are done already")
        on_change()
        try:
            while self._waiting or self._running:
                changed = self._collect_ended()
                if signals.received:
                    self._waiting.clear()
                    if self._jobs.outlive_sweep:
                        break
                    self._jobs.stop(signals.received)
                else:
                    changed = self._start_waiting() or changed
                if changed:
                    on_change()
                else:
                    time.sleep(SECONDS_BETWEEN_POLLS)
        except KeyboardInterrupt:  # the second one, which stops the cells too, at once
            self._jobs.stop(signal.SIGKILL)
            raise
        if signals.received:
            if self._running:
                count = pluralize(len(self._running), "cell")
                self._log(f"{count} stay in the queue of {self._jobs.name}. The same command waits for them.")
            return Exit.INTERRUPTED if signals.received == signal.SIGINT else Exit.PREEMPTED
        codes = {outcome.exit_code for outcome in self.outcomes.values()} - {0}
        if codes & {*STOPPED}:
            return Exit.PREEMPTED
        return Exit.CHECK_FAILED if codes else Exit.DONE

    def _done(self) -> int:
        return sum(outcome.status == "done" for outcome in self.outcomes.values())

    def _start_waiting(self) -> bool:
        """Starts waiting cells in free slots, unless a process of a killed sweep still holds their directory."""
        started = False
        for _ in range(len(self._waiting)):
            if not self._free_slots:
                break
            if not self._is_first and not (self._waiting[0].directory / CONFIG_FILE).exists():
                break  # the first process of the job has not prepared it yet
            cell = self._waiting.popleft()
            if self._is_first and not self._jobs.outlive_sweep and is_locked(cell.directory):
                if cell.id not in self._postponed:
                    self._log(f"{cell.id}: another process trains {cell.directory}; waiting until it ends")
                self._postponed.add(cell.id)
                self._waiting.append(cell)
                continue
            before = cell.outcome()
            if cell.id in self._postponed and before.status == "done":
                self.outcomes[cell.id] = before
                continue
            self._start(cell, BEGINNINGS.get(before.status, "starting"))
            started = True
        return started

    def _start(self, cell: Cell, action: str) -> None:
        slot = self._free_slots[-1]
        try:
            if self._is_first:
                cell.prepare()
            self._jobs.start(cell, slot)
        except OSError as error:  # a file in the way, no permission: other cells may still run
            reason = f"{error.filename or cell.directory}: {error.strerror}. Mend that, and start the sweep again."
            self.outcomes[cell.id] = Outcome("failed", int(Exit.CONFIG), reason)
            self._log(f"{cell.id}: failed, exit code {int(Exit.CONFIG)}: {reason}")
            return
        self._free_slots.pop()
        self._running[cell.id] = cell, slot, time.monotonic()
        self.outcomes[cell.id] = Outcome("running")
        self._log(f"{cell.id}: {action} on {self._jobs.name}")

    def _collect_ended(self) -> bool:
        changed = False
        for cell, slot, start in list(self._running.values()):
            code = self._jobs.poll(cell)
            if code is None:
                continue
            if self._is_first:
                outcome = cell.after_exit(code)
                cell.record(outcome)
            else:  # the first process may still be writing the outcome
                outcome = cell.after_exit(code) if code else Outcome("done", 0)
            self.outcomes[cell.id] = outcome
            del self._running[cell.id]
            self._free_slots.append(slot)
            why = "" if outcome.status == "done" else f", exit code {outcome.exit_code}"
            why += f": {outcome.reason}" if outcome.reason else ""
            seconds = format_duration(time.monotonic() - start)
            self._log(f"{cell.id}: {outcome.status} in {seconds}{why} ({self._done()} of {len(self._cells)} done)")
            changed = True
        return changed
