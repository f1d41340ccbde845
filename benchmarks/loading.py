"""Time the loader of token ids on disk against a bare reader of random windows from one numpy memory map, and a run's
start on much text against its start on little.

    python benchmarks/loading.py [--megabytes 1000]

Both read the same file, in the page cache, take turns, and return int32 rows.  The loader's rows come in an order drawn
from a seed, are checked against checksums before their first use, and have targets, positions and weights too."""

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.loader import Loader
from spmd_lm.data.token_files.shard import ShardWriter

CONTEXT, BATCH, DOCUMENT = 1024, 64, 1000
SHARD_TOKENS = 2**30  # one shard, so that all readers have the same pages
VOCAB, EOS = 256, 0


def write(root: Path, megabytes: int) -> Path:
    """A data set of random bytes."""
    rng = np.random.default_rng(0)
    splits = {}
    for split, tokens in (("train", megabytes * 500_000), ("validation", 100_000)):
        (root / split).mkdir(parents=True)
        names = [f"{split}/shard-{i:05d}" for i in range(-(-tokens // SHARD_TOKENS))]
        for i, name in enumerate(names):
            writer = ShardWriter(root / name, VOCAB, EOS, "bytes")
            for _ in range(min(SHARD_TOKENS, tokens - i * SHARD_TOKENS) // (DOCUMENT + 1)):
                writer.add(rng.integers(1, VOCAB, DOCUMENT, np.uint16), DOCUMENT)
            writer.finish()
        splits[split] = {"shards": names}
    manifest = {"format": "spmd_lm.tokens", "version": 1, "tokenizer": "bytes", "eos_token_id": EOS, "splits": splits}
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def config(path: Path, verify: str, pack: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"layers": 1, "width": 8, "heads": 1, "context": CONTEXT, "vocab": VOCAB},
            "data": {"source": "tokens", "path": str(path), "verify": verify, "pack": pack},
            "optim": {"lr": 0.1},
            "train": {"steps": 1, "batch": BATCH},
        }
    )


def loader_of(path: Path, verify: str = "touch", pack: bool = False) -> tuple[Loader, str]:
    run = config(path, verify, pack)
    data = load_data(run.data, 0, VOCAB)
    return make_loader(run, data, "training"), data.fingerprint


def time_start(path: Path) -> float:
    """Seconds until the first batch is read."""
    start = time.perf_counter()
    loader_of(path)[0].rows(0, 0, BATCH)
    return time.perf_counter() - start


def bare_reader(path: Path):
    tokens = np.memmap(path / "train/shard-00000.bin", "<u2", "r")
    rng = np.random.default_rng(1)

    def read() -> np.ndarray:
        starts = rng.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        return np.stack([tokens[start : start + CONTEXT + 1] for start in starts]).astype(np.int32)

    return read


def compare(path: Path, rounds: int) -> None:
    bare = bare_reader(path)
    readers: dict[str, Callable[[int], Any]] = {"bare memory map": lambda step: bare()}
    for verify, pack in (("touch", False), ("off", False), ("touch", True)):
        loader, _ = loader_of(path, verify, pack)
        readers[f"loader, verify={verify}{', pack' if pack else ''}"] = functools.partial(
            loader.rows, start=0, stop=BATCH
        )
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for step in range(rounds):
        for name, read in readers.items():
            start = time.perf_counter()
            read(step)
            seconds[name].append(time.perf_counter() - start)
    base = sum(seconds["bare memory map"])
    for name, each in seconds.items():
        rate = BATCH * CONTEXT * rounds / sum(each)
        settled = statistics.median(each[rounds // 2 :])
        print(
            f"{name:28s}{rate / 1e6:8.1f} M tokens/s, {base / sum(each):.2f} of the bare reader's; "
            f"{settled * 1e3:.2f} ms a batch in the second half"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of token ids, two bytes each")
    parser.add_argument("--rounds", type=int, default=4000, help="batches that each reader reads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        small, large = write(Path(directory, "small"), 1), write(Path(directory, "large"), args.megabytes)
        time_start(small)  # imports
        starts = [(time_start(small), time_start(large)) for _ in range(5)]
        little, much = map(statistics.median, zip(*starts, strict=True))
        print(f"start to the first batch: {little:.3f} s on 1 MB, {much:.3f} s on {args.megabytes} MB")
        compare(large, args.rounds)


if __name__ == "__main__":
    main()
