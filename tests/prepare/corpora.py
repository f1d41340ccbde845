"""Documents to prepare, and what is read back."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from spmd_lm.data.token_files.shard import open_shard
from spmd_lm.prepare.pipeline import prepare
from spmd_lm.prepare.schema import Preparation
from tests.data.token_files.conftest import read_documents

WORDS = [f"w{i}" for i in range(20_000)]


def sentence(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def write_lines(path: Path, values: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def write_parquet(path: Path, columns: dict[str, list], compression: str = "uncompressed") -> str:
    from arro3.core import Array, DataType, Table
    from arro3.io import write_parquet as write

    table = Table.from_pydict({name: Array(values, DataType.string()) for name, values in columns.items()})
    write(table, str(path), compression=compression)
    return str(path)


def make(out: Path, sources: Any, **keys: Any) -> dict[str, Any]:
    """The report of one data set; no validation split, unless keys say so."""
    sources = sources if isinstance(sources, list) else [str(sources)]
    defaults = {"split": {"validation": 0.0}, "workers": 1}
    return prepare(Preparation.model_validate({"sources": sources, "out": str(out), **defaults, **keys}), no_log)


def no_log(line: str) -> None:
    pass


def texts(out: Path, split: str = "train") -> list[str]:
    """Documents of a data set of bytes; NUL ends each."""
    return [bytes(ids[:-1].astype(np.uint8)).decode() for ids in id_arrays(out, split)]


def id_arrays(out: Path, split: str = "train") -> list[np.ndarray]:
    manifest = json.loads((out / "manifest.json").read_text())
    return [ids for name in manifest["splits"][split]["shards"] for ids in read_documents(open_shard(out / name))]


def step(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in report["steps"] if each["name"] == name]
    return found


def contents(out: Path) -> dict[str, bytes]:
    """Contents of all files but the one that has times."""
    found = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != "report.json"]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in found}
