"""Text files as documents: found, ordered, read, and checked to be UTF-8.

A document's name is its path below the directory that was asked for.  Order and split depend on names alone, so that
the same files make the same run on another machine or from another directory."""

import glob
import os
import shlex
import sysconfig
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

from spmd_lm.errors import DataError

PATH = "data.path"  # the key that messages name, where no other is said

# What a directory is searched for; any other text is named by a file or a glob.
SUFFIXES = (".txt", ".md", ".rst", ".py")

# Directories of the standard library that are not read.  What distributions package apart would make the corpus differ.
INSTALLED = {"site-packages", "dist-packages"}
PACKAGED_APART = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"}
TABLES = {"encodings"}  # 1.4 MB that would flatter every loss

UNPRINTABLE = bytes(
    {*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"}
)  # no text has them, in whatever encoding of a byte a letter


class Document(NamedTuple):
    name: str
    path: Path
    text: bytes


def standard_library() -> list[Document]:
    """This Python's own sources: 390 files, 8.6 MB, read in 0.1 s.  Those not UTF-8, on purpose, are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for name, path in _walk(root, (".py",), INSTALLED | PACKAGED_APART | TABLES):
        if name.startswith("_sysconfigdata"):  # written by the build: its paths and flags differ between machines
            continue
        text = _read(path)
        if text and _problem(text) is None:
            found.append(Document(name, path, text))
    if not found:
        raise DataError(f"{root}: this Python came without its sources. Use data.source=text and data.path.")
    return found


def text_files(patterns: list[str], key: str = PATH, suffixes: tuple[str, ...] = SUFFIXES) -> list[Document]:
    """The documents of files, globs and directories, each file once, in the order of `patterns`, then of names.

    key: where in the configuration `patterns` stand; suffixes: what directories are searched for.  An empty file adds
    nothing where a directory or a glob found it; asked for by its own name, it is an error."""
    if not patterns:
        raise DataError(f"{key}: no path is given. Name a file, a glob or a directory.")
    files: dict[Path, tuple[str, Path]] = {}
    for pattern in patterns:
        for name, path in _find(pattern, key, suffixes):
            files.setdefault(path.resolve(), (name, path))
    documents = [Document(name, path, _utf8(path, key)) for name, path in files.values()]
    if not any(document.text for document in documents):
        raise DataError(
            f"{key}={', '.join(patterns)}: {len(documents)} files, all of them empty. Name text that has content."
        )
    return [document for document in documents if document.text]


def _find(pattern: str, key: str, suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Name and path of each file that one entry of `key` stands for."""
    where = f"{key}={pattern}"
    path = _expanded(pattern, key)
    try:
        if path.is_dir():
            if found := _walk(path, suffixes, key=key):
                return found
            raise DataError(
                f"{where}: no file under this directory ends in {' '.join(suffixes)}. "
                f"Name files of other kinds by a glob, such as {os.path.join(pattern, '**', '*.tex')}."
            )
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError(f"{where}: the file is empty. Name a file that has text.")
            return [(path.name, path)]
    except OSError as error:
        raise _unreadable(error, path, key) from error
    if glob.has_magic(pattern):
        return _glob(pattern, key)
    what = "not a regular file" if path.exists() else f"no such file or directory (looked from {Path.cwd()})"
    raise DataError(f"{where}: {what}. Give the path of a text file, a glob or a directory.")


def _expanded(pattern: str, key: str) -> Path:
    try:
        return Path(pattern).expanduser()
    except RuntimeError:
        raise DataError(f"{key}={pattern}: there is no such home directory. Write the path in full.") from None


def _glob(pattern: str, key: str) -> list[tuple[str, Path]]:
    parts = _expanded(pattern, key).parts
    fixed = next(count for count, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    matches = [path for match in glob.glob(str(Path(*parts)), recursive=True) if (path := Path(match)).is_file()]
    if not matches:
        raise DataError(
            f"{key}={pattern}: matches no file (looked from {Path.cwd()}). "
            "Mind that * stays within one directory; ** does not."
        )
    return sorted((path.relative_to(root).as_posix(), path) for path in matches)


def _walk(
    root: Path, suffixes: tuple[str, ...], skipped: AbstractSet[str] = frozenset(), key: str = PATH
) -> list[tuple[str, Path]]:
    """Name and path of the files below `root`, by name; hidden ones and `skipped` directories are left out."""

    def fail(error: OSError) -> None:
        raise _unreadable(error, root, key) from error

    found = []
    for directory, subdirectories, files in os.walk(root, onerror=fail):
        subdirectories[:] = [name for name in subdirectories if name not in skipped and not name.startswith(".")]
        paths = (Path(directory, file) for file in files if file.endswith(suffixes) and not file.startswith("."))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def _read(path: Path, key: str = PATH) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error, path, key) from error


def _unreadable(error: OSError, path: Path, key: str) -> DataError:
    return DataError(
        f"{error.filename or path}: cannot be read: {error.strerror}. Mend its permissions, or leave it out of {key}."
    )


def _utf8(path: Path, key: str) -> bytes:
    text = _read(path, key)
    if problem := _problem(text):
        raise DataError(f"{path}: {problem}. {_mending(text, shlex.quote(str(path)), key)}")
    return text


def _mending(text: bytes, source: str, key: str) -> str:
    """How to make a document of what is none; source: its path, as a shell reads it."""
    if not (encoding := _wide(text)):
        try:
            text.decode()
            return f"Drop it, for example by `tr -d '\\0' < {source} > text.txt`, or leave the file out of {key}."
        except UnicodeDecodeError:
            if len(text.translate(None, UNPRINTABLE)) < len(text):
                return f"It is no text: leave it out of {key}."
            encoding = "latin1"
    return f"Re-encode it, for example by `iconv -f {encoding} -t utf-8 {source} > text.txt`, or leave it out of {key}."


def _wide(text: bytes) -> str:
    """Which UTF-16 `text` is in, by its mark or by where its NULs are; '' if in none."""
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = (4 * text[start::2].count(0) > len(text) for start in (0, 1))  # of those, more than half
    return "" if even == odd else "utf-16-be" if even else "utf-16-le"


def _problem(text: bytes) -> str | None:
    """Why `text` cannot be a document."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}"
    if (offset := text.find(0)) >= 0:
        return f"not text: a NUL byte, which separates documents, at offset {offset}"
    return None
