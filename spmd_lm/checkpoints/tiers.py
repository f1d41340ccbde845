"""The tiers of a run's checkpoints: durable ones in its directory and, with checkpoint.local, frequent ones on each
process's host, where saving is fast and a lost host loses them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from spmd_lm.checkpoints.bucket_run import BucketRun
from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.directories import CORRUPT, delete, move_aside
from spmd_lm.checkpoints.parts import num_parts, part_directories, part_directory
from spmd_lm.checkpoints.record import Meta
from spmd_lm.checkpoints.storage import ShardStorage
from spmd_lm.config.schema import Checkpoint as CheckpointOptions
from spmd_lm.errors import CheckpointError, ConfigError, DamagedCheckpointError, OutputError
from spmd_lm.files import require_own
from spmd_lm.parallel.trees import Tree
from spmd_lm.runtime.processes import allgather_objects


class Tiers:
    """The durable and the local checkpoints of a run.

    log: prints messages for the user.
    bucket_run: what sends the durable ones to a bucket, in the first process."""

    def __init__(
        self,
        directory: Path,
        options: CheckpointOptions,
        log: Callable[[str], None],
        bucket_run: BucketRun | None = None,
    ):
        self.bucket_run = bucket_run
        self.durable = Checkpointer(directory, options, log=log)
        self.local: Checkpointer | None = None  # set by `open`
        self._options, self._log = options, log

    def open(self, run_id: str) -> None:
        """Restricts both tiers to this run's checkpoints.  Raises ConfigError if no local ones can be written."""
        self.durable.run_id = run_id
        if self.local or self._options.local is None:
            return
        local, processes = self._options.local, jax.process_count()
        own = part_directory(local.dir, run_id, jax.process_index(), processes)
        try:
            parts = part_directories(local.dir)
            for directory in (own.parents[1], own.parent, own):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                require_own(directory, or_sticky=directory == own.parents[1])
        except OSError as error:
            raise ConfigError(
                f"checkpoint.local.dir={local.dir}: {error.strerror} ({error.filename}). Choose another directory."
            ) from error
        for path in parts:
            if (path.parent, num_parts(path)) != (own.parent, processes):
                self._log(f"{path}: local checkpoints of another run, or of another number of processes: ignored.")
        # One process can be a save behind another, so it takes two for all to have one in common.
        changes = {"keep": max(local.keep, min(processes, 2)), "read_back": False, "keep_best": None}
        self.local = Checkpointer(
            own, self._options.model_copy(update=changes), run_id, self._log, ShardStorage(log=self._log)
        )

    def newest_local(self, is_usable: Callable[[int, Meta], bool]) -> int | None:
        """The newest usable local step that all processes of the job have."""
        local, usable = self.local, []
        if local is None:
            return None
        intact = local.intact_steps()
        for step in intact:
            with suppress(CheckpointError):  # removed meanwhile
                if is_usable(step, local.meta(step)):
                    usable.append(step)
        damaged = [str(local.path(step)) for step in local.steps() if step not in intact]
        answers = allgather_objects("local checkpoints", {"usable": usable, "damaged": damaged})
        for process, answer in enumerate(answers):
            for path in answer["damaged"]:
                self._log(f"process {process}: {path} is damaged: not used.")
        return max(set.intersection(*(set(answer["usable"]) for answer in answers)), default=None)

    def delete_newer(self, step: int) -> None:
        """Deletes local checkpoints of later steps, which the run may now take differently."""
        if self.local is None:
            return
        intact = self.local.intact_steps()
        for path in (self.local.path(saved) for saved in self.local.steps() if saved > step):
            if int(path.name) in intact:
                self._log(delete(path) or f"{path}: the run does not go on from there: deleted.")
                continue
            try:
                self._log(f"{path} is damaged: moved to {move_aside(path, CORRUPT).name}.")
            except OSError as error:
                self._log(f"{path} is damaged, and cannot be moved aside: {error.strerror}.")

    def directories(self) -> dict[int, list[Path]]:
        """Directories of each step's checkpoints, ascending by step."""
        found: dict[int, list[Path]] = {}
        for tier in filter(None, (self.durable, self.local)):
            for step in tier.steps():
                found.setdefault(step, []).append(tier.path(step))
        return dict(sorted(found.items()))

    def save_local(self, step: int, state: Tree, meta: Meta) -> None:
        """Saves a local checkpoint.  Raises OutputError if this save or the one before it failed."""
        if self.local:
            with self._writing_locally():
                self.local.save(step, state, meta)

    def wait_local(self, seconds: float | None = None) -> None:
        if self.local:
            with self._writing_locally():
                self.local.wait(seconds)

    @contextmanager
    def _writing_locally(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise OutputError(f"{error} Make room there, or choose another checkpoint.local.dir.") from error

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Waits for saves in progress after the block; if the block failed, their errors are only logged."""
        try:
            yield
        except BaseException:
            try:
                self.close()
            except CheckpointError as failed:
                self._log(str(failed))
            raise
        self.close()

    def close(self) -> None:
        try:
            self.durable.close()
        finally:
            with suppress(CheckpointError):  # the run has ended; it will resume from complete ones
                if self.local:
                    self.local.close()

    def quarantine(self, damage: DamagedCheckpointError) -> None:
        """Quarantines the checkpoint in its tier."""
        in_local = self.local is not None and damage.directory.parent == self.local.directory
        tier = self.local if in_local else self.durable
        assert tier is not None
        tier.quarantine(damage)
        if self.bucket_run and not in_local:
            self.bucket_run.fetch_again(int(damage.directory.name))
        allgather_objects("fetched", None)
