"""Addresses of what is on no local path: s3://BUCKET/KEY, gs://BUCKET/KEY, hf://ORG/NAME.

A run in a bucket is trained and read in a directory of this machine, its working copy, in the user's cache."""

import os
import re
from contextlib import suppress
from pathlib import Path

HUB_SCHEME = "hf://"  # prefix of a model that `spmd-lm import` downloads
BUCKETS = {"s3://": "Amazon S3", "gs://": "Google Cloud Storage"}
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
MAX_KEY = 700  # bytes, of the 1,024 that a key may have: names in a run's directory follow


def elsewhere(path: str) -> str:
    """The reason why this is no local path, such as s3://bucket/run; '' if it may be one.  Path merges slashes."""
    if not (scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?=/)", path)):
        return ""
    if scheme[0].lower() == "file:":
        return "file:// is not read: write the path alone"
    if path.startswith(HUB_SCHEME):
        return f"{HUB_SCHEME} is not read here: `spmd-lm import` makes a run of it, or a local directory"
    return f"{scheme[0]}// is not supported here: copy it to this machine, or mount it there, and give that path"


def is_bucket(address: str) -> bool:
    return address.startswith(tuple(BUCKETS))


def bucket_problem(address: str) -> str:
    """The reason why a bucket has no such key; '' if it may have one."""
    name, _, key = address.partition("://")[2].partition("/")
    if not BUCKET_NAME.fullmatch(name):
        return f"{name[:40]!r} is no bucket's name: write s3://BUCKET/KEY or gs://BUCKET/KEY"
    names = [os.fsencode(name) for name in key.split("/")]
    if any(name in (b"", b".", b"..") or len(name) > 255 for name in names) or len(os.fsencode(key)) > MAX_KEY:
        return f"after the bucket's name write a key: names of at most 255 bytes, /, {MAX_KEY} in all, no / at the end"
    return ""


def user_cache() -> Path:
    """The user's cache directory; without a home, a path that raises OSError when written to."""
    with suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spmd_lm"
    return Path("/dev/null")


def working_copy(address: str) -> Path:
    """The directory of this machine for what is at a bucket's address."""
    scheme, _, key = address.partition("://")
    return user_cache() / "buckets" / scheme / key


def address_of(directory: Path) -> str | None:
    """The address whose working copy this directory is, if it is one."""
    with suppress(ValueError):
        scheme, *key = directory.absolute().relative_to((user_cache() / "buckets").absolute()).parts
        if key:
            return f"{scheme}://{'/'.join(key)}"
    return None
