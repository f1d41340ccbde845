"""A run in a bucket, and its working copy: the run's directory on this machine.

Training and every verb read and write that directory like any other, with its locks, links and renames.  Before it is
used, it is made to hold what the bucket does.  While it trains, what is new is sent: metrics before the checkpoints
whose steps they record, of a checkpoint the record last, so that it counts in the bucket once it is whole, and
status.json after it.  No step waits for that (ADR 43)."""

import fcntl
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from spmd_lm.addresses import working_copy
from spmd_lm.buckets.bucket import Bucket, Found, Version
from spmd_lm.buckets.claim import LOCK, MAX_LOCK, RENEWAL, Claim, parse_lock
from spmd_lm.checkpoints.directories import (
    CORRUPT,
    FOREIGN,
    SAVING,
    delete,
    entries,
    is_checkpoint,
    move_aside,
    parse_step,
)
from spmd_lm.checkpoints.record import MAX_RECORD_BYTES, RECORD_FILE, check_files, read_record
from spmd_lm.config.load import CONFIG_FILE
from spmd_lm.errors import CheckpointError, ConfigError, OutputError, UserError
from spmd_lm.files import open_regular, parse_json, read_bytes, walk_files, write_atomically
from spmd_lm.runtime.directories import is_locked
from spmd_lm.runtime.formatting import format_bytes
from spmd_lm.runtime.metrics import MAX_STATUS_BYTES, NONE_SAVED
from spmd_lm.runtime.outputs import print_line

CHECKPOINTS, STATUS = "checkpoints", "status.json"
TOKEN, FETCHING, SENDING = ".token", ".fetching", ".sending"
OF_THIS_COPY = {LOCK, TOKEN, FETCHING, SENDING, "offload", "output.log", "exit.json", "slurm_job"}  # stays here
SENT_EVERY = 10.0  # seconds
LAST_SECONDS = 60.0  # of trying to send what is left at the end of a run
AT_ONCE = 8  # transfers of a checkpoint's files

Log = Callable[[str], None]
Objects = dict[str, Found]
Wanted = Literal["none", "newest", "every"]


