"""Checkpoints: the canonical state after a step and what is needed to resume from it, written and verified.

Orbax, which writes the arrays, does not report a failed background save unless somebody waits for it, and does not
verify what it reads.  So every save is polled between steps; a checkpoint counts once its record is written, with a
fingerprint of every array, taken on the devices before the save; restored arrays are compared with it (ADR 0017)."""

import dataclasses
import functools
import operator
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

import spmd_lm
from spmd_lm.checkpoints.damage import root_cause, unreadable
from spmd_lm.checkpoints.directories import (
    CORRUPT,
    DELETING,
    FOREIGN,
    SAVING,
    delete,
    entries,
    is_checkpoint,
    move_aside,
    parse_step,
    remove_unfinished,
)
from spmd_lm.checkpoints.leaves import (
    Shapes,
    abstract_array,
    canonical_array,
    changed_moments,
    compare_shapes,
    describe_moments,
    moment_of,
    one_leaf,
    present_fields,
    saved_shapes,
)
from spmd_lm.checkpoints.record import (
    CheckpointRecord,
    Meta,
    SavedLeaf,
    check_files,
    file_sizes,
    read_record,
)
from spmd_lm.checkpoints.storage import OrbaxStorage, Response, ShardStorage, Storage, holds_parts
from spmd_lm.config.data_sections import RULES
from spmd_lm.config.schema import Checkpoint as CheckpointOptions
from spmd_lm.errors import CheckpointError, DamagedCheckpointError, NonFiniteError, ReplicaError
from spmd_lm.parallel.fingerprint import StoredLeaf, Sums, fingerprints
from spmd_lm.parallel.host_memory import PINNED
from spmd_lm.parallel.trees import LaterLeaf, Tree, from_paths, leaves_by_path, subset_of
from spmd_lm.runtime.formatting import abbreviate
from spmd_lm.runtime.metrics import is_number, lower_is_better
from spmd_lm.runtime.processes import allgather_objects
from spmd_lm.step.state import OPTIONAL_FIELDS

Config = dict[str, Any]  # a RunConfig as JSON


def make_meta(config: Config, num_samples: int, fingerprint: str, vocabulary: str = "", rules: int = RULES) -> Meta:
    """The metadata of a checkpoint: resolved config, position in the data, and versions.  A run adds `start`,
    `devices` and the step's `figures`.

    vocabulary: its hash; '' if there is none, or the run keeps its file.
    rules: version of the rules that turn documents into tokens."""
    packages = ("jax", "flax", "optax", "orbax-checkpoint")
    versions = {"spmd_lm": spmd_lm.__version__} | {name: version(name) for name in packages}
    data = {"samples": num_samples, "fingerprint": fingerprint, "vocabulary": vocabulary, "rules": rules}
    return {"config": config, "data": data, "versions": versions}


@dataclasses.dataclass
class Saving:
    """A save in progress."""

    record: CheckpointRecord
    abstract: dict[str, Tree]  # to read it back; {} if not needed
    ended: Future[None]  # done once the record is written


