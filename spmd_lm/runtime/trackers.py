"""Sends the records of metrics.jsonl to Weights & Biases and trackio.

A tracker never stops or slows a run: its package is imported and called in its own daemon thread, behind a queue that
drops records when full.  The run's thread prints the tracker's messages with the next record."""

import atexit
import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError, OutputError
from spmd_lm.files import read_bytes, write_atomically
from spmd_lm.runtime.formatting import without_nan
from spmd_lm.runtime.metrics import Record
from spmd_lm.runtime.outputs import writing

MAX_QUEUED = 1000  # records per tracker: more are dropped
CLOSE_SECONDS = 10.0  # for all trackers together, at the end of a run
PROJECT = "spmd-lm"
ID_FILE = "tracker_id"


class TrackerRun(NamedTuple):
    """A run in its tracker.  These functions may block, and raise anything."""

    log: Callable[[dict[str, float], int], object]  # metrics, step
    finish: Callable[[int], object]  # exit code
    url: str | None


@dataclass(frozen=True)
class RunIdentity:
    name: str
    id: str  # equal for every attempt of the run in this directory
    config: dict[str, Any]
    directory: Path


def open_wandb(run: RunIdentity) -> TrackerRun:
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))  # before anything can ask for an API key on the terminal
    timeout = {"finish_timeout": 0.8 * CLOSE_SECONDS, "finish_timeout_raises": True}  # the rest is then on disk
    settings = wandb.Settings(silent=True, console="off", reinit="create_new", **timeout)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.name,
        id=run.id,
        resume="allow",
        config=run.config,
        dir=run.directory,
        settings=settings,
    )
    return TrackerRun(opened.log, opened.finish, opened.url)


def open_trackio(run: RunIdentity) -> TrackerRun:
    """Opens a run named NAME-ID: trackio identifies runs by name."""
    import trackio

    opened = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{run.name}-{run.id}",
        config=run.config,
        resume="allow",
        embed=False,
    )
    return TrackerRun(opened.log, lambda exit_code: opened.finish(), None)


# By run.trackers' names, which are also those of the packages.
TRACKERS: dict[str, Callable[[RunIdentity], TrackerRun]] = {"wandb": open_wandb, "trackio": open_trackio}


def require_packages(names: Iterable[str]) -> None:
    """Raises ConfigError if a tracker's package is missing."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            *(f"run.trackers: {name} is not installed. pip install 'spmd-lm[{name}]'." for name in missing)
        )


class ExitHooksOf:
    """Equals any function of a package, for atexit.unregister, which compares by ==."""

    def __init__(self, package: str):
        self.package = package

    def __eq__(self, hook: object) -> bool:
        return str(getattr(hook, "__module__", "")).partition(".")[0] == self.package

    __hash__ = None  # type: ignore[assignment]


def drop_exit_hooks(package: str) -> None:
    """Unregisters all of a package's atexit hooks: if its server is down, wandb 0.31 would wait 80 s."""
    atexit.unregister(ExitHooksOf(package))  # type: ignore[arg-type]


class TrackerThread:
    """One tracker of a run, and its thread."""

    def __init__(self, name: str, run: RunIdentity):
        self.name, self._run = name, run
        self._written, self._sent, self._exit_code = 0, 0, 0
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()  # None: the end
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failed = self._finished = False
        self._thread = threading.Thread(target=self._track, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        self._written += 1
        if self._records.qsize() < MAX_QUEUED:
            self._records.put(record)

    def end(self, exit_code: int) -> None:
        """Asks the thread to end after the queued records."""
        self._exit_code = exit_code
        self._records.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the thread's end, and reports losses."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._messages.put("did not finish in time, and is left behind")
        if not self._finished:
            drop_exit_hooks(self.name)
        if lost := self._written - self._sent:
            self._messages.put(f"{lost} of {self._written} records were lost; {self._run.directory} has all of them")

    def messages(self) -> list[str]:
        return [f"{self.name}: {self._messages.get()}" for _ in range(self._messages.qsize())]

    def _track(self) -> None:
        try:
            run = TRACKERS[self.name](self._run)
            if run.url:
                self._messages.put(run.url)
            while (record := self._records.get()) is not None:
                self._send(run, record)
            run.finish(self._exit_code)
            self._finished = True
        except BaseException as error:  # a package may even exit: that ends only its own thread
            self._report(error)

    def _send(self, run: TrackerRun, record: Record) -> None:
        found = without_nan(record).items()
        metrics = {key: value for key, value in found if key != "step" and not isinstance(value, list | None)}
        try:
            run.log(metrics, record["step"])
            self._sent += 1
        except Exception as error:  # the next record may succeed
            self._report(error)

    def _report(self, error: BaseException) -> None:
        """Reports the first error only: later ones usually have the same cause."""
        if not self._failed:
            self._failed = True
            text = " ".join(str(error).split())
            self._messages.put(f"{type(error).__name__}: {text:.200} (said once; training goes on)")


class Trackers:
    """Trackers of a run, until the end of the `with` block."""

    def __init__(self, config: RunConfig, log: Callable[[str], None]):
        self._log = log
        self._threads: list[TrackerThread] = []
        if names := config.run.trackers:
            directory = config.run.directory
            run = RunIdentity(config.run.name, read_id(directory), config.model_dump(by_alias=True), directory)
            self._threads = [TrackerThread(name, run) for name in names]

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Sends the rest, unless Ctrl-C was pressed twice."""
        at_once = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close(exit_code=0 if kind is None else 1, seconds=0.0 if at_once else CLOSE_SECONDS)

    def write(self, record: Record) -> None:
        for thread in self._threads:
            thread.write(record)
        self._say()

    def close(self, exit_code: int, seconds: float) -> None:
        """Waits until all is sent, at most `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.end(exit_code)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._say()

    def _say(self) -> None:
        for thread in self._threads:
            for message in thread.messages():
                self._log(message)


def read_id(directory: Path) -> str:
    """The id of the run in `directory`, made by the first attempt and used by later ones to resume."""
    path = directory / ID_FILE
    if not path.exists():
        with writing(path):
            write_atomically(path, secrets.token_hex(4) + "\n")
    try:
        return read_bytes(path, 100).decode(errors="replace").strip()
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}. Move it away.") from error
