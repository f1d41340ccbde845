"""What a person watches: one live line on a terminal, a line per logged step everywhere else.

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


class Screen(Console):
    """A console whose reader may leave: `spmd-lm train ... | head` goes on training, in silence."""

    def on_broken_pipe(self) -> None:  # rich's own ends the process
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Progress:
    """Narrates a run of `steps` steps.  `quiet` for the processes of a job that have no one watching."""

    def __init__(self, steps: int, console: Console | None = None, quiet: bool = False):
        self.steps = steps
        self._console = console or Screen(highlight=False, quiet=quiet)
        self._live: Live | None = None
        self._tail = ""  # what the last record said, kept on the live line between records
        self._pace: tuple[int, float] | None = None  # step and time of the first one seen

    def say(self, text: str) -> None:
        """A line that stays, above the live one."""
        self._console.print(Text(text), soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, a terminal has a live line."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, transient=True, refresh_per_second=4) as self._live:
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def compiling(self, usually: float | None) -> Iterator[None]:
        """`usually`: seconds that it took last time, if there was one."""
        guess = (
            f"took {duration(usually)} last time" if usually else "seconds for a small model, minutes for a large one"
        )
        text = f"compiling the step ({guess})"
        started = time.perf_counter()
        if self._console.is_terminal:
            with Live(Spinner("dots", text), console=self._console, transient=True):
                yield
        else:
            self.say(text)
            yield
        self.say(f"compiled in {duration(time.perf_counter() - started)}")

    def step(self, step: int) -> None:
        """After every step; only the live line shows it."""
        if self._pace is None:
            self._pace = step, time.perf_counter()
        if self._live is not None:
            self._live.update(Text(f"step {step}/{self.steps}{self._tail}{self._eta(step)}"))

    def record(self, record: Record) -> None:
        """A logged step: what is known of loss, speed and evaluation."""
        self._tail = describe(record)
        line = f"step {record['step']}/{self.steps}{self._tail}"
        if "eval_loss" in record or not self._console.is_terminal:
            self.say(line + self._eta(record["step"]))

    def _eta(self, step: int) -> str:
        # Wall-clock since this life's first step, evaluations and checkpoints included: those to come cost as much.
        first, since = self._pace or (step, 0.0)
        if step == first or step >= self.steps:
            return ""
        return f"  ETA {duration((time.perf_counter() - since) / (step - first) * (self.steps - step))}"


def describe(record: Record) -> str:
    """`  loss 2.3104  31k tok/s  MFU 12%  eval 2.4010`, as far as the record goes."""
    parts = []
    if "loss" in record:
        loss = math.nan if record["loss"] is None else record["loss"]  # null in the file
        parts += [f"loss {loss:.4f}", f"{quantity(record['tokens_per_second'])} tok/s"]
        parts += [f"MFU {100 * record['mfu']:.0f}%"] if record["mfu"] is not None else []
    if "loss_scale" in record:
        parts += [f"scale 2^{math.log2(record['loss_scale']):.4g} ({record['skipped_steps']} skipped)"]
    if "eval_loss" in record:
        parts += [f"eval {record['eval_loss']:.4f} ({', '.join(judged(record))})"]
    return "".join(f"  {part}" for part in parts)


def judged(record: Record) -> list[str]:
    """What an evaluation says besides its loss: a perplexity where words are predicted and nothing else is, or shares
    of what was right."""
    shares = {
        name.removeprefix("eval_").removesuffix("_accuracy"): value
        for name, value in record.items()
        if name.startswith("eval_") and not name.endswith(("_loss", "_perplexity"))
    }
    if "eval_perplexity" in record and len(shares) < 2:
        return [f"perplexity {record['eval_perplexity']:.2f}"]
    correlation = shares.pop("matthews", None)
    told = [f"{name.replace('_', ' ')} {100 * value:.1f}%" for name, value in shares.items()]
    return told if correlation is None else [*told, f"matthews {correlation:.3f}"]


def quantity(number: float) -> str:
    """31_400 is 31.4k: three digits, as many as an eye takes in."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            number /= size
            return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """The two largest units: 0.4s, 12s, 1m12s, 3h05m, 2d04h."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for size, unit, small, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02d}{smaller}"
    return f"{whole}s"
