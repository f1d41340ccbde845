"""A run's progress: on a terminal one live line, elsewhere a line per logged step.

step 120/400  loss 2.3104  31k tok/s  MFU 12%  ETA 1m12s"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.text import Text

from spmd_lm.runtime.formatting import format_duration, format_quantity
from spmd_lm.runtime.metrics import Record, lower_is_better
from spmd_lm.runtime.outputs import escape_controls, unfailing


class Progress:
    """Prints the progress of a run, silently once printing fails: a reader like `head` may leave, a terminal be
    closed, a log's disk be full.  In a job only the first process prints, and without a live line: launchers mix their
    output, and mpirun gives each process a terminal of its own."""

    def __init__(self, steps: int, console: Console | None = None, process: int = 0, processes: int = 1):
        self.steps = steps
        terminal = False if processes > 1 else None  # None: rich detects it
        self._console = console or Console(
            file=unfailing(sys.stdout), highlight=False, quiet=process > 0, force_terminal=terminal
        )
        self._metrics = ""  # the last record's, kept on the live line until the next one
        self._first_step: tuple[int, float] | None = None  # with the time at its end
        self._display = Live(console=self._console, transient=True)

    def log(self, *messages: str) -> None:
        """Prints messages that stay, above the live line."""
        for message in messages:
            self._console.print(Text(escape_controls(message)), soft_wrap=True)

    def live_line(self) -> AbstractContextManager[object]:
        """Shows a live line on a terminal within this block.  A notebook is none, but rich would show one there."""
        return self._display if self._console.is_terminal else nullcontext()

    @contextmanager
    def compiling(self, last_seconds: float | None) -> Iterator[None]:
        """Prints that the step is being compiled.  last_seconds: of the previous compilation, if any."""
        last = f"took {format_duration(last_seconds)} last time" if last_seconds else ""
        message = f"compiling the step ({last or 'seconds for a small model, minutes for a large one'})"
        start = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(message):
                yield
        else:
            self.log(message)
            yield
        self.log(f"compiled in {format_duration(time.perf_counter() - start)}")

    def step(self, step: int) -> None:
        """Updates the live line after every step."""
        if self._first_step is None:
            self._first_step = step, time.perf_counter()
        self._display.update(Text(self._line(step)))

    def record(self, record: Record) -> None:
        """Prints loss, speed and evaluation after a logged step."""
        self._metrics = format_record(record)
        if "eval_loss" in record or not self._console.is_terminal:
            self.log(self._line(record["step"]))

    def _line(self, step: int) -> str:
        line = f"step {step}/{self.steps}{self._metrics}"
        first, time_of_first = self._first_step or (step, 0.0)
        if step == first or step >= self.steps:
            return line
        # Wall clock since the first step, with evaluations and checkpoints: future ones cost as much.
        eta = (time.perf_counter() - time_of_first) / (step - first) * (self.steps - step)
        return f"{line}  ETA {format_duration(eta)}"


def format_record(record: Record) -> str:
    """`  loss 2.3104  31k tok/s  MFU 12%  eval 2.4010 (perplexity 11.03)`, as far as the record has it."""
    parts = []
    if "loss" in record:
        loss = math.nan if record["loss"] is None else record["loss"]  # null in the file
        parts += [f"loss {loss:.4f}", f"{format_quantity(record['tokens_per_second'])} tok/s"]
        if record["mfu"] is not None:
            parts.append(f"MFU {100 * record['mfu']:.0f}%")
    if "loss_scale" in record:
        parts.append(f"scale 2^{math.log2(record['loss_scale']):.4g} ({record['skipped_steps']} skipped)")
    if "eval_loss" in record:
        parts.append(f"eval {record['eval_loss']:.4f} ({', '.join(_evaluation_metrics(record))})")
    return "".join(f"  {part}" for part in parts)


def _evaluation_metrics(record: Record) -> list[str]:
    """An evaluation's metrics besides its loss: the perplexity if only tokens are predicted, else all accuracies."""
    shares = {
        name.removeprefix("eval_").removesuffix("_accuracy"): value
        for name, value in record.items()
        if name.startswith("eval_") and not (lower_is_better(name) or name.endswith("_per_byte"))
    }
    if "eval_perplexity" in record and len(shares) < 2:
        per_byte = [f"{record[key]:.3f} a byte"] if (key := "eval_nats_per_byte") in record else []
        return [f"perplexity {record['eval_perplexity']:.2f}", *per_byte]
    correlation = shares.pop("matthews", None)
    metrics = [f"{name.replace('_', ' ')} {100 * value:.1f}%" for name, value in shares.items()]
    return metrics if correlation is None else [*metrics, f"matthews {correlation:.3f}"]
