"""Time `spmd-lm prepare`, and measure the memory of all its processes: PSS, which counts shared pages once.

    python benchmarks/prepare.py [--megabytes 100] [--workers 2] [--tokenizer FILE]

Generates text of Zipf-distributed words, a twentieth of it near duplicates, and prints a row: MB/s in all and by stage,
MB per CPU second, which other programs do not lengthen, and peak PSS.  With a tokenizer also the speed of its library
alone, on as many threads."""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import children
import numpy as np

WORDS = 50_000
MEAN_WORDS = 350  # per document


def generate(path: Path, megabytes: int) -> None:
    generator, draw = np.random.default_rng(0), random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = np.array(["".join(draw.choices(letters, k=draw.randrange(2, 11))) for _ in range(WORDS)], object)
    shares = 1 / np.arange(3, WORDS + 3)
    cumulative = np.cumsum(shares / shares.sum())
    size, last = 0, None
    with open(path, "w") as file:
        while size < megabytes * 10**6:
            count = max(int(generator.exponential(MEAN_WORDS)), 5)
            text = words[np.minimum(np.searchsorted(cumulative, generator.random(count)), WORDS - 1)]
            if last is not None and draw.random() < 0.05:
                text = np.append(last, "again")
            last = text
            line = json.dumps({"text": " ".join(text)})
            size += len(line) + 1
            file.write(line + "\n")


def pss_of_tree(root: int) -> int:
    """PSS in bytes of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        except OSError:
            pass
    found, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        found += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return found


def measure(directory: Path, megabytes: int, workers: int, tokenizer: str) -> dict:
    steps = {"exact_duplicates": True, "near_duplicates": True, "min_tokens": 32}
    recipe = {"sources": [str(directory / "a.jsonl")], "out": str(directory / "out"), "workers": workers}
    (directory / "r.yaml").write_text(json.dumps({**recipe, "tokenizer": tokenizer, "steps": steps}))
    command = [sys.executable, "-m", "spmd_lm", "prepare", str(directory / "r.yaml")]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=children.environment() | {"OMP_NUM_THREADS": "1"}
    )
    while process.poll() is None:
        peak = max(peak, pss_of_tree(process.pid))
        time.sleep(0.2)
    if process.returncode:
        sys.exit(f"exit code {process.returncode}")
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((directory / "out/report.json").read_text())
    speeds = {name: round(megabytes / max(each, 1e-3), 1) for name, each in report["seconds"].items()}
    return {"megabytes": megabytes, "workers": workers, "MB/s": round(megabytes / seconds, 2), "stages": speeds} | {
        "MB per CPU second": round(megabytes / (used.ru_utime + used.ru_stime), 2),
        "peak PSS MiB": round(peak / 2**20),
        "steps": {step["name"]: step["out"] for step in report["steps"]},
    }


def library_speed(path: Path, tokenizer: str, workers: int) -> float:
    """MB/s of the library alone, in its own threads, on 20 MB of the texts."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from spmd_lm.data.tokenizers.vocabulary import load_vocabulary

    backend, texts, size = load_vocabulary(tokenizer), [], 0
    with open(path) as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size > 20e6:
                break
    start = time.perf_counter()
    for first in range(0, len(texts), 1000):
        backend.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
    return size / 1e6 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokenizer", default="bytes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        generate(directory / "a.jsonl", options.megabytes)
        row = measure(directory, options.megabytes, options.workers, options.tokenizer)
        if options.tokenizer != "bytes":
            row["library MB/s"] = round(library_speed(directory / "a.jsonl", options.tokenizer, options.workers), 2)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
