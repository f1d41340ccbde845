"""The files of a vocabulary: where they are found, and the copy that a run keeps of them."""

import json
import os
import shutil
from pathlib import Path

from spmd_lm.config.load import VOCABULARY_FILES
from spmd_lm.errors import DataError

BESIDE = (
    "tokenizer_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "generation_config.json",
)
"""What travels with them, as it is."""


def find(name: str) -> Path:
    """The file that data.tokenizer=name stands for."""
    path, where = Path(name).expanduser(), f"data.tokenizer={name}"
    if os.path.isfile(path):
        return path
    what = ", a ".join(VOCABULARY_FILES)
    if not os.path.isdir(path):
        how = "not a regular file" if path.exists() else f"no such file or directory (looked from {Path.cwd()})"
        raise DataError(f"{where}: {how}. Give the path of a {what}, or of their directory, or `bytes`.")
    for file in VOCABULARY_FILES:
        if os.path.isfile(path / file):
            return path / file
    raise DataError(f"{where}: this directory has no {', '.join(VOCABULARY_FILES)}. Name one that has, or `bytes`.")


def keep(name: str, directory: Path) -> None:
    """Copies what data.tokenizer=name stands for into `directory`, where it is found again under the usual names; the
    vocabulary itself last, so that it is there whole or not at all.  It has been read before, and is sound."""
    path, source = find(name), Path(name).expanduser()
    if os.path.isdir(source):
        beside, usual = source, {file: source / file for file in VOCABULARY_FILES}
    else:
        whole = path.suffix != ".txt" and isinstance(json.loads(path.read_bytes()).get("model"), dict)
        called = "vocab.txt" if path.suffix == ".txt" else "tokenizer.json" if whole else "vocab.json"
        beside, usual = path.parent, {called: path}
    directory.mkdir(exist_ok=True)
    for file, found in ({file: beside / file for file in BESIDE} | usual).items():
        if os.path.isfile(found):
            part = directory / f".{file}"
            shutil.copyfile(found, part)
            os.replace(part, directory / file)
