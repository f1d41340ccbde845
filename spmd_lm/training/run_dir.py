"""A run's directory: locked while the run trains, checked before anything is written to it, and resumed from."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spmd_lm.checkpoints.checkpointer import Checkpointer, Meta
from spmd_lm.checkpoints.saved_run import check_compatible
from spmd_lm.config.load import CONFIG_FILE, TOKENIZER_DIR, dump, saved_tokenizer
from spmd_lm.config.load import load as load_config
from spmd_lm.config.schema import Data, RunConfig
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary, find_vocabulary
from spmd_lm.errors import CheckpointError, ConfigError, Exit, UserError
from spmd_lm.runtime.lock import lock_directory
from spmd_lm.runtime.metrics import BUCKETS, Clock, MetricsLog, Status, write_atomically

FILES = (CONFIG_FILE, "loss.png", "samples.txt", ".lock")
DIRECTORIES = ("tensorboard", "checkpoints")


@dataclass(frozen=True)
class RunDir:
    """What earlier starts of a run left in its directory; None for what does not exist.

    It is read once, under the lock, so that it cannot change between the checks."""

    config: RunConfig
    checkpoints: Checkpointer
    status: Status | None
    saved_step: int | None  # of the newest checkpoint
    meta: Meta | None  # beside that checkpoint

    @classmethod
    def read(cls, config: RunConfig, checkpoints: Checkpointer) -> "RunDir":
        status, saved_step = Status.read(config.run.directory), checkpoints.latest_step()
        meta = None if saved_step is None else checkpoints.meta(saved_step)
        return cls(config, checkpoints, status, saved_step, meta)

    @property
    def path(self) -> Path:
        return self.config.run.directory

    @property
    def finished_steps(self) -> int:
        """The steps of a finished run, 0 for any other."""
        return self.status.step if self.status and self.status.state == "done" else 0

    def finished_message(self) -> str:
        advice = "Raise train.steps to continue."
        if self.saved_step is None:
            advice = "It has no checkpoint: to continue, train in another run.dir with checkpoint.every set."
        elif self.saved_step != self.finished_steps:
            advice = f"Raise train.steps to continue from step {self.saved_step}."
        return f"{self.path} has finished its {self.finished_steps} steps: nothing to do. {advice}"

    def check_config(self) -> list[str]:
        """Messages about what changed since the last start.  ConfigError or CheckpointError where the run would
        overwrite foreign files, use another vocabulary, or be another model."""
        self._check_foreign_files()
        check_vocabulary(self.config, self.path, self.meta["config"] if self.meta and self.saved_step else None)
        if self.meta is not None:
            saved, since, messages = self.meta["config"], f"since step {self.saved_step} was saved", []
        elif self.status is not None:
            saved, since = read_saved_config(self.path), "since then"
            messages = [f"{self.path} was started before, but saved no checkpoint: starting again from step 0."]
        else:
            return []
        init_from = self.config.run.init_from
        if self.saved_step is not None and init_from not in (None, saved["run"].get("init_from")):
            messages.append(f"run.init_from={init_from} has no effect: this run resumes from its own checkpoint.")
        if changes := check_compatible(saved, self.config.model_dump(by_alias=True), self.path):
            messages += [f"Changed {since} (then -> now):", *changes]
        return messages

    def _check_foreign_files(self) -> None:
        """ConfigError if the run would overwrite files that no run wrote."""
        if self.status is not None or self.saved_step is not None:
            return
        for name, own_text in ((CONFIG_FILE, dump(self.config)), ("metrics.jsonl", "")):
            path = self.path / name
            if path.is_file() and path.read_bytes() != own_text.encode():
                raise ConfigError(
                    f"run.dir={self.path}: training would overwrite {name}, which belongs to no run: there is neither "
                    f"a status.json nor a checkpoint beside it. Move it away, or choose another run.dir."
                )

    def check_resumable(self) -> None:
        """CheckpointError if there is no state to resume from, or no position in the data."""
        if self.saved_step is None or self.meta is None:
            if self.finished_steps:
                raise CheckpointError(
                    f"{self.path} finished its {self.finished_steps} steps without a checkpoint (checkpoint.every=0): "
                    f"there is nothing to resume from. Choose another run.dir, or delete this one."
                )
            return
        if self.saved_step == 0:  # imported: no batch was read yet
            return
        batch = self.meta["data"]["samples"] // self.saved_step
        if batch != self.config.train.batch:
            raise CheckpointError(
                f"{self.path} was trained with train.batch={batch}, not {self.config.train.batch}: the position in the "
                f"data is counted in batches, and another batch would skip or repeat text. Restore train.batch={batch},"
                f" or choose another run.dir."
            )

    def next_status(self) -> Status:
        """The status of this start."""
        status = Status(self.path / "status.json", step=self.saved_step or 0)
        if self.status is not None:
            status.restarts = self.status.restarts + 1
            status.compile_seconds = self.status.compile_seconds
            status.goodput = dict.fromkeys(BUCKETS, 0.0) | self.status.goodput
        return status

    def open_files(self, status: Status, log: Callable[[str], None]) -> AbstractContextManager[MetricsLog | None]:
        """Writes the run's first files and opens metrics.jsonl, in the first process alone."""
        if jax.process_index() > 0:
            return nullcontext()
        self._keep_vocabulary()
        metrics_log = MetricsLog(self.path, resume_step=status.step)  # first: it may refuse the file that exists
        if self.meta and (missing := metrics_log.missing_steps(self.meta["config"]["train"]["log_every"])):
            log(f"{metrics_log.path} lacks the records of steps {missing[0]} to {missing[1]}, which are lost.")
        write_atomically(self.path / CONFIG_FILE, dump(self.config))
        status.write()
        return closing(metrics_log)

    def _keep_vocabulary(self) -> None:
        """Copies the vocabulary into the directory, so that the run can be moved."""
        data = self.config.data
        if isinstance(data, Data) and data.tokenizer != "bytes" and not saved_tokenizer(self.path):
            try:
                copy_vocabulary(data.tokenizer, self.path / TOKENIZER_DIR)
            except OSError as error:
                path = error.filename or self.path
                raise ConfigError(f"{path}: {error.strerror}. Make room, or choose another run.dir.") from error


