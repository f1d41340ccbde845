"""Data sets of token ids, small and of any shape."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.data.token_files.shard import Shard, ShardWriter


def write_shard(path: Path, documents: Sequence[Sequence[int]], vocab: int = 1000, eos: int | None = 999):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(path, vocab, eos, "bytes")
    for document in documents:
        writer.add(np.array(document), len(document))
    return writer.finish()


def read_documents(shard: Shard) -> Iterator[np.ndarray]:
    """The ids of each document, its end-of-sequence token included."""
    for start, stop in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True):
        yield shard.tokens[start:stop]


def write_dataset(root: Path, splits: dict[str, list[list[list[int]]]], vocab: int = 1000, eos: int | None = 999):
    """splits: of each, documents by shard."""
    manifest = {"format": "spmd_lm.tokens", "version": 1, "tokenizer": "bytes", "eos_token_id": eos, "splits": {}}
    for split, shards in splits.items():
        names = [f"{split}/shard-{i:05d}" for i in range(len(shards))]
        for name, documents in zip(names, shards, strict=True):
            write_shard(root / name, documents, vocab, eos)
        manifest["splits"][split] = {"shards": names}
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


@pytest.fixture
def dataset(tmp_path):
    """Token k is at offset k, but for the separators: three shards, the second one of uneven documents."""
    ids = iter(range(900))

    def documents(*sizes: int) -> list[list[int]]:
        made = []
        for size in sizes:
            made.append([next(ids) for _ in range(size)])
            next(ids)  # the separator's place
        return made

    train = [documents(99, 50, 149), documents(0, 1, 7, 88), documents(199)]
    return write_dataset(tmp_path / "data", {"train": train, "validation": [documents(60, 39)]})
