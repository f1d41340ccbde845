"""Trains a tokenizer on the documents of the training split."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spmd_lm.data.tokenizers.training import train_bpe, train_wordpiece
from spmd_lm.data.tokenizers.vocabulary import write_vocabulary
from spmd_lm.prepare.chunks import NothingLeftError, map_array, texts_of_chunk
from spmd_lm.prepare.duplicates import USED, CleanedChunks
from spmd_lm.prepare.schema import TrainedTokenizer
from spmd_lm.prepare.splits import TRAIN, Splits


def train_tokenizer(
    settings: TrainedTokenizer, corpus: CleanedChunks, labels: np.ndarray, splits: Splits, directory: Path
) -> None:
    """Writes tokenizer.json into the directory.  Raises NothingLeftError if there is no text to train on."""

    def texts() -> Iterator[str]:
        return training_texts(corpus, labels, splits, settings.sample_bytes)

    if next(texts(), None) is None:
        raise NothingLeftError(
            "tokenizer: no document is in the training split, to train it on. Lower split.validation and split.test, "
            "or give a vocabulary."
        )
    if settings.train == "bpe":
        trained = train_bpe(settings.vocab_size, texts)
    else:
        trained = train_wordpiece(settings.vocab_size, texts, lowercase=settings.lowercase)
    write_vocabulary(trained.to_str(pretty=True), directory)


def training_texts(corpus: CleanedChunks, labels: np.ndarray, splits: Splits, most: int) -> Iterator[str]:
    """Texts of the training split; if they exceed `most` bytes, the ones with the lowest digests."""
    chosen = []
    for chunk in range(len(corpus.bases) - 1):
        digests = map_array(corpus.directory, chunk, "digests")
        used = np.array(labels[corpus.bases[chunk] : corpus.bases[chunk + 1]] == USED)
        used &= splits.training(digests[:, 0])
        sizes = np.diff(map_array(corpus.directory, chunk, "ends"))
        chosen.append((np.flatnonzero(used), digests[used, 1], sizes[used]))
    order = np.argsort(np.concatenate([digests for _, digests, _ in chosen]), kind="stable")
    sizes = np.cumsum(np.concatenate([sizes for _, _, sizes in chosen])[order])
    taken = np.zeros(len(order), bool)
    taken[order[: max(int(np.searchsorted(sizes, most, "right")), 1)]] = True
    start = 0
    for chunk, (positions, _, _) in enumerate(chosen):
        of_chunk = positions[taken[start : start + len(positions)]]
        start += len(positions)
        digests = map_array(corpus.directory, chunk, "digests")[of_chunk, 0].tolist()
        texts = texts_of_chunk(corpus.directory, chunk, of_chunk.tolist())
        for digest, text in zip(digests, texts, strict=True):
            yield from (part.text.decode() for part in splits.divide(0, digest, text) if part.split == TRAIN)