class Checkpointer:
    """The checkpoints under `directory`.

    Only `save`, `wait`, `close` and `quarantine` change anything, so other processes can read a running job's
    directory.  Only the first process of a job renames, deletes and writes records, unless each has its own
    `directory`.

    run_id: of the run that saves; '' accepts any run's checkpoints.
    log: prints messages for the user."""

    def __init__(
        self,
        directory: Path,
        options: CheckpointOptions | None = None,
        run_id: str = "",
        log: Callable[[str], None] = lambda line: None,
        storage: Storage | None = None,
    ):
        self.directory = Path(directory).absolute()  # orbax refuses relative paths
        self.run_id, self._options, self._log = run_id, options or CheckpointOptions(), log
        self.storage = storage or OrbaxStorage()
        self._parts = ShardStorage(shared=True, log=log)
        self._background = ThreadPoolExecutor(1, "checkpoint")  # for work that would delay the next step
        self._deletions: list[Future[str]] = []
        self._saving: Saving | None = None
        self._saved_step: int | None = None
        self._removed: CheckpointError | None = None  # the last save, if it was removed while it was written
        self._ignored: set[int] = set()  # steps of other runs, already logged

    @property
    def _writes_records(self) -> bool:
        return jax.process_index() == 0 or not self.storage.shared

    def path(self, step: int) -> Path:
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """Steps of complete checkpoints, damaged ones included, ascending; other directories and, if run_id is known,
        other runs' checkpoints are ignored."""
        steps = [parse_step(path.name) for path in entries(self.directory)]
        return sorted(step for step in steps if step is not None and self._is_ours(step))

    def _is_ours(self, step: int) -> bool:
        path = self.path(step)
        if not is_checkpoint(path):
            return False
        try:
            saved_by = read_record(path).run_id
        except (CheckpointError, OSError):  # reported when it is read
            return True
        if self.run_id in ("", saved_by):
            return True
        if step not in self._ignored:
            self._log(f"{path} is of another run ({saved_by}, not {self.run_id}): ignored.")
            self._ignored.add(step)
        return False

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def record(self, step: int) -> CheckpointRecord:
        """The record of `step`.  Raises DamagedCheckpointError if it, or the size of a file, is wrong twice."""
        with suppress(DamagedCheckpointError):
            return self._read_record(step)
        return self._read_record(step)

    def _read_record(self, step: int) -> CheckpointRecord:
        with self.reading(step) as path:
            record = read_record(path)
            check_files(path, record)
        return record

    def agreed_record(self, step: int) -> CheckpointRecord:
        """`record`, which raises in all processes of the job or in none."""
        record, problem = None, ""
        try:
            record = self.record(step)
        except DamagedCheckpointError as damage:
            problem = damage.what
        if problem := first_problem(f"record of {step}", problem):
            raise DamagedCheckpointError(self.path(step), problem)
        assert record is not None
        return record

    def meta(self, step: int) -> Meta:
        return self.record(step).meta

    def restore(self, step: int, abstract_state: Tree, *, on_host_later: bool = False) -> Tree:
        """The state of `step`, bit for bit, in the shardings of `abstract_state`.

        on_host_later: arrays that are to be in pinned host memory are LaterLeafs.

        Raises CheckpointError, before any array is read, for a missing or extra leaf, or another shape or dtype; and
        DamagedCheckpointError, naming leaves or files, if a second attempt to read fails too.  Extra
        OPTIONAL_FIELDS are not read, and missing ones become None.  Moments of newly frozen parameters are not read,
        and those of newly trained ones are left out; both are logged."""
        fields = self._restore_fields(step, present_fields(abstract_state), later=on_host_later)
        return fields if isinstance(abstract_state, dict) else dataclasses.replace(abstract_state, **fields)

    def restore_params(self, step: int, abstract_params: Tree) -> Tree:
        """Only the parameters of `step`, a third of an AdamW state."""
        return self._restore_fields(step, {"params": abstract_params}, partial=True)["params"]

    def param_shapes(self, step: int) -> Shapes:
        """Canonical shapes and dtypes of the parameters of `step`."""
        shapes = saved_shapes(self.record(step)).items()
        return {path.removeprefix("params."): leaf for path, leaf in shapes if path.startswith("params.")}

    def restore_params_by_path(self, step: int, abstract_params: Shapes) -> dict[str, jax.Array]:
        """Some parameters of `step`.  Each must exist, in this shape."""
        nested = unflatten_dict(abstract_params, sep=".")
        loaded = self._load(self.agreed_record(step), {"params": nested})
        return flatten_dict(loaded["params"], sep=".")

    def restore_leaf(self, record: CheckpointRecord, path: str) -> jax.Array:
        """One array, by its path in the record, on one device."""
        leaf = self._load(record, one_leaf(record, path))
        return jax.tree.leaves(leaf)[0]

    def leaf_problem(self, record: CheckpointRecord, path: str) -> str:
        """The damage of one array, read on one device; '' if it is intact."""
        try:
            with self.reading(record.step) as directory:
                loaded = self._storage_of(directory).load(directory, one_leaf(record, path))
        except DamagedCheckpointError as damage:
            return damage.what
        return self._difference(record, loaded)

    def save(self, step: int, state: Tree, meta: Meta) -> None:
        """Saves, in the background if asynchronous.  Raises NonFiniteError, without writing, if a number of the state
        is not finite; CheckpointError if this save or the one before it failed."""
        self.wait()
        self._finish_deletions()
        if not self.storage.shared:  # no process deletes what another one may still need
            allgather_objects(f"saved before {step}", None)
        fields = present_fields(state)
        by_path = leaves_by_path(fields)
        stored = {path: leaf for path, leaf in by_path.items() if isinstance(leaf, StoredLeaf)}
        prints, finite = fingerprints({path: leaf for path, leaf in by_path.items() if path not in stored})
        sums = _total_sums(step, stored) if stored else {}
        if not (finite and all(each.finite for each in sums.values())):
            raise NonFiniteError(f"the state after step {step} is not finite")
        prints |= {path: str(each) for path, each in sums.items()}
        leaves = {
            path: SavedLeaf(shape=[*leaf.shape], dtype=str(leaf.dtype), fingerprint=prints[path])
            for path, leaf in by_path.items()
        }
        record = CheckpointRecord(step=step, run_id=self.run_id, meta=meta, leaves=leaves, files={})
        abstract = jax.tree.map(abstract_array, fields) if self._options.read_back else {}
        with self._writing(record):
            if self._writes_records:
                self._log_each(*remove_unfinished(self.directory))
            storage = self._parts if stored and self.storage.shared else self.storage
            response = storage.save(self.path(step).with_suffix(SAVING), fields)
            self._saving = Saving(record, abstract, self._background.submit(self._write_record, record, response))
        if self._options.read_back or not self._options.asynchronous:  # all processes read it back at once
            self.wait()

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits up to `seconds` for the save in progress and commits it; returns the step of the last committed save.
        Called between steps to surface a failed save, as CheckpointError.  In a job of one process, a save that was
        removed while it was written is only logged, until the end: the next one may succeed."""
        if (saving := self._saving) is None:
            return self._saved_step
        if not futures.wait([saving.ended], seconds).done:
            return self._saved_step
        self._saving, self._removed = None, None
        try:
            with self._writing(saving.record):
                saving.ended.result()
                self._commit(saving)
        except CheckpointError as error:
            unfinished = self.path(saving.record.step).with_suffix(SAVING)
            is_there = any(path.name.startswith(unfinished.name) for path in entries(self.directory))
            if is_there or jax.process_count() > 1:  # several would have to agree on what counts
                raise
            self._removed = error
            self._log(f"{unfinished} was removed while it was written: the next save is tried.")
            return self._saved_step
        self._saved_step = saving.record.step
        if self._writes_records:
            self._delete_oldest()
        return self._saved_step

    def close(self) -> None:
        """Waits like `wait`, and for deletions.  Raises CheckpointError if the last save did not succeed."""
        self.wait()
        self._finish_deletions()
        if self._removed:
            raise self._removed

    def _finish_deletions(self) -> None:
        while self._deletions:
            self._log_each(self._deletions.pop().result())

    def _log_each(self, *messages: str) -> None:
        for message in filter(None, messages):
            self._log(message)

    def _write_record(self, record: CheckpointRecord, response: Response) -> None:
        """Writes the record after the arrays, in the background: on file systems like ext4, flushing it waits for all
        earlier writes."""
        response.result()
        if self._writes_records:
            partial = self.path(record.step).with_suffix(SAVING)
            record.files = file_sizes(partial)
            record.write(partial)

    def _commit(self, saving: Saving) -> None:
        """Renames a finished save."""
        record, step = saving.record, saving.record.step
        partial, final = self.path(step).with_suffix(SAVING), self.path(step)
        if self._options.read_back:
            allgather_objects(f"written {step}", None)  # a ShardStorage waits in the first process alone
            problem = self._read_back(record, partial, leaves_by_path(saving.abstract))
            if problem := first_problem(f"read back {step}", problem):
                raise DamagedCheckpointError(partial, problem)
        if not self._writes_records:
            return
        if os.path.lexists(final):
            self._log(f"{final} is in the way: moved to {move_aside(final, FOREIGN).name}.")
        partial.rename(final)

    def _read_back(self, record: CheckpointRecord, path: Path, abstract: Shapes) -> str:
        """`_difference` of all leaves: those on the host one after the other."""
        on_host = [name for name, leaf in abstract.items() if leaf.sharding.memory_kind == PINNED]
        parts = [[name for name in abstract if name not in on_host], *([name] for name in on_host)]
        of_parts = ({name: abstract[name] for name in names} for names in parts)
        loaded = (self._storage_of(path).load(path, unflatten_dict(part, sep=".")) for part in of_parts)
        return next(filter(None, (self._difference(record, each) for each in loaded)), "")

    def _storage_of(self, path: Path) -> Storage:
        """What reads this checkpoint: a run that keeps state in files saves others than orbax's."""
        return self._parts if self.storage.shared and holds_parts(path) else self.storage

    def _delete_oldest(self) -> None:
        """Deletes the checkpoints that are not kept; the next save retries what fails."""
        intact = self.intact_steps()
        best = self._best_step(intact)
        for old in (step for step in intact[: -self._options.keep] if step != best):
            try:
                self.path(old).rename(doomed := self.path(old).with_suffix(DELETING))
            except OSError as error:
                self._log(f"{self.path(old)} cannot be deleted: {error.strerror}. It takes room on the disk.")
            else:
                self._deletions.append(self._background.submit(delete, doomed))

    def _best_step(self, steps: list[int]) -> int | None:
        """The step with the best figure of checkpoint.keep_best, the first among equals; None without any."""
        name = self._options.keep_best
        if name is None:
            return None
        figures = {step: self.record(step).meta.get("figures", {}).get(name) for step in steps}
        sign = -1 if lower_is_better(name) else 1
        return max((step for step in steps if is_number(figures[step])), key=lambda s: sign * figures[s], default=None)

    def intact_steps(self) -> list[int]:
        """Steps with intact records and file sizes, ascending.  No array is read."""

        def is_intact(step: int) -> bool:
            try:
                return bool(self.record(step))
            except CheckpointError:
                return False

        return [step for step in self.steps() if is_intact(step)]

    def quarantine(self, damage: DamagedCheckpointError) -> None:
        """Moves a damaged checkpoint aside, and logs it.  Called in all processes of the job."""
        name = ""
        if self._writes_records:
            try:
                name = move_aside(damage.directory, CORRUPT).name
            except OSError as error:
                raise CheckpointError(f"{damage} It cannot be moved aside: {error.strerror}.") from error
        (name, *_) = allgather_objects("quarantine", name)
        self._log(f"{damage} It was moved to {name}.")

    def _restore_fields(
        self, step: int, fields: dict[str, Tree], partial: bool = False, later: bool = False
    ) -> dict[str, Tree]:
        """Fields of a saved state, None for missing OPTIONAL_FIELDS.  partial: ignore all other saved fields."""
        record = self.agreed_record(step)
        shapes = saved_shapes(record)
        saved = {path.split(".")[0] for path in shapes}
        present = {name: field for name, field in fields.items() if name in saved or name not in OPTIONAL_FIELDS}
        ignored = {name for name in saved if name not in fields and (partial or name in OPTIONAL_FIELDS)}
        expected = {path: leaf for path, leaf in shapes.items() if path.split(".")[0] not in ignored}
        own = {path: canonical_array(leaf.shape, leaf.dtype) for path, leaf in leaves_by_path(present).items()}
        new, unread = changed_moments(expected, own)
        changed = {*new, *unread}
        expected, own = (
            {path: leaf for path, leaf in each.items() if moment_of(path) not in changed} for each in (expected, own)
        )
        if differences := compare_shapes(expected, own):
            header = f"{self.path(step)} holds a different state than this configuration expects:"
            raise CheckpointError("\n".join([header, *differences]))
        if new:
            have_moments = unflatten_dict(dict.fromkeys(filter(None, map(moment_of, expected))), sep=".")
            present["opt_state"] = jax.tree.map(
                lambda moments: subset_of(moments, have_moments),
                present["opt_state"],
                is_leaf=lambda x: isinstance(x, dict),
            )
        loaded = self._load_in_part(record, present) if later else self._load(record, present)
        self._log_each(*(f"{self.path(step)}: {line}." for line in describe_moments(new, unread)))
        return dict.fromkeys(fields) | loaded

    def _load_in_part(self, record: CheckpointRecord, present: dict[str, Tree]) -> dict[str, Tree]:
        """`_load`, with a LaterLeaf for each array that is to be in pinned host memory."""
        leaves: dict[str, Any] = leaves_by_path(present)
        on_host = {name: leaf for name, leaf in leaves.items() if leaf.sharding.memory_kind == PINNED}
        now = {name: leaf for name, leaf in leaves.items() if name not in on_host}
        leaves |= leaves_by_path(self._load(record, unflatten_dict(now, sep=".")))
        for name, leaf in on_host.items():
            wanted = unflatten_dict({name: leaf}, sep=".")
            leaves[name] = LaterLeaf(functools.partial(self._load_leaf, record, wanted))
        return from_paths(leaves, present)

    def _load_leaf(self, record: CheckpointRecord, wanted: dict[str, Tree]) -> jax.Array:
        return jax.tree.leaves(self._load(record, wanted))[0]

    def _load(self, record: CheckpointRecord, abstract_fields: dict[str, Tree]) -> dict[str, Tree]:
        """Loads arrays; retries once after damage, which may be a fault in reading, or in one process alone."""
        step, path = record.step, self.path(record.step)
        for attempt in (1, 2):
            loaded, problem = {}, ""
            try:
                with self.reading(step):
                    loaded = self._storage_of(path).load(path, abstract_fields)
            except DamagedCheckpointError as damage:
                problem = damage.what
            problem = first_problem(f"load {step} {attempt}", problem)  # comparing takes all processes
            if self._options.verify and not problem:
                problem = self._difference(record, loaded)
            if not problem:
                return loaded
            if attempt == 1:
                self._log(f"{DamagedCheckpointError(path, problem)} Reading it again.")
        raise DamagedCheckpointError(path, problem)

    def _difference(self, record: CheckpointRecord, loaded: dict[str, Tree]) -> str:
        """A sentence naming the leaves that differ from what was saved; '' if all are equal."""
        found, _ = fingerprints(loaded)
        wrong = [name for name, value in found.items() if value != record.leaves[name].fingerprint]
        return f"{abbreviate(wrong)}: not the bits that were saved" if wrong else ""

    def _others(self, step: int | None) -> str:
        others = [other for other in self.steps() if other != step]
        return f"other steps: {', '.join(map(str, others)) or 'none'}."

    @contextmanager
    def reading(self, step: int) -> Iterator[Path]:
        """Raises DamagedCheckpointError for damage, CheckpointError for other failures to read."""
        path = self.path(step)
        try:
            yield path
        except CheckpointError:
            raise
        except Exception as error:
            if problem := unreadable(path, error):
                others = self._others(step)
                raise CheckpointError(f"{path} cannot be read: {problem}. Nothing was changed; {others}") from error
            raise DamagedCheckpointError(path, root_cause(error)) from error

    @contextmanager
    def _writing(self, record: CheckpointRecord) -> Iterator[None]:
        step, size = record.step, record.size
        try:
            yield
        except Exception as error:
            existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
            raise CheckpointError(
                f"{self.path(step)} was not saved: {root_cause(error)}\n"
                f"{shutil.disk_usage(existing).free:,} bytes are free in {existing}, and it takes up to {size:,}. "
                f"Older checkpoints are as they were: {', '.join(map(str, self.steps())) or 'none'}."
            ) from error


def _total_sums(step: int, stored: dict[str, StoredLeaf]) -> dict[str, Sums]:
    """The fingerprints of whole arrays, from the parts of all processes, each counted once.  Raises ReplicaError if
    copies of a part differ."""
    own = {path: [[list(bounds), *sums] for bounds, sums in leaf.parts.items()] for path, leaf in stored.items()}
    parts: dict[str, dict[str, Sums]] = {path: {} for path in stored}
    for of_process in allgather_objects(f"parts of {step}", own):
        for path, found in of_process.items():
            for bounds, *sums in found:
                if parts[path].setdefault(str(bounds), Sums(*sums)) != Sums(*sums):
                    raise ReplicaError(
                        f"step {step}: processes have different copies of {path}. A device or a host computed or "
                        "remembered wrongly. Train again: it resumes from the last checkpoint."
                    )
    return {path: functools.reduce(operator.add, found.values()) for path, found in parts.items()}


def first_problem(subject: str, problem: str) -> str:
    """The first problem in any process of the job, or ''."""
    return next(filter(None, allgather_objects(subject, problem)), "")


def new_run_id() -> str:
    """A random id, the same in all processes of the job."""
    return allgather_objects("run_id", secrets.token_hex(8))[0]
