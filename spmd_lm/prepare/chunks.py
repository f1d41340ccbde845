"""Chunks of cleaned documents, which the first stage leaves on disk for the others.

A chunk is some MB of consecutive documents, and six files (stage_files.py):

  00000.text         texts, one after another
  00000.ends.npy     uint64 [documents + 1]: where each begins, and the end
  00000.digests.npy  uint64 [documents, 2]: random numbers from each text, which determine its split and order
  00000.exact.npy    uint64 [3, documents]: a 128-bit hash in two rows, and the document; sorted
  00000.bands.npy    uint64 [2, keys]: keys of MinHash bands, and the documents; sorted
  00000.json         a ChunkRecord

The division of documents into chunks does not affect the result."""

import dataclasses
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from spmd_lm.errors import DataError
from spmd_lm.prepare import clean, shingles
from spmd_lm.prepare.schema import Preparation
from spmd_lm.prepare.sources import RawDocument
from spmd_lm.prepare.stage_files import Natural, damaged_stage, open_array, read_stage, write_stage

RAW_CHUNK_BYTES = 2**23  # raw documents in a chunk
CHUNK_DOCUMENTS = 2**14
MOST_TOLD = 10  # bad documents, and files without any document, named in a report


SHAPES: dict[str, Callable[[int], tuple[int | None, ...]]] = {
    "ends": lambda documents: (documents + 1,),
    "digests": lambda documents: (documents, 2),
    "exact": lambda documents: (3, None),
    "bands": lambda documents: (2, None),
}
"""Shapes of a chunk's arrays, by its number of documents; None for any size."""


class NothingLeftError(DataError):
    pass


class RawChunk(NamedTuple):
    number: int
    documents: list[RawDocument]
    checksum: int


class ReadCount(NamedTuple):
    source: Natural
    file: str  # '' for documents that are whole files
    texts: Natural  # documents with text
    problem: str  # why the first document without text has none


@dataclasses.dataclass(frozen=True)
class ChunkRecord:
    number: Natural
    raw_documents: Natural
    documents: Natural  # remaining after cleaning
    checksum: Natural
    counts: list[tuple[str, str, Natural]]  # (step, reason, documents)
    bad: list[str]  # the first bad documents, with their problems
    read: list[ReadCount]  # by source, and file of lines in it


class Reading:
    """Counts documents with text by source and file of lines."""

    def __init__(self) -> None:
        self.texts, self.problems = Counter[tuple[int, str]](), dict[tuple[int, str], str]()

    def add(self, raw: RawDocument, problem: str) -> None:  # problem: why it has no text, or ''
        key = raw.source, raw.file if raw.line else ""
        self.texts[key] += not problem
        if problem:
            self.problems.setdefault(key, problem)

    def counts(self) -> list[ReadCount]:
        return [ReadCount(*key, texts, self.problems.get(key, "")) for key, texts in self.texts.items()]


@dataclasses.dataclass(frozen=True)
class ChunkCleaner:
    """Cleans raw chunks; a pure function of the chunk and these fields."""

    config: Preparation
    directory: Path
    leaks: Path | None

    def __call__(self, chunk: RawChunk) -> ChunkRecord:
        if record := finished_chunk(self.directory, chunk.number):
            if record.checksum != chunk.checksum:
                where = f"{chunk.documents[0].where}: changed since this data set was begun"
                raise DataError(f"{where}. Remove {self.directory.parent}, and start again.")
            if record.bad and self.config.on_bad == "error":
                raise bad_input(record.bad[0])
            return record
        texts, counts, bad, reading = list[str](), Counter[tuple[str, str]](), list[str](), Reading()
        for raw in chunk.documents:
            try:
                verdict = clean.examine(raw, self.config, self.leaks)
            except clean.BadInputError as error:
                what = f"{error} ({error.detail})" if error.detail else str(error)
                said = f"{raw.where}: {what}"
                if self.config.on_bad == "error":
                    raise bad_input(said) from None
                counts["read", str(error)] += 1
                bad.append(said)
                reading.add(raw, what)
                continue
            reading.add(raw, verdict.reason if verdict.step == "read" else "")
            if verdict.reason:
                counts[verdict.step or "utf8", verdict.reason] += 1
            if not verdict.step:
                texts.append(verdict.text)
        raw_documents, told = len(chunk.documents), [(*each, count) for each, count in sorted(counts.items())]
        record = ChunkRecord(0, raw_documents, len(texts), 0, told, bad[:MOST_TOLD], reading.counts())
        return self._write(chunk, texts, record)

    def _write(self, chunk: RawChunk, texts: list[str], record: ChunkRecord) -> ChunkRecord:
        encoded = [text.encode() for text in texts]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.uint64)
        digests = hashes_128(encoded)
        steps = self.config.steps
        exact = hashes_128(map(clean.normalized, texts) if steps.exact_duplicates else [])
        bands = np.empty((2, 0), np.uint64)
        if steps.near_duplicates:
            rows = shingles.rows_per_band(steps.near_duplicates.jaccard)
            bands = np.stack(shingles.band_keys(map(shingles.shingle_set, texts), rows), dtype=np.uint64)
        record = dataclasses.replace(record, number=chunk.number, checksum=chunk.checksum)
        order = np.lexsort((exact[:, 1], exact[:, 0]))  # stable: documents with equal hashes stay in order
        contents: dict[str, bytes | np.ndarray] = {
            ".text": b"".join(encoded),
            ".ends.npy": ends,
            ".digests.npy": digests,
            ".exact.npy": np.stack([*exact[order].T, order.astype(np.uint64)]),
            ".bands.npy": bands[:, np.argsort(bands[0], kind="stable")],
        }
        write_stage(chunk_path(self.directory, chunk.number), dataclasses.asdict(record), contents)
        return record


