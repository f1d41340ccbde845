"""The files of a source in a fixed order, and their raw documents, one at a time.

Only compression and Parquet are decoded here.  A document that is too long, or a damaged file, becomes a raw document
with a `problem`."""

import errno
import hashlib
import os
import stat
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from spmd_lm import files
from spmd_lm.data.text_files import EXCLUDED, SUFFIXES, matches
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.prepare.parquet import ParquetError, read_rows
from spmd_lm.prepare.schema import Preparation, Source
from spmd_lm.prepare.streams import DAMAGE, HashingFile, decompressed, documents_of_lines, require_zstandard

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")  # one document per line
COMPRESSED = (".gz", ".zst")
LINES_OR_TEXT = (*SUFFIXES, *JSON_SUFFIXES)
SEARCHED = (".parquet", *(kind + end for kind in LINES_OR_TEXT for end in ("", *COMPRESSED)))  # in a directory
ALL_FILES = ("",)

PYTHON_STDLIB = "python-stdlib"


class RawDocument(NamedTuple):
    source: int  # index
    file: str
    line: int  # from 1 on; 0 for a whole file
    data: bytes  # a line of JSON if is_json, else text
    is_json: bool = False
    title: str | None = None
    problem: str = ""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class SourceReader:
    """The files of a source, read by `documents`.  Raises DataError for a source without files.
    unread: ignored files of a directory, by suffix."""

    def __init__(
        self,
        index: int,
        source: Source,
        most: int,
        key: str = "sources",
        suffixes: tuple[str, ...] = SEARCHED,
        own: tuple[Path, ...] = (),
    ):
        """most: maximum bytes of a document.
        key: configuration key of the list of sources.
        suffixes: suffixes of the files to read in a directory.
        own: directories that `prepare` writes, whose files are read only if named explicitly."""
        self.index, self.source, self.most, self.suffixes = index, source, most, suffixes
        self.own = [os.path.realpath(directory) for directory in own]
        self.unread = Counter[str]()
        self.sha256, self.bytes_read, self.files_read = hashlib.sha256(), 0, 0
        self.where = f"{key}[{index}]={source.label}"
        self.paths = [] if source.dataset or source.path == "-" else self._find_files()
        if any(path.suffix == ".zst" for path, _ in self.paths):
            require_zstandard(self.where)
        if source.dataset:
            require_datasets(self.where)

    @property
    def size(self) -> int | None:
        """Bytes of its files; None if unknown."""
        sizes = []
        for path, _ in self.paths:
            with self._readable(path):
                sizes.append(path.stat().st_size)
        return sum(sizes) if sizes else None

    def record(self) -> dict[str, Any]:
        """The record of the input, with the SHA-256 of the files' concatenated bytes."""
        if self.source.dataset:
            return {"dataset": self.source.dataset, "name": self.source.name, "split": self.source.split}
        digest = self.sha256.hexdigest()
        return {"path": self.source.path, "files": self.files_read, "bytes": self.bytes_read, "sha256": digest}

    def record_unread(self) -> dict[str, Any]:
        return {"path": self.source.label, "files": self.unread.total(), "suffixes": dict(self.unread.most_common())}

    def read_through(self) -> dict[str, Any]:
        """Reads everything, and returns its record."""
        for _ in self.documents():
            pass
        return self.record()

    def documents(self) -> Iterator[RawDocument]:
        if self.source.dataset:
            yield from self._dataset()
        elif self.source.path == "-":
            with open(0, "rb", buffering=0, closefd=False) as file:
                yield from self._stream(file, "<stdin>", self.source.format or "jsonl", "")
        for path, problem in self.paths:
            if problem:
                yield RawDocument(self.index, str(path), 0, b"", problem=problem)
            else:
                yield from self._file(path)

    def _file(self, path: Path) -> Iterator[RawDocument]:
        kind = self.source.format or format_of(path)
        with self._readable(path), open(files.open_regular(path), "rb", buffering=0) as file:
            if kind == "parquet":
                yield from self._parquet(file, path)
            else:
                yield from self._stream(file, str(path), kind, path.suffix)

    @contextmanager
    def _readable(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            advice = "Put it back" if error.errno == errno.ENOENT else "Fix its permissions"
            where = f"{path}: cannot be read: {error.strerror or error}"
            raise DataError(f"{where}. {advice}, or leave it out of {self.where}.") from error

    def _stream(self, file: BinaryIO, name: str, kind: str, suffix: str) -> Iterator[RawDocument]:
        """Documents of text or JSON lines.  In a compressed file, everything after damage is lost."""
        self.files_read += 1
        line, per_line = 0, kind == "jsonl" or self.source.per == "line"
        hashing = HashingFile(file, self._count)
        try:
            for line, data in documents_of_lines(decompressed(hashing, suffix), self.most, per_line):
                problem = f"longer than {self.most:,} bytes" if data is None else ""
                data = data.rstrip(b"\r\n") if data and per_line else data or b""
                yield RawDocument(self.index, name, line, data, kind == "jsonl", problem=problem)
        except DAMAGE as error:
            yield RawDocument(self.index, name, line + per_line, b"", problem=f"damaged {suffix[1:]}: {error!s:.100}")
        hashing.drain()

    def _parquet(self, file: BinaryIO, path: Path) -> Iterator[RawDocument]:
        self.files_read += 1
        HashingFile(file, self._count).drain()
        row, key, title = -1, self.source.text, self.source.title
        try:
            for row, found in enumerate(read_rows(file, key, title, self.most)):
                if row:
                    yield self._keyed(str(path), row, *found)
                elif key not in found:
                    names = f"{', '.join(found):.200}"
                    raise DataError(f"{path}: no column '{key}', but {names}. Set text in {self.where}.")
        except ParquetError as error:
            yield RawDocument(self.index, str(path), row + 1, b"", problem=f"damaged parquet: {error!s:.100}")

    def _dataset(self) -> Iterator[RawDocument]:
        name = str(self.source.dataset)
        try:
            for row, value in enumerate(self._rows(), 1):
                detail = missing_text(self.source, value)
                yield self._keyed(name, row, value.get(self.source.text), value.get(self.source.title), detail)
        except Exception as error:  # the library's own, or one of the libraries for the network
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            advice = "Look for its id, name and split, and at the network, or give a directory of it"
            raise DataError(f"{self.where}: cannot be loaded: {what}. {advice}.") from error

    def _rows(self) -> Iterable[dict[str, Any]]:
        datasets, name, split = require_datasets(self.where), str(self.source.dataset), self.source.split
        if any(os.path.isfile(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, dict) else loaded
        return datasets.load_dataset(name, self.source.name, split=split, streaming=True)  # runs none of its code

    def _keyed(self, file: str, row: int, text: Any, title: Any, detail: str = "not text") -> RawDocument:
        """A row of a table.  detail: why it has no text."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b""
        problem = "" if isinstance(text, str) else f"no text under '{self.source.text}': {detail}"
        if len(data) > self.most:
            data, problem = b"", f"longer than {self.most:,} bytes"
        return RawDocument(
            self.index, file, row, data, title=title if isinstance(title, str) else None, problem=problem
        )

    def _count(self, data: bytes) -> None:
        self.sha256.update(data)
        self.bytes_read += len(data)

    def _find_files(self) -> list[tuple[Path, str]]:
        """Files in order, each with the reason not to read it, usually ''."""
        pattern = str(self.source.path)
        if pattern == PYTHON_STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            paths = [each for each in visible_files(root) if not EXCLUDED.intersection(each.parts)]
            names = [(each, each.name) for each in paths]
            paths = [each for each, name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
            return check_links(root, paths)
        path = Path(pattern).expanduser()
        try:
            if path.is_dir():
                present = [each for each in visible_files(path) if not self._is_own(each)]
                self.unread.update(ending(each) for each in present if not each.name.endswith(self.suffixes))
                found = check_links(path, [each for each in present if each.name.endswith(self.suffixes)])
                problem = (
                    f"no file in this directory ends in {', '.join(LINES_OR_TEXT)}, .parquet. Name others by a glob"
                )
            elif os.path.lexists(path):
                if not stat.S_ISREG(path.stat().st_mode):
                    raise DataError(f"{self.where}: not a regular file. Name a file, a glob or a directory.")
                found, problem = [(path, "")], ""
            else:
                matched = sorted(filter(os.path.isfile, {*matches(str(path))}))
                found = [(Path(each), "") for each in matched if not self._is_own(each)]
                problem = f"no such file (working directory {Path.cwd()})"
        except OSError as error:
            raise DataError(f"{self.where}: cannot be read: {error.strerror}. Fix its permissions.") from error
        if not found:
            raise DataError(f"{self.where}: {problem}.")
        by_file: dict[str, tuple[Path, str]] = {}
        for each in found:  # several links may lead to one file
            by_file.setdefault(os.path.realpath(each[0]), each)
        return [*by_file.values()]

    def _is_own(self, path: str | Path) -> bool:
        return any(Path(os.path.realpath(path)).is_relative_to(directory) for directory in self.own)


def visible_files(root: Path) -> list[Path]:
    """Sorted files below a directory, without hidden ones."""
    found = sorted(files.walk_files(root))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def check_links(root: Path, paths: list[Path]) -> list[tuple[Path, str]]:
    """Paths with their problem: a link out of the directory is not followed."""
    inside = os.path.realpath(root)
    is_inside = [Path(os.path.realpath(path)).is_relative_to(inside) for path in paths]
    return [(path, "" if yes else "a link out of the directory") for path, yes in zip(paths, is_inside, strict=True)]


def ending(path: Path) -> str:
    """A name's suffix; for a compressed file, with the suffix before it."""
    return "".join(path.suffixes[-2:]) if path.suffix in COMPRESSED else path.suffix or "no suffix"


def missing_text(source: Source, value: dict[str, Any]) -> str:
    """Why the text is missing, and where it may be."""
    if source.text in value:
        return "not text"
    told = f"it has {', '.join(map(str, [*value][:5])) or 'no keys'}"[:80]
    lengths = {str(key): len(each) for key, each in value.items() if isinstance(each, str)}
    if not lengths:
        return told
    origin = "path" if source.path else "dataset"
    return f"{told}: write {{{origin}: {source.label}, text: {max(lengths, key=lengths.__getitem__):.40}}}"


def format_of(path: Path) -> str:
    name = path.name.removesuffix(path.suffix) if path.suffix in COMPRESSED else path.name
    if name.endswith(JSON_SUFFIXES):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def require_datasets(where: str) -> Any:
    """The optional `datasets` library."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{where}: `datasets` is not installed. Run pip install datasets, or name files.") from None
    return datasets


def open_sources(config: Preparation, own: tuple[Path, ...]) -> list[SourceReader]:
    """Readers of all sources.  own: as for SourceReader.  Raises DataError, before reading, for a source without
    files."""
    if [source.path for source in config.sources].count("-") > 1:
        raise ConfigError("sources: standard input (-) can be read once. Leave one.")
    if any(source.path == "-" for source in config.sources) and sys.stdin is None:
        raise DataError("sources: there is no standard input.")
    return [SourceReader(i, each, config.max_document_bytes, own=own) for i, each in enumerate(config.sources)]


def open_evaluation_texts(config: Preparation) -> list[SourceReader]:
    """Readers of steps.leaks.files, which read all files of a directory.  Raises as `open_sources` does."""
    names = config.steps.leaks.files if config.steps.leaks else None
    sources = [Source(path=name) for name in names or []]
    key, most = "steps.leaks.files", config.max_document_bytes
    return [SourceReader(i, each, most, key, ALL_FILES) for i, each in enumerate(sources)]
