"""Text files as documents: found, ordered, read, and checked to be UTF-8.

A document's name is its path below the directory that was given.  Order and split depend on names alone, so the same
files make the same run on another machine or from another directory."""

import glob
import os
import shlex
import sysconfig
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from spmd_lm.errors import DataError

DATA_PATH = "data.path"
"""The configuration key that messages name by default."""

SUFFIXES = (".txt", ".md", ".rst", ".py")
"""Files that a directory is searched for; any other text must be named by its path or a glob."""

# Directories of the standard library that are not read.  Some distributions package the second group separately, which
# would make the corpus differ between machines.
INSTALLED_PACKAGES = {"site-packages", "dist-packages"}
OPTIONAL_PACKAGES = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"}
TABLES = {"encodings"}  # 1.4 MB, so regular that it would flatter every loss

CONTROL_BYTES = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})  # in no text of any single-byte encoding


class Document(NamedTuple):
    name: str
    path: Path
    text: bytes


def read_standard_library() -> list[Document]:
    """This Python's own sources: 390 files, 8.6 MB, read in 0.1 s.  A few that are deliberately not UTF-8 are left
    out."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for name, path in _walk(root, (".py",), INSTALLED_PACKAGES | OPTIONAL_PACKAGES | TABLES):
        if name.startswith("_sysconfigdata"):  # written by the build: its paths and flags differ between machines
            continue
        text = _read_bytes(path)
        if text and _text_problem(text) is None:
            documents.append(Document(name, path, text))
    if not documents:
        raise DataError(f"{root}: this Python is installed without its sources. Use data.source=text and data.path.")
    return documents


def read_documents(patterns: list[str], key: str = DATA_PATH, suffixes: tuple[str, ...] = SUFFIXES) -> list[Document]:
    """The documents of files, globs and directories, each file once, ordered by `patterns`, then by name.

    key: the configuration key of `patterns`; suffixes: the files that directories are searched for.  An empty file is
    skipped if a directory or a glob matched it; it is an error if it was named itself."""
    if not patterns:
        raise DataError(f"{key}: no path is given. Name a file, a glob or a directory.")
    files: dict[Path, tuple[str, Path]] = {}
    for pattern in patterns:
        for name, path in _find_files(pattern, key, suffixes):
            files.setdefault(path.resolve(), (name, path))
    documents = [Document(name, path, _read_utf8(path, key)) for name, path in files.values()]
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
    try:
        if path.is_dir():
            if files := _walk(path, suffixes, key=key):
                return files
            raise DataError(
                f"{where}: no file in this directory ends in {' '.join(suffixes)}. "
                f"Name other kinds of files by a glob, such as {os.path.join(pattern, '**', '*.tex')}."
            )
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError(f"{where}: the file is empty. Name a file that has text.")
            return [(path.name, path)]
    except OSError as error:
        raise _unreadable(error, path, key) from error
    if glob.has_magic(pattern):
        return _match_glob(path, where)
    problem = "not a regular file" if path.exists() else f"no such file or directory (working directory {Path.cwd()})"
    raise DataError(f"{where}: {problem}. Give the path of a text file, a glob or a directory.")


def _match_glob(pattern: Path, where: str) -> list[tuple[str, Path]]:
    first_magic = next(i for i, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:first_magic])
    matches = [Path(match) for match in glob.glob(str(pattern), recursive=True)]
    files = [path for path in matches if path.is_file()]
    if not files:
        raise DataError(
            f"{where}: matches no file (working directory {Path.cwd()}). "
            "Note that * matches within one directory only, ** across directories."
        )
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def _walk(
    root: Path, suffixes: tuple[str, ...], excluded: AbstractSet[str] = frozenset(), key: str = DATA_PATH
) -> list[tuple[str, Path]]:
    """Name and path of the files below `root`, sorted by name, without hidden ones and `excluded` directories."""

    def fail(error: OSError) -> None:
        raise _unreadable(error, root, key) from error

    found = []
    for directory, subdirectories, files in os.walk(root, onerror=fail):
        subdirectories[:] = [name for name in subdirectories if name not in excluded and not name.startswith(".")]
        paths = [Path(directory, file) for file in files if file.endswith(suffixes) and not file.startswith(".")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def _read_bytes(path: Path, key: str = DATA_PATH) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error, path, key) from error


def _unreadable(error: OSError, path: Path, key: str) -> DataError:
    return DataError(
        f"{error.filename or path}: cannot be read: {error.strerror}. Fix its permissions, or leave it out of {key}."
    )


def _read_utf8(path: Path, key: str) -> bytes:
    text = _read_bytes(path, key)
    if problem := _text_problem(text):
        raise DataError(f"{path}: {problem}. {_remedy(text, shlex.quote(str(path)), key)}")
    return text


def _text_problem(text: bytes) -> str | None:
    """Why `text` cannot be a document; None if it can."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}"
    if (offset := text.find(0)) >= 0:
        return f"not text: a NUL byte, which separates documents, at offset {offset}"
    return None


def _remedy(text: bytes, quoted_path: str, key: str) -> str:
    """How to turn the contents of a file that has a `_text_problem` into a document."""
    encoding = _utf16_variant(text)
    if encoding is None:
        try:
            text.decode()
            return f"Drop it, for example by `tr -d '\\0' < {quoted_path} > text.txt`, or leave the file out of {key}."
        except UnicodeDecodeError:
            if len(text.translate(None, CONTROL_BYTES)) < len(text):
                return f"It is a binary file: leave it out of {key}."
            encoding = "latin1"
    convert = f"iconv -f {encoding} -t utf-8 {quoted_path} > text.txt"
    return f"Re-encode it, for example by `{convert}`, or leave it out of {key}."


def _utf16_variant(text: bytes) -> str | None:
    """The UTF-16 encoding that `text` is in, by its byte order mark or by where its NUL bytes are; None if neither."""
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    # Whether more than half of the bytes at even offsets are NUL, and of those at odd offsets.
    even, odd = (4 * text[start::2].count(0) > len(text) for start in (0, 1))
    if even == odd:
        return None
    return "utf-16-be" if even else "utf-16-le"
