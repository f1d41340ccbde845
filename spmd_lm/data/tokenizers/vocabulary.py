"""The files of a vocabulary: where to find them, how to read them, and the copy that a run keeps."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from spmd_lm.config.load import VOCABULARY_FILES
from spmd_lm.errors import DataError

# Files that are copied along with a vocabulary, unchanged.
COMPANION_FILES = ("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json")
COMPANION_FILES += ("tokenizer.model", "generation_config.json")


def find_vocabulary(name: str) -> Path:
    """The vocabulary file that data.tokenizer=name refers to."""
    path, where = Path(name).expanduser(), f"data.tokenizer={name}"
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        missing = f"no such file or directory (working directory {Path.cwd()})"
        problem, kinds = "not a regular file" if path.exists() else missing, ", a ".join(VOCABULARY_FILES)
        raise DataError(f"{where}: {problem}. Give the path of a {kinds}, or of their directory, or `bytes`.")
    for file in VOCABULARY_FILES:
        if os.path.isfile(path / file):
            return path / file
    raise DataError(f"{where}: this directory has no {', '.join(VOCABULARY_FILES)}. Name one that has, or `bytes`.")


def copy_vocabulary(name: str, directory: Path) -> None:
    """Copies the files that data.tokenizer=name refers to into `directory`, under the standard names.

    The vocabulary itself, which must be valid, comes last: it exists only once the copy is complete."""
    vocabulary = find_vocabulary(name)
    source = vocabulary.parent
    if os.path.isdir(Path(name).expanduser()):
        vocabularies = {file: source / file for file in VOCABULARY_FILES}
    else:
        vocabularies = {standard_name(vocabulary): vocabulary}
    directory.mkdir(exist_ok=True)
    for file, path in ({file: source / file for file in COMPANION_FILES} | vocabularies).items():
        if os.path.isfile(path):
            temporary = directory / f".{file}"
            shutil.copyfile(path, temporary)
            os.replace(temporary, directory / file)


def standard_name(vocabulary: Path) -> str:
    """The one of VOCABULARY_FILES whose format a file has."""
    if vocabulary.suffix == ".txt":
        return "vocab.txt"
    # `model` may be a token of a vocab.json, as in GPT-2's.
    return "tokenizer.json" if isinstance(read_json(vocabulary).get("model"), dict) else "vocab.json"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}. Fix it, or download the file again.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(content).__name__}. Download the file again.")
    return content


def read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8. Download the file again.") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. A vocab.json needs its merges.txt beside it.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Fix its permissions.") from None
