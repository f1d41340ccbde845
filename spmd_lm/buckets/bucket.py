"""Objects under an address in Amazon S3 or Google Cloud Storage, by obstore.

The environment gives endpoint, region and credentials, as for the providers' own tools.  Every failure is an OSError
whose strerror is written here: what servers answer may hold the name of a key, and is not repeated."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from spmd_lm.addresses import bucket_problem
from spmd_lm.errors import ConfigError

Version = Mapping[str, Any]  # of one object: changed by every write

RETRIES = 8  # of a request, after 0.1 s and longer and longer
RETRY_SECONDS = 30.0
CONNECT_SECONDS, REQUEST_SECONDS = 5.0, 120.0
PART = 16 * 2**20  # bytes of a large object's parts, each a request


class Found(NamedTuple):
    size: int
    version: Version


class Bucket:
    """The objects whose keys begin with an address's, by the rest of their key.

    Raises ConfigError without the package that sends the requests, or for an address without a key."""

    def __init__(self, address: str, request_seconds: float = REQUEST_SECONDS, retry_seconds: float = RETRY_SECONDS):
        if problem := bucket_problem(address):
            raise ConfigError(f"{address:.80}: {problem}.")
        try:
            import obstore
            import obstore.store
        except ImportError:
            extra = "s3" if address.startswith("s3") else "gcs"
            raise ConfigError(f"{address}: the package obstore is missing. pip install 'spmd-lm[{extra}]'.") from None
        self.address, self._obstore = address, obstore
        with self._telling(""):
            scheme, _, path = address.partition("://")
            store = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore}[scheme]
            bucket, _, key = path.partition("/")
            self._store: Any = store(  # from_url would decode %2e%2e, and end the key at ? or #
                bucket,
                prefix=key,
                client_options={
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=request_seconds),
                    "allow_http": True,  # of an endpoint that the environment names so
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=retry_seconds)},
            )

    def objects(self, under: str = "") -> dict[str, Found]:
        """All objects, or those below a name, in the order of their names; without those that stand for directories, as
        some tools make."""
        with self._telling(under):
            found = [each for page in self._obstore.list(self._store, under or None) for each in page]
        listed = {each["path"]: Found(each["size"], _version(each)) for each in found}
        directories = {str(parent) for name in listed for parent in PurePosixPath(name).parents} | {""}
        return {name: listed[name] for name in sorted(listed.keys() - directories)}

    def read(self, name: str, most: int | None = None) -> tuple[bytes, Version]:
        """An object's content and version.  Raises OSError if it has more than `most` bytes."""
        with self._telling(name):
            answer = self._obstore.get(self._store, name)
            meta = answer.meta
            if most is not None and meta["size"] > most:
                raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", self._at(name))
            return bytes(answer.bytes()), _version(meta)

    def read_range(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Raises FileExistsError if the object has another version than this one by now."""
        with self._telling(name):
            options: Any = {"range": (start, stop), "if_match": version["e_tag"]}
            return bytes(self._obstore.get(self._store, name, options=options).bytes())

    def download(self, name: str, path: Path, version: Version | None = None) -> None:
        """Writes an object to a new file.  Raises FileExistsError if it has another version than this one by now."""
        with self._telling(name):
            if_same: Any = {"if_match": version.get("e_tag")} if version else None
            answer = self._obstore.get(self._store, name, options=if_same)
            with open(path, "xb") as file:
                for part in answer.stream(min_chunk_size=PART):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())

    def write(self, name: str, content: bytes | Path) -> Version:
        """Creates or replaces an object, whole: a reader sees the old content or the new."""
        return self._put(name, content, "overwrite")

    def create(self, name: str, content: bytes) -> Version:
        """Raises FileExistsError if the object exists."""
        return self._put(name, content, "create")

    def replace(self, name: str, content: bytes, version: Version) -> Version:
        """Raises FileExistsError unless the object still has this version."""
        return self._put(name, content, version)

    def _put(self, name: str, content: bytes | Path, mode: Any) -> Version:
        with self._telling(name):
            return _version(self._obstore.put(self._store, name, content, mode=mode, chunk_size=PART))

    def copy(self, name: str, to: str) -> None:
        with self._telling(name):
            self._obstore.copy(self._store, name, to)

    def delete(self, name: str) -> None:
        """Deletes an object, if it is there."""
        with self._telling(name), suppress(FileNotFoundError):
            self._obstore.delete(self._store, name)

    def _at(self, name: str) -> str:
        return f"{self.address}/{name}" if name else self.address

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Raises every error as an OSError without the server's words."""
        kinds = self._obstore.exceptions
        try:
            yield
        except (kinds.AlreadyExistsError, kinds.PreconditionError):
            raise FileExistsError(errno.EEXIST, "somebody else has written it", self._at(name)) from None
        except kinds.InvalidPathError:
            what = "an object there has a name with an empty part, . or .., as no file has: remove it"
            raise OSError(errno.EINVAL, what, self._at(name)) from None
        except (kinds.BaseError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # a file's of this machine, or one of ours
                raise
            status = re.search(r"status code: (\d{3})", str(error))  # listing raises one kind for all
            if isinstance(error, FileNotFoundError) or (status and status[1] == "404"):
                raise FileNotFoundError(errno.ENOENT, "no such object, or no such bucket", self._at(name)) from None
            if status and status[1] in ("401", "403"):
                what = "the credentials in the environment do not allow that"
                raise PermissionError(errno.EACCES, what, self._at(name)) from None
            raise OSError(errno.EIO, reason(str(error)), self._at(name)) from None


def _version(meta: Mapping[str, Any]) -> Version:
    """Amazon compares hashes, Google numbers."""
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def reason(text: str) -> str:
    """What an error of obstore says, without addresses and what the server wrote."""
    if status := re.search(r"status code: (\d{3}[ \w]*)", text):
        return f"the server answers {status[1].strip()}"
    if re.search(r"TimedOut|kind: Timeout|timed out", text):
        return "the server does not answer in time"
    if "error sending request" in text:
        return "the server cannot be reached"
    return "the request failed"
