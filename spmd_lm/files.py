"""Safe file access where others may have put files: reads are bounded, and writes follow no links.

A pipe or a device may never end, a file may be larger than memory, and a link in a directory that others write to may
lead to any file of ours.  A refusal is an OSError, whose `strerror` gives the reason."""

import errno
import grp
import itertools
import json
import os
import pwd
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_MODEL_FILE = 2**26  # bytes of a model's JSON files and vocabulary; the largest in use has 33 MB
MAX_VALUES = 3_000_000  # most values in a JSON file; the largest tokenizer.json in use, of 33 MB, has 1.9 million


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """An opener for `open` that accepts only regular files, and no links when writing."""
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)  # a pipe would wait for its other end
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path) and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a link, and may lead anywhere: remove it", str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def is_name(path: str) -> bool:
    """True if a file can have this name, whether or not there is one."""
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        return isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG
    return True


def read_bytes(path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def parse_json(text: bytes) -> Any:
    """Parses JSON.  Raises ValueError, with the reason, if it is invalid or has too many values."""
    require_few_values(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def require_few_values(text: bytes) -> None:
    """Raises ValueError for JSON with more than MAX_VALUES."""
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:  # each takes 100 bytes or more once parsed
        raise ValueError(f"it has more than {MAX_VALUES:,} values")


def walk(top: str | Path, strict: bool = True) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks like os.walk, at any depth: Python 3.11's recurses at each level.  Raises OSError for an unreadable
    directory, unless `strict` is false."""

    def fail(error: OSError) -> None:
        if strict:
            raise error

    waiting = [os.fspath(top)]
    while waiting:
        for directory, below, names in itertools.islice(os.walk(waiting.pop(), onerror=fail), 1):
            yield directory, below, names
            paths = [os.path.join(directory, name) for name in reversed(below)]
            waiting += [path for path in paths if not os.path.islink(path)]


def walk_files(directory: Path) -> Iterator[Path]:
    """The regular files below a directory, sorted.  Raises OSError for unreadable directories, which rglob skips."""
    for root, directories, names in walk(directory):
        directories.sort()
        for path in (Path(root, name) for name in sorted(names)):
            try:
                is_regular = stat.S_ISREG(os.stat(path).st_mode)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):  # a broken link's
                    raise
                is_regular = False
            if is_regular:
                yield path


def require_own(directory: Path, or_sticky: bool = False) -> None:
    """Raises OSError if another user could replace the directory's contents, or the directory itself through one above.
    or_sticky: accept a sticky directory, such as /tmp, where nobody can."""
    path, target = Path(os.path.abspath(directory)), Path(os.path.realpath(directory))
    for each in dict.fromkeys((path, target, *path.parents, *target.parents)):
        found, is_above = each.stat(), each not in (path, target)
        group = 0 if is_above and _is_of_user_alone(found.st_gid) else stat.S_IWGRP
        others_write = found.st_mode & (group | stat.S_IWOTH)
        sticky = found.st_uid in (0, os.getuid()) and found.st_mode & stat.S_ISVTX
        if others_write and not (sticky and (or_sticky or is_above)):
            advice = "chmod go-w it" if is_above else "chmod 700 it"
            raise OSError(errno.EPERM, f"other users can write to it: {advice}", str(each))
        if not is_above and found.st_uid != os.getuid() and not (sticky and or_sticky):
            raise OSError(errno.EPERM, "it is another user's", str(each))
        if each.is_symlink() and each.lstat().st_uid not in (0, os.getuid()):
            raise OSError(errno.EPERM, "it is a link of another user's", str(each))


def _is_of_user_alone(group: int) -> bool:
    """True for the user's private group, which on many systems may write to all that the user creates."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        return grp.getgrgid(group).gr_name == name and {*grp.getgrgid(group).gr_mem} <= {name}
    except KeyError:
        return False


def memory_bytes() -> int:  # this host's RAM
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def create(path: Path) -> Any:
    """A new file of this name, open for writing; removes an existing file or link, but not a link's target."""
    with suppress(FileNotFoundError):
        path.unlink()
    return open(path, "xb")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces the file's content; a reader, or a crash, sees the old content or the new, never a part."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with create(partial) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()  # free its space, which may have run out
        raise


def safetensors_header(entries: Mapping[str, Any]) -> bytes:
    """The beginning of a safetensors file: the header's length in eight little-endian bytes, and the header, JSON with
    each tensor's dtype, shape and offsets; the tensors' bytes follow.  The library's writer holds all tensors of a file
    in memory."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns tensors to eight bytes
    return struct.pack("<Q", len(text)) + text


def require_inside(path: Path) -> None:
    """Raises OSError for a link out of its directory or, in a Hugging Face hub's cache, out of that model's.  There a
    snapshot's files are links, models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH, which may link in turn to
    a store shared by all models, ../../blobs/HA/HASH."""
    directory, target = (Path(os.path.realpath(each)) for each in (path.parent, path))
    hub = (each for each in directory.parents if each.name.startswith("models--"))
    root = next((each for each in hub if directory.is_relative_to(each / "snapshots")), directory)
    shared = re.escape(f"{root.parent}/blobs/") + r"([0-9a-f]{2})/\1[0-9a-f]{62}" if root != directory else ""
    if not target.is_relative_to(root) and not re.fullmatch(shared, str(target)):
        raise OSError(errno.EPERM, f"it is a link out of {root}, to {target}: copy the file there", str(path))
