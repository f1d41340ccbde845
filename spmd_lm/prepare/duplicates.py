"""Exact and near duplicates over all chunks, in memory that grows by only some 30 bytes per document.

Every chunk has sorted runs of keys.  One range of keys at a time is gathered from all of them; documents that share a
key are candidates.  Exact duplicates have equal 128-bit hashes.  Near ones are compared shingle by shingle, and joined
by union-find.  The first document of a group stays, even if not all members are near each other, so neither the order
of comparisons nor the worker matters."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spmd_lm.prepare import shingles
from spmd_lm.prepare.chunks import ChunkRecord, map_array, texts_of_chunk
from spmd_lm.prepare.workers import Workers

USED, EXACT, NEAR = 0, 1, 2  # labels of documents

RANGE_KEYS = 2**20  # keys gathered at a time: 16 MB, and as much again to sort them
MOST_NEIGHBOURS = 256  # documents compared with each one, per band: 10,000 may share a template
PAIRS = 512  # pairs that a worker compares at a time
MAX_SHINGLES = 2**22  # shingles that a worker caches: 32 MB


class CleanedChunks(NamedTuple):
    directory: Path
    bases: np.ndarray  # each chunk's first document, numbered among all, and the count of all at the end

    @classmethod
    def of(cls, directory: Path, records: list[ChunkRecord]) -> "CleanedChunks":
        return cls(directory, np.cumsum([0, *(record.documents for record in records)]))

    @property
    def documents(self) -> int:
        return int(self.bases[-1])

    def locate(self, document: int) -> tuple[int, int]:
        """A document's chunk, and its index in it."""
        chunk = int(np.searchsorted(self.bases, document, "right")) - 1
        return chunk, document - int(self.bases[chunk])

    def runs(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yields each chunk's base, and a memory map of its sorted keys with the documents in the last row."""
        for chunk, base in enumerate(self.bases[:-1].tolist()):
            yield base, map_array(self.directory, chunk, name)


def key_ranges(corpus: CleanedChunks, name: str) -> Iterator[np.ndarray]:
    """Yields keys and documents, uint64 [2 or 3, keys], sorted by both; equal keys are in one range."""
    count = sum(run.shape[1] for _, run in corpus.runs(name))
    parts = max(-(-count // RANGE_KEYS), 1)
    bounds = [np.uint64(part * 2**64 // parts) for part in range(parts)]
    for part, low in enumerate(bounds):
        gathered = []
        for base, run in corpus.runs(name):
            start = np.searchsorted(run[0], low)
            end = np.searchsorted(run[0], bounds[part + 1]) if part + 1 < parts else run.shape[1]
            slice_of_run = np.array(run[:, start:end])
            slice_of_run[-1] += np.uint64(base)
            gathered.append(slice_of_run)
        keys = np.concatenate(gathered, axis=1)
        yield keys[:, np.lexsort(keys[::-1])]


def mark_exact(corpus: CleanedChunks, labels: np.ndarray) -> None:
    """Labels exact duplicates.  labels: uint8 [documents], changed in place."""
    for keys in key_ranges(corpus, "exact"):
        same = (keys[:-1, 1:] == keys[:-1, :-1]).all(axis=0)
        labels[keys[-1, 1:][same]] = EXACT


def mark_near(corpus: CleanedChunks, labels: np.ndarray, threshold: float, workers: Workers) -> None:
    """Labels near duplicates among USED documents.  labels: uint8 [documents], changed in place."""
    groups = UnionFind(corpus.documents)
    comparison = Comparison(corpus, threshold)
    for keys in key_ranges(corpus, "bands"):
        keys = keys[:, labels[keys[1]] == USED]
        for apart in range(1, MOST_NEIGHBOURS + 1):
            in_band = keys[0, apart:] == keys[0, :-apart]
            if not in_band.any():
                break
            pairs = np.unique(keys[1, np.stack([np.flatnonzero(in_band), np.flatnonzero(in_band) + apart])], axis=1)
            pairs = pairs.astype(np.int64)
            pairs = pairs[:, groups.find(pairs[0]) != groups.find(pairs[1])]
            batches = [pairs[:, start : start + PAIRS] for start in range(0, pairs.shape[1], PAIRS)]
            for batch, similar in zip(batches, workers.map(comparison, batches), strict=True):
                for first, second in batch[:, similar].T.tolist():
                    groups.union(first, second)
    joined = np.flatnonzero(groups.find(np.arange(corpus.documents)) != np.arange(corpus.documents))
    labels[joined] = NEAR


class UnionFind:
    """Groups of numbers; the root of a group is its least number."""

    def __init__(self, count: int):
        self.parents = np.arange(count)

    def find(self, numbers: np.ndarray) -> np.ndarray:
        roots = self.parents[numbers]
        while ((above := self.parents[roots]) != roots).any():
            roots = above
        self.parents[numbers] = roots
        return roots

    def union(self, a: int, b: int) -> None:
        first, second = sorted(self.find(np.array([a, b])).tolist())
        self.parents[second] = first


@dataclass(frozen=True)
class Comparison:
    """Tests which pairs of documents are more similar than the threshold."""

    corpus: CleanedChunks
    threshold: float

    def __call__(self, pairs: np.ndarray) -> np.ndarray:
        """Tests pairs of document numbers [2, pairs]; returns bool [pairs]."""
        cache = ShingleCache(self.corpus)
        similarities = (shingles.jaccard(cache.load(first), cache.load(second)) for first, second in pairs.T.tolist())
        return np.array([similarity > self.threshold for similarity in similarities], bool)


class ShingleCache:
    """Shingles of documents, least recently used ones evicted."""

    def __init__(self, corpus: CleanedChunks):
        self.corpus, self.sets, self.size = corpus, OrderedDict[int, np.ndarray](), 0

    def load(self, document: int) -> np.ndarray:
        if document not in self.sets:
            chunk, place = self.corpus.locate(document)
            (text,) = texts_of_chunk(self.corpus.directory, chunk, [place])
            self.sets[document] = shingles.shingle_set(text.decode())
            self.size += len(self.sets[document])
        self.sets.move_to_end(document)
        while self.size > MAX_SHINGLES and len(self.sets) > 1:
            self.size -= len(self.sets.popitem(last=False)[1])
        return self.sets[document]


def count_labels(labels: np.ndarray) -> dict[int, int]:
    values, counts = np.unique(labels, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
