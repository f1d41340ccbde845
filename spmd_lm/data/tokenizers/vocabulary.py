"""The files of a vocabulary: where to find them, and the copy that a run keeps."""

import json
import os
import shutil
from pathlib import Path

from spmd_lm.config.load import VOCABULARIES
from spmd_lm.errors import DataError

COMPANION_FILES = (
    "tokenizer_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "generation_config.json",
)
"""Files that are copied along with a vocabulary, unchanged."""


def find_vocabulary(name: str) -> Path:
    """The vocabulary file that data.tokenizer=name refers to."""
    path, where = Path(name).expanduser(), f"data.tokenizer={name}"
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        missing = f"no such file or directory (working directory {Path.cwd()})"
        problem, kinds = "not a regular file" if path.exists() else missing, ", a ".join(VOCABULARIES)
        raise DataError(f"{where}: {problem}. Give the path of a {kinds}, or of their directory, or `bytes`.")
    for file in VOCABULARIES:
        if os.path.isfile(path / file):
            return path / file
    raise DataError(f"{where}: this directory has no {', '.join(VOCABULARIES)}. Name one that has, or `bytes`.")


def copy_vocabulary(name: str, directory: Path) -> None:
    """Copies the files that data.tokenizer=name refers to into `directory`, under the standard names.

    The vocabulary itself, which must be valid, comes last: it exists only once the copy is complete."""
    vocabulary = find_vocabulary(name)
    source = vocabulary.parent
    if os.path.isdir(Path(name).expanduser()):
        vocabularies = {file: source / file for file in VOCABULARIES}
    else:
        vocabularies = {_standard_name(vocabulary): vocabulary}
    directory.mkdir(exist_ok=True)
    for file, path in ({file: source / file for file in COMPANION_FILES} | vocabularies).items():
        if os.path.isfile(path):
            temporary = directory / f".{file}"
            shutil.copyfile(path, temporary)
            os.replace(temporary, directory / file)


def _standard_name(vocabulary: Path) -> str:
    """The name that Hugging Face gives to a file of this format."""
    if vocabulary.suffix == ".txt":
        return "vocab.txt"
    return "tokenizer.json" if isinstance(json.loads(vocabulary.read_bytes()).get("model"), dict) else "vocab.json"
