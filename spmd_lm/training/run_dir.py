"""A run's directory: locked while the run trains, checked before anything is written to it, and resumed from."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from pydantic import ValidationError

from spmd_lm.checkpoints.bucket_run import BucketRun
from spmd_lm.checkpoints.checkpointer import new_run_id
from spmd_lm.checkpoints.directories import CORRUPT, describe_damage, foreign_names
from spmd_lm.checkpoints.record import Meta
from spmd_lm.checkpoints.saved_run import check_compatible, check_saved_config, check_vocabulary
from spmd_lm.checkpoints.tiers import Tiers
from spmd_lm.config.data_sections import TRAINED_TOKENIZERS, Data, Instructions
from spmd_lm.config.load import CONFIG_FILE, TOKENIZER_DIR, dump, saved_tokenizer, write_config
from spmd_lm.config.load import load as load_config
from spmd_lm.config.own_modules import MODULES_DIR, as_saved
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.tokenizer import Tokenizer, keep_vocabulary
from spmd_lm.data.tokenizers.vocabulary import copy_chat_template
from spmd_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, Exit, OutputError, UserError
from spmd_lm.files import read_bytes
from spmd_lm.runtime.directories import lock_directory, lock_holder
from spmd_lm.runtime.metrics import BUCKETS, MAX_ATTEMPTS, NONE_SAVED, Attempt, Clock, MetricsLog, Status
from spmd_lm.runtime.outputs import writing
from spmd_lm.runtime.processes import allgather_objects, assert_equal, in_a_job, is_peer_failure
from spmd_lm.runtime.trackers import ID_FILE, Trackers
from spmd_lm.step.optimizer import lr_schedule, schedule_keys

SHARED_SECONDS = 30.0  # for the last process to see the first one's files, on a network file system

FILES = (CONFIG_FILE, "loss.png", "samples.txt", ".lock", ID_FILE)
DIRECTORIES = ("tensorboard", "checkpoints", MODULES_DIR)


class RunDir:
    """The state that earlier attempts left in the directory, read once, under the lock, so that it cannot change
    between checks."""

    def __init__(self, config: RunConfig, tiers: Tiers):
        self.config, self.tiers, self.path = config, tiers, config.run.directory
        self.checkpoints = tiers.durable  # to resume from
        self._look()
        self.saved_step = self.durable_step
        record = None if self.saved_step is None else self.checkpoints.agreed_record(self.saved_step)
        tiers.open(self.checkpoints.run_id or (record.run_id if record else new_run_id()))
        local_step = tiers.newest_local(self._can_resume_from_local)
        if tiers.local and local_step is not None and local_step > (self.durable_step or 0):
            self.checkpoints, self.saved_step = tiers.local, local_step
            record = tiers.local.agreed_record(local_step)
        self.meta = record.meta if record else {}
        if record:
            check_saved_config(self.meta["config"], self.path)
        self.finished_steps = self.status.step if self.status and self.status.state == "done" else 0

    def _look(self) -> None:
        """Reads in each process, until all agree: a network file system may show stale files."""
        deadline = time.monotonic() + SHARED_SECONDS
        while True:
            self.status = Status.read(self.path)  # None before the first attempt
            self.checkpoints.run_id = self.status.run_id if self.status else ""
            self.durable_step = self.checkpoints.latest_step()  # None without a checkpoint
            seen = {"run_id": self.checkpoints.run_id, "newest checkpoint": self.durable_step}
            late = time.monotonic() > deadline
            answers = allgather_objects("run.dir", {"seen": seen, "late": late})
            if all(answer["seen"] == answers[0]["seen"] for answer in answers):
                return
            if any(answer["late"] for answer in answers):
                assert_equal("run.dir", seen)
            time.sleep(1)

    def _can_resume_from_local(self, step: int, meta: Meta) -> bool:
        """True if this state is in the run's history (no later attempt resumed from before it) and its parts suit this
        layout, or one process has all of them."""
        layout, start = (meta["config"].get("parallel"), meta.get("devices")), meta.get("start")
        same_layout = layout == (self.config.model_dump(by_alias=True)["parallel"], jax.device_count())
        is_ours = self.status is not None and isinstance(start, int) and self.status.is_ancestor(step, start)
        return is_ours and (same_layout or jax.process_count() == 1)

    def finished_message(self) -> str:
        advice = "Raise train.steps to continue."
        if self.saved_step is None:
            advice = "It has no checkpoint: to continue, train in another run.dir with checkpoint.every set."
            if lost := self._lost_checkpoints():
                advice = f"But {lost}, and no checkpoint is left: to continue, bring one back."
        elif self.saved_step != self.finished_steps:
            advice = f"Raise train.steps to continue from step {self.saved_step}."
        return f"{self.path} has finished its {self.finished_steps} steps: nothing to do. {advice}"

    def check_config(self) -> list[str]:
        """Messages about changes since the last attempt.  Raises ConfigError or CheckpointError if the run would
        overwrite foreign files, use another vocabulary, or be another model."""
        is_new = self.status is None and self.saved_step is None
        if is_new:
            self._check_foreign_files()
        if self.saved_step is not None or not self._trains_tokenizer:  # nothing depends on a trained one yet
            check_vocabulary(self.config, self.path, self.meta if self.saved_step else None)
        if is_new:
            return []
        directory, init_from = self.tiers.durable.directory, self.config.run.init_from
        messages = [f"{directory / name} is no checkpoint: ignored." for name in foreign_names(directory)]
        if self.saved_step is None:
            saved, since = read_saved_config(self.path), "since then"
            if not self.finished_steps:
                messages.append(f"{self.path} was started before, but saved no checkpoint: starting again from step 0.")
        else:
            if lost_step := self._lost_newest():
                messages.append(f"{directory / str(lost_step)} was saved, and is gone.")
            saved, since = self.meta["config"], f"since step {self.saved_step} was saved"
            adapts = self.config.adapter.kind != "none"  # run.init_from then locates its base
            if not adapts and init_from not in (None, saved["run"].get("init_from")):
                messages.append(f"run.init_from={init_from} has no effect: this run resumes from its own checkpoint.")
        if changes := check_compatible(saved, self.config.model_dump(by_alias=True), self.path):
            messages += [f"Changed {since} (then -> now):", *changes, *self._rate_changes(saved)]
        return messages

    def _rate_changes(self, saved: dict[str, Any]) -> Iterator[str]:
        """The effect of a changed schedule on the next step's learning rate, and the settings that keep the old one."""
        try:
            then, now = RunConfig.model_validate(saved), self.config
        except ValidationError:  # from an older version
            return
        (old, new), step = (schedule_keys(each.optim, each.train.steps) for each in (then, now)), self.saved_step or 0
        differ = {key: value for key, value in old.items() if new.get(key) != value}
        keep = [f"optim.{key}={'null' if value is None else value}" for key, value in differ.items()]
        if step and keep:
            before, after = (
                float(lr_schedule(each.optim, each.train.steps)(jax.numpy.float32(step))) for each in (then, now)
            )
            what = f"The learning rate of step {step + 1} was to be {before:.3g}, and is {after:.3g}"
            if before == after:
                what = f"The learning rate of step {step + 1} is {after:.3g}, as it was to be; later ones may differ"
            yield f"{what}. To keep the old schedule, set {' '.join(keep)}."

    @property
    def _trains_tokenizer(self) -> bool:
        return getattr(self.config.data, "tokenizer", None) in TRAINED_TOKENIZERS

    def _check_foreign_files(self) -> None:
        """Raises ConfigError if the run would overwrite files that no run wrote."""
        own = {CONFIG_FILE: dump(as_saved(self.config)), "metrics.jsonl": ""}
        foreign = [
            name for name, text in own.items() if (path := self.path / name).is_file() and not _reads(path, text)
        ]
        if self._trains_tokenizer and saved_tokenizer(self.path):
            foreign.append(f"{TOKENIZER_DIR}/")
        if foreign:
            raise ConfigError(
                f"run.dir={self.path}: training would overwrite {foreign[0]}, which belongs to no run: there is "
                f"neither a status.json nor a checkpoint beside it. Move it away, or choose another run.dir."
            )

    def check_resumable(self) -> None:
        """Raises CheckpointError if steps remain without a state to resume from, or if train.batch has changed."""
        is_finished = self.finished_steps >= self.config.train.steps
        if self.saved_step is None and not is_finished and (lost := self._lost_checkpoints()):
            raise CheckpointError(
                f"{self.checkpoints.directory}: {lost}, and no readable checkpoint is left: training would start again "
                f"from step 0 over what is there. Bring a checkpoint back, or choose another run.dir."
            )
        if self.saved_step is None and self.finished_steps and not is_finished:
            raise CheckpointError(
                f"{self.path} finished its {self.finished_steps} steps without a checkpoint (checkpoint.every=0): "
                f"there is nothing to resume from. Choose another run.dir, or delete this one."
            )
        if not self.saved_step:  # step 0 was imported: no batch was read yet
            return
        batch = self.meta["data"]["samples"] // self.saved_step
        if batch != self.config.train.batch:
            raise CheckpointError(
                f"{self.path} was trained with train.batch={batch}, not {self.config.train.batch}: the position in the "
                f"data is counted in batches, and another batch would skip or repeat text. Restore train.batch={batch},"
                f" or choose another run.dir."
            )

    def _lost_newest(self) -> int:
        """The step that status.json records as the newest saved one, if it is missing; else 0."""
        newest = (self.status and self.status.saved_step) or 0
        aside = self.checkpoints.directory.glob(f"{newest}{CORRUPT}*")
        return newest if newest > (self.durable_step or 0) and not any(aside) else 0

    def _lost_checkpoints(self) -> str:
        """Evidence that this run had saved checkpoints, or ''."""
        if damaged := describe_damage(self.checkpoints.directory):
            return damaged
        if self.status and self.status.step and self.status.saved_step != NONE_SAVED:
            return f"status.json says that {self.status.step} steps were done, and saved"
        return ""

    def next_status(self) -> Status:
        """The status of this attempt."""
        last, path, goodput = self.status, self.path / "status.json", dict.fromkeys(BUCKETS, 0.0)
        attempt = Attempt.begin(step := self.saved_step or 0)
        status = Status(path=path, state="running", step=step, restarts=0, goodput=goodput, attempts=[attempt])
        status.run_id = self.checkpoints.run_id
        status.saved_step = NONE_SAVED if self.durable_step is None else self.durable_step
        if last is None:
            return status
        history: dict[str, Any] = {"restarts": last.restarts + 1, "goodput": last.goodput_until(step)}
        history["attempts"] = [*last.attempts, attempt][-MAX_ATTEMPTS:]
        return status.model_copy(update=history | {"compile_seconds": last.compile_seconds})

    @contextmanager
    def open_files(
        self, status: Status, tokenizer: Tokenizer, log: Callable[[str], None]
    ) -> Iterator[MetricsLog | None]:
        """Writes the run's first files, opens metrics.jsonl and starts the trackers, in the first process only."""
        if jax.process_index() > 0:
            yield None
            return
        metrics_log = MetricsLog(self.path, resume_step=status.step)  # first: it may refuse the file that exists
        if self.meta and (missing := metrics_log.missing_steps(self.meta["config"]["train"]["log_every"])):
            log(f"{metrics_log.path} lacks the records of steps {missing[0]} to {missing[1]}, which are lost.")
        with writing(self.path / CONFIG_FILE):
            write_config(self.config, self.path)
        status.write()
        self._keep_vocabulary(tokenizer)  # once status.json says whose directory this is
        with closing(metrics_log), Trackers(self.config, log) as trackers:
            metrics_log.listeners.append(trackers.write)
            yield metrics_log

    def _keep_vocabulary(self, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer's files, so that the run can be moved; replaces those of an attempt that saved
        nothing."""
        data, is_unsaved = self.config.data, self.status is not None and self.saved_step is None
        has_copy = saved_tokenizer(self.path) and not is_unsaved
        try:
            if isinstance(data, Data) and data.tokenizer != "bytes" and not has_copy:
                keep_vocabulary(tokenizer, data.tokenizer, self.path / TOKENIZER_DIR)
            if isinstance(data, Instructions) and data.chat_template:
                copy_chat_template(data.chat_template, self.path / TOKENIZER_DIR)
        except OSError as error:
            path = error.filename or self.path
            raise ConfigError(f"{path}: {error.strerror}. Make room, or choose another run.dir.") from error


def _reads(path: Path, text: str) -> bool:
    with suppress(OSError):  # too long, among others
        return read_bytes(path, len(text.encode())) == text.encode()
    return False


@contextmanager
def open_run_dir(config: RunConfig, log: Callable[[str], None]) -> Iterator[Tiers]:
    """The checkpoints of a run, with its directory locked.  Raises ConfigError if it cannot be written or is in use.
    After a second Ctrl-C, logs the newest saved step."""
    directory = config.run.directory
    wrong = [f"{name} is a directory, but a run needs a file" for name in FILES if os.path.isdir(directory / name)]
    wrong += [
        f"{name} is a file, but a run needs a directory" for name in DIRECTORIES if os.path.isfile(directory / name)
    ]
    if wrong:
        raise ConfigError(*(f"run.dir={directory}: {what}. Move it away, or choose another run.dir." for what in wrong))
    with ExitStack() as stack:
        stack.enter_context(lock_directory(directory, log, jax.process_index() == 0))
        require_shared(directory)
        bucket_run = stack.enter_context(_open_bucket(config, log))
        tiers = Tiers(directory / "checkpoints", config.checkpoint, log, bucket_run)
        stack.enter_context(tiers.closing())
        try:
            yield tiers
        except KeyboardInterrupt:
            with suppress(CheckpointError):
                tiers.durable.wait()
            step = max(tiers.directories(), default=None)
            resume = f"nothing since step {step} was saved. The same command resumes from there."
            log(f"stopped at once: {'nothing was saved.' if step is None else resume}")
            raise


@contextmanager
def _open_bucket(config: RunConfig, log: Callable[[str], None]) -> Iterator[BucketRun | None]:
    """What fetches and sends a run in a bucket, in the first process; the others wait until it has fetched."""
    address, options = config.run.bucket_address, config.checkpoint
    if address and jax.process_index() == 0:
        bucket_run = BucketRun(address, log, options.keep, "every" if options.keep_best else "newest")
        log(f"{address}: its working copy is {bucket_run.path}")
        with bucket_run.open():
            allgather_objects("fetched", None)
            yield bucket_run
    else:
        if address:
            allgather_objects("fetched", None)
        yield None


def require_shared(directory: Path) -> None:
    """Raises ConfigError in all processes of a job if they see different directories: a save would wait forever."""
    (holder, *_) = allgather_objects("lock", lock_holder(directory))
    deadline = time.monotonic() + SHARED_SECONDS
    while lock_holder(directory) != holder and time.monotonic() < deadline:
        time.sleep(0.2)
    differ = [where for where in allgather_objects("directory", _host_without(directory, holder)) if where]
    if differ:
        raise ConfigError(
            f"run.dir={directory}: {', '.join(differ)} and process 0 do not see the same directory. Choose one on a "
            "file system that all hosts of the job share; a bucket is for the processes of one host."
        )


def _host_without(directory: Path, holder: str) -> str:
    return "" if lock_holder(directory) == holder else f"process {jax.process_index()} on {socket.gethostname()}"


def read_saved_config(directory: Path) -> dict[str, Any]:
    """A run's config.yaml: without a checkpoint, the only record of its model.  Raises CheckpointError if it is
    invalid."""
    try:
        return load_config(directory / CONFIG_FILE).model_dump(by_alias=True)
    except ConfigError as error:
        raise CheckpointError(
            f"{directory} has a run without a checkpoint, and its config.yaml does not define the model:\n{error}\n"
            f"Fix that file, choose another run.dir, or delete this one."
        ) from error


@contextmanager
def mark_failed(status: Status, clock: Clock) -> Iterator[None]:
    """Records an early end of the run in its status.json, unless the attempt was refused before it wrote there."""
    try:
        yield
    except DamagedCheckpointError:  # training restarts from an older one
        raise
    except BaseException as error:
        code = error.code if isinstance(error, UserError) else Exit.CHECK_FAILED
        if isinstance(error, KeyboardInterrupt):
            code = Exit.INTERRUPTED
        elif in_a_job() and is_peer_failure(error):
            code = Exit.PEER_LOST
        with suppress(OSError, OutputError, CheckpointError):  # a full disk must not hide the original error
            here = Status.read(status.path.parent)  # another run's, if the directory was moved and recreated
            if jax.process_index() == 0 and here and here.run_id == status.run_id:
                if here.restarts < status.restarts and isinstance(error, UserError):
                    here.write(state="failed", exit_code=int(code))
                else:
                    status.write(clock, state="failed", exit_code=int(code))
        raise
