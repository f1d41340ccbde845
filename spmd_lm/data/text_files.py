"""Text files as documents: found, ordered, read, and checked to be UTF-8.

A document's name is its path below the given directory."""

import contextlib
import glob
import itertools
import os
import re
import shlex
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from spmd_lm.errors import DataError
from spmd_lm.files import memory_bytes, walk

# Suffixes searched for in a directory; other text must be named by its path or a glob.
SUFFIXES = (".txt", ".md", ".rst", ".py")

# Standard library directories to skip: installed packages; tables of 1.4 MB, so regular that they would flatter every
# loss; and parts that some distributions package separately, which would make the text differ between machines.
EXCLUDED = {"site-packages", "dist-packages", "encodings"}
EXCLUDED |= {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"}

CONTROL_BYTES = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})  # in no text of any single-byte encoding


class Document(NamedTuple):
    name: str
    path: Path
    text: bytes


def read_standard_library() -> list[Document]:
    """Python's own sources: 390 files, 8.6 MB, read in 0.1 s, without a few that are deliberately not UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for name, path in _walk(root, (".py",), "data.path", EXCLUDED):
        if name.startswith("_sysconfigdata"):  # written by the build: its paths and flags differ between machines
            continue
        document = Document(name, path, _read_bytes(path, "data.path"))
        with contextlib.suppress(DataError):
            documents.append(_checked(document, "data.path"))
    if documents := [document for document in documents if document.text]:
        return documents
    raise DataError(f"{root}: this Python is installed without its sources. Use data.source=text and data.path.")


def read_documents(patterns: list[str], key: str = "data.path", suffixes: tuple[str, ...] = SUFFIXES) -> list[Document]:
    """The documents of files, globs and directories, each file once, ordered by `patterns`, then by name.

    key: the configuration key of `patterns`.
    suffixes: suffixes of the files that directories are searched for.

    An empty file is skipped if a directory or a glob matched it; named explicitly, it is an error."""
    if not patterns:
        raise DataError(f"{key}: no path is given. Name a file, a glob or a directory.")
    files: dict[Path, tuple[str, Path]] = {}
    for pattern in patterns:
        for name, path in _find_files(pattern, key, suffixes):
            files.setdefault(path.resolve(), (name, path))
    memory = memory_bytes()
    with _readable(Path(patterns[0]), key):
        size = sum(path.stat().st_size for path in files)
    if size > memory:
        where = f"{key}={', '.join(patterns)}"
        raise DataError(f"{where}: {size:,} bytes of text, but this host has {memory:,} of memory. Name fewer files.")
    documents = [_checked(Document(name, path, _read_bytes(path, key)), key) for name, path in files.values()]
    if not any(document.text for document in documents):
        raise DataError(f"{key}={', '.join(patterns)}: all {len(documents)} files are empty. Name files with text.")
    return [document for document in documents if document.text]


def _find_files(pattern: str, key: str, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Name and path of each file that one entry of `key` matches."""
    where = f"{key}={pattern}"
    try:
        path = Path(pattern).expanduser()
    except RuntimeError:
        raise DataError(f"{where}: there is no such home directory. Write the path in full.") from None
    with _readable(path, key):
        if path.is_dir():
            if files := _walk(path, suffixes, key):
                return files
            raise DataError(
                f"{where}: no file in this directory ends in {' '.join(suffixes)}. "
                f"Name other kinds of files by a glob, such as {os.path.join(pattern, '**', '*.tex')}."
            )
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError(f"{where}: the file is empty. Name a file that has text.")
            return [(path.name, path)]
    if glob.has_magic(pattern):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        if found := [Path(match) for match in matches(str(path)) if os.path.isfile(match)]:
            return sorted((match.relative_to(root).as_posix(), match) for match in found)
        raise DataError(
            f"{where}: matches no file (working directory {Path.cwd()}). "
            "Note that * matches within one directory only, ** across directories."
        )
    problem = "not a regular file" if path.exists() else f"no such file or directory (working directory {Path.cwd()})"
    raise DataError(f"{where}: {problem}. Give the path of a text file, a glob or a directory.")


def matches(pattern: str, seen: set[tuple[str, str]] | None = None) -> Iterator[str]:
    """Matches of glob.glob, except that `**` follows no links: two that lead back to it would match forever.
    seen: directories already searched, each with the pattern applied below it."""
    seen = set() if seen is None else seen
    before, *after = re.split(r"(?<![^/])(?:\*\*/)*\*\*(?:/|$)", pattern, maxsplit=1)
    if not after:
        yield from glob.iglob(pattern)
        return
    for root in glob.iglob(before or "."):
        for directory, subdirectories, _ in walk(root, strict=False):
            if (directory, after[0]) in seen:
                subdirectories.clear()
                continue
            seen.add((directory, after[0]))
            subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
            yield from matches(os.path.join(glob.escape(directory), after[0] or "*"), seen)


def _walk(root: Path, suffixes: tuple[str, ...], key: str, excluded: Collection[str] = ()) -> list[tuple[str, Path]]:
    """Name and path of the files below `root`, sorted by name, without hidden ones and `excluded` directories."""
    found = []
    with _readable(root, key):
        for directory, subdirectories, files in walk(root):
            subdirectories[:] = [name for name in subdirectories if name not in excluded and not name.startswith(".")]
            paths = [Path(directory, file) for file in files if file.endswith(suffixes) and not file.startswith(".")]
            found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


@contextlib.contextmanager
def _readable(path: Path, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename or path}: cannot be read: {error.strerror}"
        raise DataError(f"{where}. Fix its permissions, or leave it out of {key}.") from error


def _read_bytes(path: Path, key: str) -> bytes:
    with _readable(path, key):
        return path.read_bytes()


def _checked(document: Document, key: str) -> Document:
    """The document.  Raises DataError for anything but UTF-8 text, with a command to convert it."""
    text, path, is_utf8 = document.text, shlex.quote(str(document.path)), True
    try:
        text.decode()
        offset = text.find(0)
        if offset < 0:
            return document
        problem = f"not text: a NUL byte, which separates documents, at offset {offset}"
    except UnicodeDecodeError as error:
        problem, is_utf8 = f"not UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}", False
    # UTF-16: by its byte order mark, or if more than half of the bytes at even or at odd offsets are NUL.
    even, odd = (4 * text[start::2].count(0) > len(text) for start in (0, 1))
    encoding = {(True, False): "utf-16-be", (False, True): "utf-16-le"}.get((even, odd))
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    if is_utf8 and not encoding:
        remedy = f"Drop it, for example by `tr -d '\\0' < {path} > text.txt`, or leave the file out of {key}."
    elif not encoding and len(text.translate(None, CONTROL_BYTES)) < len(text):
        remedy = f"It is a binary file: leave it out of {key}."
    else:
        convert = f"iconv -f {encoding or 'latin1'} -t utf-8 {path} > text.txt"
        remedy = f"Re-encode it, for example by `{convert}`, or leave it out of {key}."
    raise DataError(f"{document.path}: {problem}. {remedy}")