@contextmanager
def open_run_dir(config: RunConfig, log: Callable[[str], None]) -> Iterator[RunDir]:
    """The run's directory, locked and read.  ConfigError if it cannot be written or is in use."""
    directory = config.run.directory
    check_file_types(directory)
    checkpoints = Checkpointer(directory / "checkpoints", config.checkpoint.keep, config.checkpoint.asynchronous)
    with lock_directory(directory, log), closing(checkpoints), log_interrupt(checkpoints, log):
        yield RunDir.read(config, checkpoints)


def check_file_types(directory: Path) -> None:
    """ConfigError if a directory has the name of one of a run's files, or a file that of a directory."""
    wrong = [f"{name} is a directory, but a run needs a file" for name in FILES if os.path.isdir(directory / name)]
    wrong += [
        f"{name} is a file, but a run needs a directory" for name in DIRECTORIES if os.path.isfile(directory / name)
    ]
    if wrong:
        raise ConfigError(*(f"run.dir={directory}: {what}. Move it away, or choose another run.dir." for what in wrong))


def check_vocabulary(config: RunConfig, directory: Path, trained: dict[str, Any] | None) -> None:
    """ConfigError if the vocabulary is not that of the run in `directory`: the one saved there, or bytes.

    trained: the config that run was last trained with; None if it has taken no step yet."""
    if not isinstance(config.data, Data):
        return
    name, saved = config.data.tokenizer, saved_tokenizer(directory)
    if saved:
        same = name != "bytes" and find_vocabulary(name).read_bytes() == find_vocabulary(str(saved)).read_bytes()
    else:
        same = name == "bytes" or trained is None or trained["data"].get("tokenizer") != "bytes"
    if not same:
        raise ConfigError(
            f"data.tokenizer={name} is not the vocabulary of {directory}, whose ids its model was trained on. "
            f"Use data.tokenizer={saved or 'bytes'}, or another run."
        )


def read_saved_config(directory: Path) -> dict[str, Any]:
    """A run's config.yaml: without a checkpoint, the only record of its model.  CheckpointError if it is invalid."""
    try:
        return load_config(directory / CONFIG_FILE).model_dump(by_alias=True)
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} has a run without a checkpoint, and its config.yaml does not define the model:\n{error}\n"
            f"Fix that file, choose another run.dir, or delete this one."
        ) from error


@contextmanager
def mark_failed(status: Status, clock: Clock) -> Iterator[None]:
    """Records what ends the run early in its status.json, if it has one yet."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # a full disk must not hide the original error
            if jax.process_index() == 0 and status.path.exists():
                clock.update()
                status.write(state="failed", exit_code=exit_code(error))
        raise


def exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return int(error.code)
    return int(Exit.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Exit.CHECK_FAILED)


@contextmanager
def log_interrupt(checkpoints: Checkpointer, log: Callable[[str], None]) -> Iterator[None]:
    """On KeyboardInterrupt, a second Ctrl-C, logs what of the run is saved."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(CheckpointError):
            checkpoints.wait()
        saved_step = checkpoints.latest_step()
        if saved_step is None:
            log("stopped at once: nothing was saved.")
        else:
            log(f"stopped at once: nothing since step {saved_step} was saved. The same command resumes from there.")
        raise
