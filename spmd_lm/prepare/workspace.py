"""A data set's two directories: OUT, and OUT.partial beside it, for files needed only until OUT is finished.

OUT.partial records its configuration; OUT is finished once it has a manifest.  Foreign files are left alone."""

import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from spmd_lm import files
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.data.token_files.dataset import FORMAT, MANIFEST, check_files
from spmd_lm.errors import ConfigError
from spmd_lm.runtime.outputs import writing

REPORT, IDENTITY = "report.json", "identity.json"
NO_DATA = {"on_bad"}  # keys that do not affect the data
TRACES = {".lock", f"{IDENTITY}.tmp"}  # left by a start that was killed at once


class Workspace:
    def __init__(self, out: Path):
        self.out = Path(os.path.abspath(out))
        if not self.out.name:
            raise ConfigError(f"out={out}: has no name. Choose another out.")
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.read, self.tokens = self.partial / "read", self.partial / "tokens"

    def finished(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The manifest of this data set, or None if unfinished.  Raises ConfigError if OUT is another data set, or
        something else; DataError if it is damaged."""
        if os.path.lexists(self.out) and not self.out.is_dir():
            raise ConfigError(f"out={self.out}: exists and is not a directory. Choose another name.")
        manifest = read_object(self.out / MANIFEST)
        if manifest is None:
            return None
        if manifest.get("format") != FORMAT:
            raise ConfigError(f"out={self.out}: its {MANIFEST} is not one of ours. Choose another out.")
        made_of = {"config": manifest.get("config"), "sha256": manifest.get("sha256", {})}
        if found := differing(made_of, {key: identity[key] for key in made_of}).removeprefix("config."):
            what = f"a data set that was made with a different value of {found}"
            raise ConfigError(f"out={self.out}: {what}. Remove this directory, or choose another out.")
        if identity["tokenizer"] not in (None, manifest.get("tokenizer")):
            what = "a data set of another vocabulary"
            raise ConfigError(f"out={self.out}: {what}. Remove this directory, or choose another out.")
        check_files(self.out)
        if read_object(self.partial / IDENTITY) is not None:  # a former start was stopped before removing it
            self._remove_partial()
        return manifest

    def begin(self, identity: dict[str, Any]) -> None:
        """Makes both directories, or continues in them.  Raises ConfigError if they are not this data set's."""
        found = read_object(self.partial / IDENTITY)
        if found is None:
            for directory, ours in ((self.partial, TRACES), (self.out, set[str]())):
                others = sorted(set(os.listdir(directory)) - ours) if directory.is_dir() else []
                if others:
                    what = f"{directory}: exists and is not a data set that was begun (it contains {others[0]})"
                    raise ConfigError(f"{what}. Nothing is overwritten; choose another out.")
        elif key := differing(found, identity):
            what = f"{self.partial}: begun with a different value of {key}"
            raise ConfigError(
                f"{what}. Go on with that one, remove the directory and {self.out}, or choose another out."
            )
        with writing(self.partial / IDENTITY):
            if found is None:
                files.write_atomically(self.partial / IDENTITY, json.dumps(identity))  # from here on it is ours
            for directory in (self.read, self.tokens, self.out):
                directory.mkdir(parents=True, exist_ok=True)

    def finish(self, manifest: dict[str, Any], report: dict[str, Any]) -> None:
        """Writes the manifest last, which finishes the data set."""
        for name, value in ((REPORT, report), (MANIFEST, manifest)):
            with writing(self.out / name):
                files.write_atomically(self.out / name, json.dumps(value, indent=1) + "\n")
        self._remove_partial()

    def discard(self) -> None:
        """Removes both directories before there are any shards: their contents are useless."""
        shutil.rmtree(self.out / TOKENIZER_DIR, ignore_errors=True)
        with suppress(OSError):
            self.out.rmdir()
        self._remove_partial()

    def _remove_partial(self) -> None:
        """Removes files in an order in which an interruption leaves no valid partial stage: records before their files,
        the identity last, and directories renamed before they are emptied."""
        for path in sorted(self.partial.iterdir(), key=removal_order):
            if path in (self.read, self.tokens):
                path = path.rename(path.with_name(f"removed-{path.name}-{secrets.token_hex(4)}"))
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != IDENTITY:
                path.unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)


def removal_order(path: Path) -> tuple[bool, bool]:
    """Sort key: records before their files."""
    return path.is_dir(), path.suffix != ".json"


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file."""
    try:
        value = files.parse_json(files.read_bytes(path, files.MAX_MODEL_FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Choose another out.") from None
    return value if isinstance(value, dict) else {}


def differing(found: Any, wanted: dict[str, Any], prefix: str = "") -> str:
    """The first key in which they differ, except NO_DATA; '' if none."""
    if not isinstance(found, dict):
        return prefix.rstrip(".") or "configuration"
    for key in sorted((found.keys() | wanted.keys()) - NO_DATA):
        ours, theirs = wanted.get(key), found.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            if inner := differing(theirs, ours, f"{prefix}{key}."):
                return inner
        elif ours != theirs:
            return f"{prefix}{key}"
    return ""
