"""The split of each text, determined by its digest so that splits have the requested shares of the text.

In the order of digests, the first documents are for validation and the last ones for tests, as many as data/held_out.py
counts.  If a long one is divided, its end is for validation, or its beginning for tests.  Equal texts are one document
here, so no two splits share one."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from spmd_lm.data.held_out import count_held_out, place_to_cut
from spmd_lm.prepare.chunks import map_array
from spmd_lm.prepare.duplicates import USED, CleanedChunks
from spmd_lm.prepare.schema import SplitShares

SPLITS = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)


class Bound(NamedTuple):
    digest: int  # digest of the first document, towards training, that is not wholly held out
    size: int  # bytes of that document that are held out


class Part(NamedTuple):
    document: int
    split: int  # index in SPLITS
    text: bytes


class Splits(NamedTuple):
    validation: Bound
    test: Bound

    def training(self, digests: np.ndarray) -> np.ndarray:
        """Mask of texts with a part in training, bool [texts].  digests: uint64 [texts]."""
        return (digests >= np.uint64(self.validation.digest)) & (digests <= np.uint64(self.test.digest))

    def divide(self, document: int, digest: int, text: bytes) -> Iterator[Part]:
        """The parts of a text, in order: one, unless its digest is at a bound."""
        if digest < self.validation.digest or digest > self.test.digest:
            yield Part(document, VALIDATION if digest < self.validation.digest else TEST, text)
            return
        start = place_to_cut(text, self.test.size) if digest == self.test.digest else 0
        size = self.validation.size if digest == self.validation.digest else 0
        end = max(start, place_to_cut(text, len(text) - size))
        for split, part in ((TEST, text[:start]), (TRAIN, text[start:end]), (VALIDATION, text[end:])):
            if part:
                yield Part(document, split, part)


def choose_splits(digests: np.ndarray, sizes: np.ndarray, shares: SplitShares) -> Splits:
    """The splits of one or more texts, in any order.  digests: uint64 [texts].  sizes: bytes [texts]."""
    digests, groups, copies = np.unique(digests, return_inverse=True, return_counts=True)
    sizes = np.bincount(groups, sizes)
    draws = (digests >> np.uint64(11)) * 2.0**-53

    def bound(draws: np.ndarray, share: float, other: float, step: int) -> Bound:
        count, size = count_held_out(draws, sizes[::step], share, other)
        return Bound(int(digests[::step][count]), -(-size // int(copies[::step][count])))

    return Splits(
        bound(draws, shares.validation, shares.test, 1), bound(1 - draws[::-1], shares.test, shares.validation, -1)
    )


def split_corpus(corpus: CleanedChunks, labels: np.ndarray, shares: SplitShares) -> Splits:
    """The splits of the USED documents; there must be one.  labels: uint8 [documents]."""
    used = [labels[base:end] == USED for base, end in itertools.pairwise(corpus.bases.tolist())]

    def gather(values: Callable[[int], np.ndarray]) -> np.ndarray:
        return np.concatenate([values(chunk)[used[chunk]] for chunk in range(len(used))])

    digests = gather(lambda chunk: map_array(corpus.directory, chunk, "digests")[:, 0])
    return choose_splits(digests, gather(lambda chunk: np.diff(map_array(corpus.directory, chunk, "ends"))), shares)
