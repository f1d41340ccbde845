"""The claim of one writer on an address in a bucket, where no file system locks: the object .lock.

It names its holder and is written under conditions alone, so that of two writers one is refused.  The holder writes it
again every RENEWAL seconds.  One that stays the same for EXPIRY seconds, by the clock of who waits, was left by a
process that died.  It also names the working copy that is the latest: the holder's, once that has fetched."""

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from spmd_lm.buckets.bucket import Bucket, Version
from spmd_lm.errors import ConfigError, OutputError

LOCK = ".lock"
RENEWAL, EXPIRY = 15.0, 60.0  # seconds
MAX_LOCK = 10_000  # bytes


class Lock(NamedTuple):
    """The object's content.  token: of the holder's working copy; process: random, of the holder; latest: token of the
    working copy that was the last to be written, '' if none was."""

    token: str = ""
    holder: str = "somebody"
    state: str = "held"
    process: str = ""
    latest: str = ""


class Claim:
    """token: random, of the working copy: what a dead process of the same one has claimed is taken over at once.
    holder: the writer's name in messages of others."""

    def __init__(
        self,
        bucket: Bucket,
        token: str,
        holder: str,
        log: Callable[[str], None],
        renewal: float = RENEWAL,
        expiry: float = EXPIRY,
    ):
        self._bucket, self._token, self._holder, self._log = bucket, token, holder, log
        self._renewal, self._expiry = renewal, expiry
        self._process, self._latest, self._writes = secrets.token_hex(8), "", 0
        self._version: Version = {}
        self._writing = threading.Lock()
        self._lost = ""  # the holder who took it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="claim", daemon=True)

    def acquire(self) -> str:
        """Claims the address, and renews the claim until `release`.  Returns the token of the latest working copy, ''
        if there is none.  Raises ConfigError if another process holds it, or for a server that ignores conditions,
        OSError if the bucket cannot be read or written."""
        while True:
            with suppress(FileExistsError):  # written since it was read
                last, version = self._wait_for_its_end()
                self._latest = last.latest
                content = self._content("held")
                if version is None:
                    self._version = self._bucket.create(LOCK, content)
                else:
                    self._version = self._bucket.replace(LOCK, content, version)
                break
        try:
            self._bucket.create(LOCK, content)
        except FileExistsError:
            self._thread.start()
            return last.latest
        raise ConfigError(
            f"{self._bucket.address}: this server replaces what exists though it was told not to (If-None-Match): two "
            "runs could write there at once. Use one that keeps to it."
        )

    def _wait_for_its_end(self) -> tuple[Lock, Version | None]:
        """The last writer's lock, and its version."""
        seen, since = None, 0.0
        while True:
            try:
                content, version = self._bucket.read(LOCK, MAX_LOCK)
            except FileNotFoundError:
                return Lock(), None
            lock = parse_lock(content)
            if lock.state != "held" or lock.token == self._token:
                return lock, version
            if seen is None:
                seen, since = content, time.monotonic()
                self._log(f"{self._bucket.address}: claimed by {lock.holder}: seeing whether it is still there.")
            elif content != seen:
                where = f"{self._bucket.address}: {lock.holder} is writing there"
                raise ConfigError(f"{where}. Wait for it, stop it, or choose another address.")
            elif time.monotonic() - since > self._expiry:
                self._log(f"{self._bucket.address}: {lock.holder} is gone: its claim is taken over.")
                return lock, version
            time.sleep(self._renewal / 5)

    def _content(self, state: str) -> bytes:
        self._writes += 1  # no two are equal, as hashes of contents are what conditions compare
        lock = Lock(self._token, self._holder, state, self._process, self._latest)
        return json.dumps(lock._asdict() | {"writes": self._writes, "time": time.time()}).encode()

    def _keep(self) -> None:
        while not self._ended.wait(self._renewal):
            with suppress(OSError):  # a server that is down: the next time
                self._renew("held")

    def _renew(self, state: str) -> None:
        with self._writing:
            if self._lost:
                return
            try:
                try:
                    self._version = self._bucket.replace(LOCK, self._content(state), self._version)
                except FileExistsError:
                    content, version = self._bucket.read(LOCK, MAX_LOCK)
                    lock = parse_lock(content)
                    if lock.process == self._process:  # our own write, whose answer was lost
                        self._version = self._bucket.replace(LOCK, self._content(state), version)
                    else:
                        self._lost = lock.holder
            except FileNotFoundError:
                self._lost = f"somebody, who removed {LOCK},"
            if self._lost:
                self._ended.set()

    def become_latest(self) -> None:
        """Records that the holder's working copy has what the bucket has, and is written from now on.  Raises OSError
        if the bucket cannot be written, OutputError if the claim is lost."""
        self._latest = self._token
        self.confirm()

    def confirm(self) -> None:
        """`require`, by asking the bucket: this process may have been stopped for longer than its claim holds.  Raises
        OSError if the bucket cannot be written."""
        self._renew("held")
        self.require()

    def require(self) -> None:
        """Raises OutputError if another process has taken the claim over, because this one seemed dead."""
        if self._lost:
            raise OutputError(
                f"{self._bucket.address}: {self._lost} took it over, after this process could not renew its claim for "
                f"{self._expiry:g} s. Nothing more is written there."
            )

    def abandon(self) -> None:
        """Leaves the claim to expire: what this process is sending may still arrive."""
        self._ended.set()

    def release(self) -> None:
        """Ends the claim, unless it was abandoned; its object stays, and says whose copy is the latest."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        if not self._lost:
            with suppress(OSError):  # it expires
                self._renew("released")


def parse_lock(content: bytes) -> Lock:
    """What nobody can read is held by somebody unknown."""
    try:
        lock = json.loads(content)
        return Lock(**{name: str(lock[name])[:200] for name in Lock._fields})
    except (ValueError, KeyError, TypeError, RecursionError):
        return Lock()
