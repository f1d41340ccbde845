"""A cache of compiled programs on disk, so that a restart does not compile again.

jax's own cache trusts its directory: it runs whatever it finds there, writes files in place, and does not notice a
flipped bit.  Here an entry is its SHA-256 and the program, written under another name and renamed; a mismatch is
deleted and compiled again.  The directory belongs to this user alone."""

import hashlib
import os
import platform
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from spmd_lm.addresses import user_cache
from spmd_lm.files import require_own

MAX_BYTES = 4 * 2**30  # of all entries; the least recently used are deleted
DIGEST_BYTES = 32
AUTO, NONE = "auto", "none"


def default_directory(name: str = "compilations") -> Path:
    return user_cache() / name


def _expand(path: str) -> Path:
    """Expands ~ to the home directory; without one, a path that raises OSError when written to."""
    with suppress(RuntimeError):
        return Path(path).expanduser()
    return Path("/dev/null", path)


def cache_directory(setting: str, name: str) -> Path | None:
    """The directory for other results of compilations, or None.  setting: run.compilation_cache."""
    if setting == NONE:
        return None
    return default_directory(name) if setting == AUTO else _expand(setting) / name


def use_compilation_cache(setting: str, log: Callable[[str], None]) -> None:
    """Installs the cache.  A directory that cannot be trusted or written is logged and not used.
    setting: run.compilation_cache; `auto` keeps jax's own cache if the user has set it up."""
    if setting == NONE or (setting == AUTO and "JAX_COMPILATION_CACHE_DIR" in os.environ):
        uninstall()
        return
    directory = default_directory() if setting == AUTO else _expand(setting)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(directory)
    except OSError as error:
        log(f"run.compilation_cache={setting}: {directory}: {error.strerror}. Compiling without it.")
        return
    install(VerifiedCache(directory))


def install(cache: "VerifiedCache") -> None:
    """Makes jax use this cache; its public interface takes only a directory (jax 0.10 to 0.12)."""
    import jax

    from spmd_lm.runtime.jax_internals import compilation_cache

    def get_file_cache(path: str) -> tuple[VerifiedCache, str]:
        return cache, path

    original = compilation_cache.get_file_cache
    get_file_cache.replaces = getattr(original, "replaces", original)  # type: ignore[attr-defined]
    compilation_cache.reset_cache()
    compilation_cache.get_file_cache = get_file_cache  # type: ignore[assignment]
    jax.config.update("jax_compilation_cache_dir", str(cache.directory))


def uninstall() -> None:
    """Removes the cache of an earlier run in this process."""
    if "jax" not in sys.modules:
        return
    import jax

    from spmd_lm.runtime.jax_internals import compilation_cache

    if original := getattr(compilation_cache.get_file_cache, "replaces", None):
        compilation_cache.get_file_cache = original
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", None)


class VerifiedCache:
    """jax's CacheInterface.  Errors in reading or writing are misses."""

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES):
        self.directory = self._path = directory
        self._max_bytes = max_bytes
        self._machine = machine()

    def get(self, key: str) -> bytes | None:
        path = self._entry(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, program = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        is_intact = digest == hashlib.sha256(program).digest()
        with suppress(OSError):
            if is_intact:
                os.utime(path)
            else:
                path.unlink()
        return program if is_intact else None

    def put(self, key: str, value: bytes) -> None:
        partial = self.directory / f".{secrets.token_hex(8)}"
        with suppress(OSError):
            try:
                with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(hashlib.sha256(value).digest() + value)
                partial.rename(self._entry(key))
            finally:
                partial.unlink(missing_ok=True)
            self._evict()

    def _entry(self, key: str) -> Path:
        """The entry's path, from the key and the processor's instruction set, which jax's key lacks."""
        return self.directory / hashlib.sha256(f"{self._machine} {key}".encode()).hexdigest()

    def _evict(self) -> None:
        entries = [(path, path.stat()) for path in self.directory.iterdir()]
        entries.sort(key=lambda entry: entry[1].st_mtime)
        total = sum(found.st_size for _, found in entries)
        for path, found in entries:
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= found.st_size


def machine() -> str:
    """The processor's features that matter to compiled code."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    return platform.machine()
