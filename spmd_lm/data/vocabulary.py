"""The files of a vocabulary: where they are found, and the copy that a run keeps of them."""

import json
import shutil
from pathlib import Path

from spmd_lm.errors import DataError

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Of a directory's files the first of these is read."""

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
    if path.is_file():
        return path
    what = ", a ".join(VOCABULARIES)
    if not path.is_dir():
        how = "not a regular file" if path.exists() else f"no such file or directory (looked from {Path.cwd()})"
        raise DataError(f"{where}: {how}. Give the path of a {what}, or of their directory, or `bytes`.")
    for file in VOCABULARIES:
        if (path / file).is_file():
            return path / file
    raise DataError(f"{where}: this directory has no {', '.join(VOCABULARIES)}. Name one that has, or `bytes`.")


def keep(name: str, directory: Path) -> None:
    """Copies what data.tokenizer=name stands for into `directory`, where it is found again under the usual names.  The
    vocabulary has been read before, and is sound."""
    path = find(name)
    source = Path(name).expanduser()
    if source.is_dir():
        for file in (*VOCABULARIES, *BESIDE):
            if (source / file).is_file():
                shutil.copyfile(source / file, directory / file)
        return
    whole = path.suffix != ".txt" and isinstance(json.loads(path.read_bytes()).get("model"), dict)
    usual = "vocab.txt" if path.suffix == ".txt" else "tokenizer.json" if whole else "vocab.json"
    shutil.copyfile(path, directory / usual)
    for file in BESIDE:
        if path.with_name(file).is_file():
            shutil.copyfile(path.with_name(file), directory / file)
