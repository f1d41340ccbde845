"""What a run prints: on a terminal one live line, elsewhere a line per logged step.

step 120/400  loss 2.3104  31k tok/s  MFU 12%  ETA 1m12s"""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from spmd_lm.runtime.metrics import Record


class PipeConsole(Console):
    """A console whose reader may leave: `spmd-lm train ... | head` goes on training, silently."""

    def on_broken_pipe(self) -> None:  # rich's own ends the process
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Prints the progress of a run of `steps` steps.  `quiet`: print nothing, for all but a job's first process."""

    def __init__(self, steps: int, console: Console | None = None, quiet: bool = False):
        self.steps = steps
        self._console = console or PipeConsole(highlight=False, quiet=quiet)
        self._display: Live | None = None
        self._metrics = ""  # the last record's, which stay on the live line until the next one
        self._first_step: tuple[int, float] | None = None  # and when it ended

    def log(self, *messages: str) -> None:
        """Prints messages that stay, above the live line."""
        for message in messages:
            self._console.print(Text(message), soft_wrap=True)

    @contextmanager
    def live_line(self) -> Iterator[None]:
        """Within the block, a terminal has a live line."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, refresh_per_second=4) as self._display:
            try:
                yield
            finally:
                self._display = None

    @contextmanager
    def compiling(self, last_seconds: float | None) -> Iterator[None]:
        """Prints that the step is being compiled.  last_seconds: what it took last time, if there was one."""
        estimate = "seconds for a small model, minutes for a large one"
        if last_seconds:
            estimate = f"took {format_duration(last_seconds)} last time"
        message = f"compiling the step ({estimate})"
        start = time.perf_counter()
        if self._console.is_terminal:
            with Live(Spinner("dots", message), console=self._console, transient=True):
                yield
        else:
            self.log(message)
            yield
        self.log(f"compiled in {format_duration(time.perf_counter() - start)}")

    def step(self, step: int) -> None:
        """After every step: updates the live line."""
        if self._first_step is None:
            self._first_step = step, time.perf_counter()
        if self._display is not None:
            self._display.update(Text(f"step {step}/{self.steps}{self._metrics}{self._eta(step)}"))

    def record(self, record: Record) -> None:
        """After a logged step: its loss, speed and evaluation."""
        self._metrics = format_record(record)
        if "eval_loss" in record or not self._console.is_terminal:
            self.log(f"step {record['step']}/{self.steps}{self._metrics}{self._eta(record['step'])}")

    def _eta(self, step: int) -> str:
        # Wall clock since the first step, evaluations and checkpoints included: those to come cost as much.
        first, time_of_first = self._first_step or (step, 0.0)
        if step == first or step >= self.steps:
            return ""
        return f"  ETA {format_duration((time.perf_counter() - time_of_first) / (step - first) * (self.steps - step))}"


def format_record(record: Record) -> str:
    """`  loss 2.3104  31k tok/s  MFU 12%  eval 2.4010 (perplexity 11.03)`, or as much of it as the record has."""
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
    """An evaluation's metrics besides its loss: the perplexity where predicting tokens is all there is, else every
    share of correct predictions."""
    shares = {
        name.removeprefix("eval_").removesuffix("_accuracy"): value
        for name, value in record.items()
        if name.startswith("eval_") and not name.endswith(("_loss", "_perplexity"))
    }
    if "eval_perplexity" in record and len(shares) < 2:
        return [f"perplexity {record['eval_perplexity']:.2f}"]
    correlation = shares.pop("matthews", None)
    metrics = [f"{name.replace('_', ' ')} {100 * value:.1f}%" for name, value in shares.items()]
    return metrics if correlation is None else [*metrics, f"matthews {correlation:.3f}"]


def format_quantity(number: float) -> str:
    """Three digits and a unit: 31_400 is 31.4k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            number /= size
            return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def format_duration(seconds: float) -> str:
    """The two largest units: 0.4s, 12s, 1m12s, 3h05m, 2d04h."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    rounded = round(seconds)
    for size, unit, smaller_size, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if rounded >= size:
            return f"{rounded // size}{unit}{rounded % size // smaller_size:02d}{smaller_unit}"
    return f"{rounded}s"
