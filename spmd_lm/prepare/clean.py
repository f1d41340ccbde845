"""Turns a raw document into a text, or into the reason why it is not one.

Texts are UTF-8 without a byte order mark, and lines end in a line feed alone.  Bad input is no text at all; the steps
remove texts that are not wanted."""

import functools
import hashlib
import importlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from spmd_lm import files
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.prepare import shingles
from spmd_lm.prepare.schema import CleaningSteps, Preparation, Source
from spmd_lm.prepare.sources import RawDocument, missing_text

LONG_LINE = 2**20  # bytes: values parsed from shorter lines cannot take much memory
SPACES = bytes.maketrans(b"\t\n\v\f\r", b" " * 5)
CONTROL = re.compile(r"[^\t\n\r -~]")
UNUSED = "empty"  # the reason for dropping a document that is not bad


class BadInputError(ValueError):
    """A bad document.  The message is the reason, the same for all of a kind; `detail` says more."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.detail = detail


class Verdict(NamedTuple):
    text: str
    step: str = ""  # the step that removed the document, or ''
    reason: str = ""  # why it was removed or repaired


def examine(raw: RawDocument, config: Preparation, leaks: Path | None) -> Verdict:
    """Runs the steps that need only one document.  leaks: the file of hashed n-grams.  Raises BadInputError."""
    text, title, repaired = read_text(raw, config)
    steps = config.steps
    if not text:
        return Verdict("", "read", UNUSED)
    if steps.language and not call_hook(steps.language, text, raw.where):
        return Verdict("", "language", "refused")
    if steps.leaks and steps.leaks.titles and title and fold(title) in read_titles(steps.leaks.titles)[0]:
        return Verdict("", "leaks", "title")
    if steps.leaks and leaks and has_leak(text, leaks, steps.leaks.ngram):
        return Verdict("", "leaks", f"{steps.leaks.ngram}-gram")
    return Verdict(text, "", "repaired" if repaired else "")


def read_text(raw: RawDocument, config: Preparation) -> tuple[str, str | None, bool]:
    """Text, title, and True if the text was repaired."""
    if raw.problem:
        reason, _, detail = raw.problem.partition(": ")
        raise BadInputError(reason, detail)
    repaired = False
    try:
        text = raw.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if config.steps.utf8 != "repair":
            raise BadInputError("not UTF-8", f"byte 0x{raw.data[error.start]:02x} at {error.start}") from None
        text, repaired = misread(raw.data), True
    title = raw.title
    if raw.is_json:
        text, title = read_json_line(text, raw, config.sources[raw.source])
    if config.steps.utf8 == "repair":
        given, text = text, repair(text)
        repaired |= text != given
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        raise BadInputError("a NUL character", "it separates documents of bytes")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInputError("not UTF-8", "half of a surrogate pair") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    return text if text.strip() else "", title, repaired


def read_json_line(line: str, raw: RawDocument, source: Source) -> tuple[str, str | None]:
    if not line.strip():
        return "", None
    try:
        value = files.parse_json(line.encode()) if len(line) > LONG_LINE else json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError("not JSON", f"{error!s:.80}") from None
    if not isinstance(value, dict):
        raise BadInputError("not a JSON object")
    text, title = value.get(source.text), value.get(source.title)
    if not isinstance(text, str):
        raise BadInputError(f"no text under '{source.text}'", missing_text(source, value))
    return text, title if isinstance(title, str) else None


def repair(text: str) -> str:
    """Undoes wrong decoding of UTF-8, and drops control characters and halves of surrogate pairs."""
    if text.isascii() and not CONTROL.search(text):  # a fast path
        return text
    ftfy = require_ftfy()
    # Repairs encodings alone: quotation marks, ligatures and HTML are the author's.
    options = {"uncurl_quotes": False, "unescape_html": False, "fix_latin_ligatures": False}
    config = ftfy.TextFixerConfig(fix_character_width=False, fix_line_breaks=False, normalization=None, **options)
    return ftfy.fix_text(text, config)


def misread(data: bytes) -> str:
    """Decodes bytes with some invalid UTF-8 as Windows-1252, in which the invalid bytes are characters; `repair` fixes
    the others."""
    require_ftfy()
    return data.decode("sloppy-windows-1252")


def require_ftfy() -> Any:
    try:
        import ftfy
        import ftfy.bad_codecs
    except ImportError:
        advice = "Run pip install 'spmd-lm[prepare]', or set steps.utf8=refuse"
        raise ConfigError(f"steps.utf8=repair: ftfy is not installed. {advice}.") from None
    return ftfy


@functools.cache
def load_hook(path: str) -> Callable[[str], Any]:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        advice = "Put its directory on PYTHONPATH, as in PYTHONPATH=. for this one"
        raise ConfigError(f"steps.language={path}: cannot be imported: {error!s:.200}. {advice}.") from None


def call_hook(path: str, text: str, where: str) -> bool:
    hook = load_hook(path)
    try:
        return bool(hook(text))
    except Exception as error:
        what = f"{type(error).__name__}: {error!s:.200}"
        raise DataError(f"{where}: steps.language={path} raised {what}. Mend it, or leave it out.") from error


def fold(title: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", title).casefold().split())


@functools.cache
def read_titles(path: str) -> tuple[frozenset[str], str]:
    """Folded titles, and the SHA-256 of the file."""
    try:
        data = files.read_bytes(Path(path).expanduser(), files.MAX_MODEL_FILE)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"steps.leaks.titles={path}: cannot be read: {reason}. Give a file of titles.") from None
    return frozenset(filter(None, map(fold, text.splitlines()))), hashlib.sha256(data).hexdigest()


@functools.cache
def load_leaks(path: Path) -> np.ndarray:
    """A memory map, shared by all processes."""
    return open_memmap(path, mode="r")


def leak_hashes(documents: Iterable[RawDocument], ngram: int) -> np.ndarray:
    """Sorted, unique hashes of n-grams in evaluation texts, in JSON all strings.  Raises DataError for bad input."""
    found = [np.empty(0, np.uint64)]
    for raw in documents:
        try:
            if raw.problem:
                raise BadInputError(raw.problem)
            is_line = raw.is_json and raw.data.strip()
            for text in texts_within(files.parse_json(raw.data)) if is_line else [raw.data.decode()]:
                if len(text) >= 2 * ngram - 1:
                    found.append(shingles.distinct(shingles.ngram_hashes(shingles.word_hashes(text), ngram)))
        except (ValueError, RecursionError) as error:
            advice = "Mend it, or leave it out, of a directory by a glob"
            raise DataError(f"{raw.where}: steps.leaks.files: {error!s:.100}. {advice}.") from None
    return shingles.distinct(np.concatenate(found))


def texts_within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_within(each)


def has_leak(text: str, leaks: Path, ngram: int) -> bool:
    known, found = load_leaks(leaks), shingles.ngram_hashes(shingles.word_hashes(text), ngram)
    if not len(known):
        return False
    parts = (found[start : start + shingles.PART] for start in range(0, len(found), shingles.PART))
    return any((known[np.minimum(np.searchsorted(known, part), len(known) - 1)] == part).any() for part in parts)


def check_steps(steps: CleaningSteps) -> None:
    """Raises ConfigError or DataError early, for a missing package, or a file that cannot be read."""
    load_leaks.cache_clear()  # it may hold another data set of this process
    read_titles.cache_clear()
    if steps.utf8 == "repair":
        require_ftfy()
    if steps.language:
        load_hook(steps.language)
    if steps.leaks and steps.leaks.titles:
        read_titles(steps.leaks.titles)


def normalized(text: str) -> bytes:
    """The form that exact duplicates share: Unicode's form C, with single spaces for ASCII white space."""
    text = text if text.isascii() else unicodedata.normalize("NFC", text)
    data = text.encode().translate(SPACES)  # a few copies of the text, which are smaller than a list of words
    while b"  " in data:
        data = data.replace(b"  ", b" ")
    return data.strip()