class BucketRun:
    """keep: checkpoints in the bucket; older ones are deleted.
    wanted: checkpoints to fetch."""

    def __init__(self, address: str, log: Log, keep: int = 1, wanted: Wanted = "newest"):
        self.address, self.path, self._log = address, working_copy(address), log
        self._keep, self._wanted = keep, wanted
        self._bucket = Bucket(address)
        with self._reading():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._token = self._read_token()
        of_claim = Bucket(address, request_seconds=RENEWAL, retry_seconds=RENEWAL)  # before it expires
        self._claim = Claim(of_claim, self._token, f"process {os.getpid()} on {socket.gethostname()}", log)
        self._sent: dict[str, tuple[int, int]] = {}  # mtime and size of files, by name
        self._records: dict[int, bytes] = {}  # of the bucket's checkpoints, by step
        self._using = threading.Lock()  # the bucket's checkpoints, and what is known of them
        self._fetched_again, self._damaged = set[int](), set[int]()
        self._is_down = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_often, name="bucket", daemon=True)

    def _read_token(self) -> str:
        """A name of this directory that no other has, another machine's of the same path included."""
        path = self.path / TOKEN
        with suppress(OSError):
            if token := read_bytes(path, 100).decode(errors="replace"):
                return token
        write_atomically(path, token := secrets.token_hex(16))
        return token

    # Reading.

    def fetch(self) -> None:
        """Makes the directory hold what the bucket does, unless it is the latest: then only what it lacks.  Raises
        ConfigError if that fails, or there is no run; then nothing here was changed."""
        with self._reading(), _locked(self.path / FETCHING):
            if is_locked(self.path):  # a run that trains here, with all that the bucket has or will have
                if not (self.path / CONFIG_FILE).exists():
                    raise ConfigError(f"{self.address}: a run is about to start there. Try again once it has.")
                return
            latest = ""
            with suppress(FileNotFoundError):
                latest = parse_lock(self._bucket.read(LOCK, MAX_LOCK)[0]).latest
            for attempt in (1, 2, 3):
                found = self._bucket.objects()
                if CONFIG_FILE not in found:
                    what = f"no {CONFIG_FILE} there, so it is not a run"
                    raise ConfigError(f"{self.address}: {what}. Give the address of a run.")
                try:
                    self._fetch(found, latest)
                except (FileNotFoundError, FileExistsError):  # a checkpoint that a running job deletes, or replaces
                    if attempt == 3:
                        raise
                else:
                    break

    def _fetch(self, found: Objects, latest: str) -> None:
        """latest: the token of the working copy that is."""
        self._records = self._read_records(found)
        files = _files_of_run(found)
        if latest != self._token:
            self._remove_stale(files)
        else:
            files = [name for name in files if not (self.path / name).exists()]
        _at_once(self._fetch_if_there, files)
        steps = sorted(self._records)
        newest = [step for step in steps[-1:] if latest != self._token or step > max(self._here(), default=-1)]
        for step in {"none": [], "newest": newest, "every": steps}[self._wanted]:
            self._fetch_step(step, found)

    def _remove_stale(self, files: list[str]) -> None:
        """Removes files that the bucket lacks, and checkpoints that it has had; moves aside those it never had."""
        for name in self._own_files():
            if name not in files:
                (self.path / name).unlink()
        for step in sorted(self._here()):
            path = self._local(step)
            if not is_checkpoint(path) or self._is_equal(step):
                continue
            if step not in self._records and step < max(self._records, default=0):  # the bucket keeps newer ones
                delete(path)
            else:
                aside = move_aside(path, FOREIGN).name
                self._log(f"{path}: {self.address} has another one, or went on without it: moved to {aside}.")

    def _read_records(self, found: Objects) -> dict[int, bytes]:
        steps = {name: step for name in found if (step := _step_of(name)) is not None}
        return {
            step: self._bucket.read(name, MAX_RECORD_BYTES)[0]
            for name, step in steps.items()
            if name == f"{CHECKPOINTS}/{step}/{RECORD_FILE}"
        }

    def _is_equal(self, step: int) -> bool:
        with suppress(OSError):
            return read_bytes(self._local(step) / RECORD_FILE, MAX_RECORD_BYTES) == self._records.get(step)
        return False

    def _fetch_step(self, step: int, found: Objects) -> None:
        """Fetches a checkpoint that is not here.  Sizes are compared with its record where it is read."""
        if os.path.lexists(final := self._local(step)):
            return
        partial = final.with_suffix(SAVING)
        delete(partial)
        under = f"{CHECKPOINTS}/{step}/"
        files = {name: partial / name.removeprefix(under) for name in found if _step_of(name) == step}
        size = format_bytes(sum(found[name].size for name in files))
        self._log(f"{self.address}: fetching the checkpoint of step {step}, {size}")
        _at_once(lambda name: self._fetch_file(name, files[name], found[name].version), files)
        partial.rename(final)

    def _fetch_if_there(self, name: str) -> None:
        """Not what a running job has removed since it was listed, or an empty directory's object."""
        with suppress(FileNotFoundError):
            self._fetch_file(name, self.path / name)

    def _fetch_file(self, name: str, path: Path, version: Version | None = None) -> None:
        """version: as it was listed; None for what a running job may have replaced since."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.tmp")
        partial.unlink(missing_ok=True)
        self._bucket.download(name, partial, version)
        partial.replace(path)

    # Writing.

    @contextmanager
    def open(self) -> Iterator[None]:
        """Claims the address for this process, fetches, and sends what is new during the block and after it.  The
        directory is locked, so nobody else of this machine writes there.  Raises ConfigError if another process
        writes there, OutputError if not everything could be sent."""
        with self._reading():
            latest = self._claim.acquire()
        try:
            with self._reading(), _locked(self.path / FETCHING):
                found = self._bucket.objects()
                if latest != self._token and not self._is_run(found, latest):
                    found = {}
                self._fetch(found, latest)
                if latest != self._token:
                    self._sent = {name: _stamp(self.path / name) for name in self._own_files()}
                self._claim.become_latest()
                self._remove_unfinished(found)
            self._thread.start()
            try:
                yield
            except KeyboardInterrupt:  # at once
                self._ended.set()
                self._claim.abandon()
                raise
            except BaseException:
                try:
                    self._send_last()
                except UserError as failed:
                    self._log(str(failed))
                raise
            self._send_last()
        finally:
            self._ended.set()
            self._claim.release()

    def _is_run(self, found: Objects, latest: str) -> bool:
        """False for nothing, and for what a process has sent that was killed at a run's start.  Raises ConfigError for
        what no run has written, and where a run was that only this directory still has."""
        if STATUS in found or any(_step_of(name) is not None and name.endswith(f"/{RECORD_FILE}") for name in found):
            return True
        if (files := _files_of_run(found)) and not latest:
            what = f"{files[0]} is there, and neither a {STATUS} nor a checkpoint: it belongs to no run"
            raise ConfigError(f"{self.address}: {what}. Move it away, or choose another run.dir.")
        if (self.path / STATUS).exists():
            what = f"the run that was there is gone, but for {self.path}: nothing was changed"
            raise ConfigError(f"{self.address}: {what}. Copy that directory elsewhere, or delete it to start again.")
        return False

    def require(self) -> None:
        """Raises OutputError if the bucket is another process's by now."""
        self._claim.require()

    def fetch_again(self, step: int) -> None:
        """After a damaged checkpoint was moved aside here: fetches it once more or, if what the bucket has is damaged,
        sets that aside and fetches the one before."""
        with self._reading(), self._using:
            found = self._bucket.objects()
            self._records = self._read_records(found)
            if step in self._records and step in self._fetched_again:
                self._set_aside(step)
            self._fetched_again.add(step)
            for newest in sorted(self._records)[-1:]:
                self._fetch_step(newest, found)

    def _set_aside(self, step: int) -> None:
        """Renames the record alone: Amazon copies no file of more than 5 GB."""
        name = f"{CHECKPOINTS}/{step}/{RECORD_FILE}"
        self._bucket.copy(name, f"{name}{CORRUPT}")
        self._bucket.delete(name)
        del self._records[step]
        self._log(f"{self.address}/{name}: of a damaged checkpoint, renamed to {RECORD_FILE}{CORRUPT}.")

    def _remove_unfinished(self, found: Objects) -> None:
        """Deletes what killed processes have sent of checkpoints without their records."""
        kept = {_step_of(name) for name in found if name.endswith(f"/{RECORD_FILE}{CORRUPT}")} | {*self._records}
        for name in found:
            step = _step_of(name)
            if step is not None and step not in kept:
                self._bucket.delete(name)

    def _send_often(self) -> None:
        while not self._ended.wait(SENT_EVERY):
            try:
                self._send()
            except OutputError:  # `require` tells
                return
            except (OSError, UserError) as error:
                if not self._is_down:
                    self._log(f"{_told(error)}. The run goes on, and what it saves is sent when that ends.")
                self._is_down = True
            else:
                if self._is_down:
                    self._log(f"{self.address}: is there again; all is sent.")
                self._is_down = False

    def _send_last(self) -> None:
        """Sends what is left.  Raises OutputError if that fails for LAST_SECONDS."""
        self._ended.set()
        self._thread.join()
        deadline = time.monotonic() + LAST_SECONDS
        while True:
            try:
                return self._send()
            except OSError as error:
                if time.monotonic() > deadline:
                    what = f"{_told(error)}: not all of this run is there. {self.path} has all of it"
                    raise OutputError(f"{what}: mend that, and train again on this machine.") from error
            time.sleep(1.0)

    def _send(self) -> None:
        """Sends changed files, new checkpoints, and then status.json as it was before: it names no checkpoint that is
        not there.  Raises OSError, and OutputError if the claim is lost."""
        self._claim.confirm()
        stamp_of_status, status = _stamp(self.path / STATUS), b""
        with suppress(FileNotFoundError):
            status = read_bytes(self.path / STATUS, MAX_STATUS_BYTES)
        here = self._here()
        for name in self._own_files():
            if name != STATUS:
                self._send_file(name, _stamp(self.path / name), self.path / name)
        with self._using:
            for step in sorted(here):
                if not self._is_equal(step) and self._is_intact(step):
                    self._send_step(step)
            for step in sorted(self._records)[: -self._keep]:
                if step not in here:
                    self._delete_step(step, self._bucket.objects(f"{CHECKPOINTS}/{step}"))
            newest = max(self._records, default=NONE_SAVED)
        if status and _saved_step(status) <= newest:
            self._send_file(STATUS, stamp_of_status, status)

    def _is_intact(self, step: int) -> bool:
        """False for a damaged checkpoint, which replaces none in the bucket, and for one that was deleted meanwhile."""
        path = self._local(step)
        try:
            check_files(path, read_record(path))
        except (CheckpointError, FileNotFoundError) as damage:
            if path.exists() and step not in self._damaged:
                self._log(f"{_told(damage)}. It is not sent.")
                self._damaged.add(step)
            return False
        return True

    def _send_file(self, name: str, stamp: tuple[int, int], content: Path | bytes) -> None:
        if self._sent.get(name) == stamp:
            return
        self._claim.require()
        try:
            self._bucket.write(name, content)
        except FileNotFoundError:
            if (self.path / name).exists():
                raise
        else:
            self._sent[name] = stamp

    def _send_step(self, step: int) -> None:
        """Sends links to its files: training may delete the checkpoint before they are sent."""
        directory, under = self.path / SENDING, f"{CHECKPOINTS}/{step}"
        shutil.rmtree(directory, ignore_errors=True)
        try:
            for path in walk_files(self._local(step)):
                link = directory / path.relative_to(self._local(step))
                link.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, link)
        except OSError:
            if self._local(step).exists():
                raise
            return  # older than those that are kept by now
        if step in self._records:  # what it replaces was quarantined here
            self._bucket.delete(f"{under}/{RECORD_FILE}")
            del self._records[step]
        record = read_bytes(directory / RECORD_FILE, MAX_RECORD_BYTES)
        files = [path for path in walk_files(directory) if path.name != RECORD_FILE]
        _at_once(lambda path: self._bucket.write(f"{under}/{path.relative_to(directory)}", path), files)
        self._claim.confirm()
        self._bucket.write(f"{under}/{RECORD_FILE}", record)
        self._records[step] = record
        shutil.rmtree(directory, ignore_errors=True)

    def _delete_step(self, step: int, found: Objects) -> None:
        """The record first: without it, it is no checkpoint."""
        self._claim.require()
        under = f"{CHECKPOINTS}/{step}/"
        self._bucket.delete(f"{under}{RECORD_FILE}")
        self._records.pop(step, None)
        for name in (name for name in found if name.startswith(under)):
            self._bucket.delete(name)

    def _own_files(self) -> list[str]:
        """Names of the files here but checkpoints', whose directories come and go."""
        tops = [path for path in entries(self.path) if path.name not in OF_THIS_COPY | {CHECKPOINTS}]
        found = [path for top in tops for path in (walk_files(top) if top.is_dir() else [top] * top.is_file())]
        return _files_of_run(str(path.relative_to(self.path)) for path in found if not path.is_symlink())

    def _here(self) -> set[int]:
        return {step for path in entries(self.path / CHECKPOINTS) if (step := parse_step(path.name)) is not None}

    def _local(self, step: int) -> Path:
        return self.path / CHECKPOINTS / str(step)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{_told(error)}. Mend that, and try again.") from error


