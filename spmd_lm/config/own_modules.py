"""The user's own modules in a configuration: `path.py:Name`, as in model.module.

Paths are relative to the file that names them, like `base:`.  A loaded path has a hash, `path.py:Name@hash`: a changed
file is another module to a resumed run and to every cache keyed by configuration."""

import ast
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from spmd_lm.addresses import elsewhere
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.files import read_bytes, write_atomically

MODULES_DIR = "modules"  # the copies in a run's directory

MAX_SOURCE_BYTES = 2**20  # per module
HASH_DIGITS = 16  # of a file's SHA-256, in hex


class ModuleRef(NamedTuple):
    """A name in the file at `path`.  hash: of the file's bytes; '' if not known yet."""

    path: str
    name: str
    hash: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        path, _, name = text.rpartition(":")
        return cls(path, *name.split("@"))

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" + (self.hash and f"@{self.hash}")

    def copy_in(self, directory: str | Path) -> Self:
        """The module as copied into a run's directory."""
        return self._replace(path=os.path.join(directory, f"{self.hash}.py"))

    def read(self) -> bytes:
        """The bytes of the file.  Raises ConfigError if it cannot be read or has another hash."""
        try:
            source = read_bytes(Path(self.path), MAX_SOURCE_BYTES)
        except OSError as error:
            advice = "Give the path of a Python file, as in block.py:Name"
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}. {advice}.") from None
        if self.hash not in ("", hash_of(source)):
            problem = f"{self.path} was changed: its hash is {hash_of(source)}, not {self.hash}"
            raise ConfigError(f"{problem}. Bring the file back.")
        return source


def hash_of(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:HASH_DIGITS]


def located(tree: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """The sections of a file in `directory`, with absolute module paths."""
    sections = dict(tree)
    for name, section in tree.items():
        text = section.get("module") if isinstance(section, dict) else None
        if isinstance(text, str) and not elsewhere(text):
            path = os.path.abspath(os.path.join(directory, os.path.expanduser(text)))
            sections[name] = section | {"module": path}
    return sections


def sealed(text: str) -> str:
    """`text` with the hash of its file.  Raises ConfigError for a file that cannot be read, is not Python, lacks the
    name, or has another hash than `text`."""
    ref = ModuleRef.parse(text)
    source = ref.read()
    try:
        names = [*_defined(ast.parse(source, ref.path))]
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = getattr(error, "msg", error)
        raise ConfigError(f"{ref.path}{where} is not Python: {reason}. Correct that file.") from None
    if ref.name not in names:
        raise ConfigError(f"{ref.path} defines no {ref.name}. It defines {', '.join(names) or 'nothing'}.")
    return str(ref._replace(hash=hash_of(source)))


def _defined(tree: ast.Module) -> Iterator[str]:
    """The public names that the body of a file defines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def modules_of(config: RunConfig) -> dict[str, ModuleRef]:
    """The user's modules in a run, by section."""
    texts = {name: getattr(section, "module", None) for name, section in config}
    return {name: ModuleRef.parse(text) for name, text in texts.items() if text}


def keep_copies(config: RunConfig, directory: Path) -> None:
    for ref in modules_of(config).values():
        copy = Path(ref.copy_in(directory / MODULES_DIR).path)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(copy, ref.read())


def as_saved(config: RunConfig) -> RunConfig:
    """`config` with the paths of its modules' copies, relative to the run's directory."""
    changes = {
        name: getattr(config, name).model_copy(update={"module": str(ref.copy_in(MODULES_DIR))})
        for name, ref in modules_of(config).items()
    }
    return config.model_copy(update=changes) if changes else config