def bad_input(said: str) -> DataError:
    return DataError(f"{said}. Mend it, or set on_bad=skip.")


def hashes_128(texts: Iterable[bytes]) -> np.ndarray:
    """128-bit hashes, uint64 [texts, 2]."""
    data = b"".join(blake2b(text, digest_size=16).digest() for text in texts)
    return np.frombuffer(data, "<u8").reshape(-1, 2)


def chunk_path(directory: Path, number: int) -> Path:
    return directory / f"{number:05}"


def divide(documents: Iterable[RawDocument]) -> Iterator[RawChunk]:
    """Divides documents into chunks of RAW_CHUNK_BYTES, exceeded by at most one document, or CHUNK_DOCUMENTS."""
    number, size, checksum, part = 0, 0, 0, list[RawDocument]()
    for raw in documents:
        part.append(raw)
        size += len(raw.data) + 100
        name = f"{raw.file} {raw.line} {raw.problem}".encode("utf-8", "surrogatepass")  # names may not be UTF-8
        checksum = zlib.crc32(raw.data, zlib.crc32(name, checksum))
        if size >= RAW_CHUNK_BYTES or len(part) >= CHUNK_DOCUMENTS:
            yield RawChunk(number, part, checksum)
            number, size, checksum, part = number + 1, 0, 0, []
    if part:
        yield RawChunk(number, part, checksum)


def finished_chunk(directory: Path, number: int) -> ChunkRecord | None:
    """A finished chunk's record; None if it does not exist.  Raises DataError if it is damaged."""
    path = chunk_path(directory, number)
    record = read_stage(path, ChunkRecord, [".text", *(f".{name}.npy" for name in SHAPES)])
    if record is None:
        return None
    count = record.documents
    for name, shape in SHAPES.items():
        array = open_array(path.with_suffix(f".{name}.npy"), np.uint64, *shape(count))
        if name in ("exact", "bands") and not (array[-1] < count).all():
            raise damaged_stage(path.with_suffix(f".{name}.npy"), f"it is of more than {count:,} documents")
    try:
        for text in texts_of_chunk(directory, number, range(count)):
            text.decode()
    except ValueError as error:
        raise damaged_stage(path.with_suffix(".text"), f"{error!s:.200}") from None
    return record


def map_array(directory: Path, number: int, name: str) -> np.ndarray:
    return open_memmap(chunk_path(directory, number).with_suffix(f".{name}.npy"), mode="r")


def texts_of_chunk(directory: Path, number: int, documents: Iterable[int]) -> Iterator[bytes]:
    """Texts of a chunk's documents, given their indices in it."""
    ends = map_array(directory, number, "ends")
    with open(chunk_path(directory, number).with_suffix(".text"), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for document in documents:
            start, end = int(ends[document]), int(ends[document + 1])
            if not start <= end <= size:
                raise ValueError(f"its document {document} ends at {end:,}")
            file.seek(start)
            yield file.read(end - start)