def fetch_run(address: str, wanted: Wanted = "newest") -> Path:
    """The working copy of a run in a bucket, with what that has now."""
    run = BucketRun(address, lambda line: print_line(line, sys.stderr), wanted=wanted)
    run.fetch()
    return run.path


def _at_once(transfer: Callable[[Any], Version | None], items: Iterable[Any]) -> None:
    """Several transfers at a time.  Raises the first one's error."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(transfer, items))


def _saved_step(status: bytes) -> int:
    """The newest checkpoint that status.json names."""
    with suppress(ValueError, AttributeError):
        if isinstance(step := parse_json(status).get("saved_step"), int):
            return step
    return NONE_SAVED


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the other processes of this machine in this block."""
    with open(path, "a", opener=open_regular) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _told(error: OSError | UserError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return str(error).removesuffix(".")


def _stamp(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return 0, -1


def _files_of_run(names: Iterable[str]) -> list[str]:
    """Those of files but checkpoints' that a run has, or might have: none leads out of its directory, or into one that
    is another run's."""
    names = [*names]
    of_others = tuple(name.removesuffix(mark) for name in names for mark in (LOCK, TOKEN) if name.endswith(f"/{mark}"))
    return [name for name in names if _is_file_of_run(name) and not name.startswith(of_others)]


def _is_file_of_run(name: str) -> bool:
    first, *rest = name.split("/")
    is_inside = not {"", ".", ".."} & {first, *rest} and "\0" not in name
    return is_inside and first not in OF_THIS_COPY | {CHECKPOINTS} and not name.endswith(".tmp")


def _step_of(name: str) -> int | None:
    """The step of the checkpoint that an object is a file of."""
    first, _, rest = name.partition("/")
    step, _, file = rest.partition("/")
    is_inside = not {"", ".", ".."} & {*file.split("/")} and "\0" not in file
    return parse_step(step) if first == CHECKPOINTS and is_inside else None
