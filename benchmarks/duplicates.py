"""Time near-duplicate removal against datasketch in its plainest use, on generated documents.

    pip install datasketch
    python benchmarks/duplicates.py [--documents 100000]

Every tenth document is an earlier one with a word changed.  spmd-lm reads the documents from a file, compares MinHash's
candidates exactly, and writes the remaining documents as a data set; datasketch has them in memory, and trusts MinHash:
one signature per document, then a query and, unless it finds one, an insertion."""

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path

from spmd_lm.prepare.pipeline import prepare
from spmd_lm.prepare.schema import Preparation

WORDS = [f"w{i}" for i in range(30_000)]
THRESHOLD, SHINGLE = 0.7, 3


def generate(count: int) -> tuple[list[str], set[int]]:
    """Texts of 40 to 200 words, and the indices of texts that resemble an earlier one."""
    draw, texts, copies = random.Random(0), list[str](), set[int]()
    for i in range(count):
        if i % 10 == 9:
            words = texts[draw.randrange(i)].split()
            words[draw.randrange(len(words))] = draw.choice(WORDS)
            copies.add(i)
        else:
            words = draw.choices(WORDS, k=draw.randint(40, 200))
        texts.append(" ".join(words))
    return texts, copies


def by_spmd_lm(texts: list[str], directory: Path) -> int:
    """Number of documents removed."""
    file = directory / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    keys = {"steps": {"near_duplicates": {"jaccard": THRESHOLD}}, "split": {"validation": 0.0}, "workers": 1}
    config = Preparation.model_validate({"sources": [str(file)], "out": str(directory / "out"), **keys})
    steps = {each["name"]: each for each in prepare(config, lambda line: None)["steps"]}
    return steps["near_duplicates"]["in"] - steps["near_duplicates"]["out"]


def by_datasketch(texts: list[str]) -> int:
    from datasketch import MinHash, MinHashLSH

    index, removed = MinHashLSH(threshold=THRESHOLD, num_perm=128), 0
    for i, text in enumerate(texts):
        words = re.findall(r"\w+", text.lower())
        signature = MinHash(num_perm=128)
        signature.update_batch([" ".join(words[k : k + SHINGLE]).encode() for k in range(len(words) - SHINGLE + 1)])
        if index.query(signature):
            removed += 1
        else:
            index.insert(i, signature)
    return removed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    args = parser.parse_args()
    texts, copies = generate(args.documents)
    megabytes = sum(map(len, texts)) / 1e6
    print(f"{len(texts):,} documents, {megabytes:.1f} MB, {len(copies):,} of them like an earlier one")
    with tempfile.TemporaryDirectory() as directory:
        removals = {"spmd-lm": lambda: by_spmd_lm(texts, Path(directory)), "datasketch": lambda: by_datasketch(texts)}
        for name, remove in removals.items():
            start = time.process_time()
            removed = remove()
            seconds = time.process_time() - start
            print(f"{name:12s}{len(texts) / seconds:10,.0f} documents/s of a processor, {removed:,} removed")


if __name__ == "__main__":
    main()
