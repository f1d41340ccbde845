"""A restart takes compiled programs from disk, and never one that has changed."""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache as jax_cache

from spmd_lm.runtime import compilation_cache
from spmd_lm.runtime.compilation_cache import DIGEST_BYTES, VerifiedCache, default_directory, use_compilation_cache
from tests import processes


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_an_entry_with_a_flipped_bit_is_none(tmp_path):
    cache, rng, program = VerifiedCache(tmp_path), random.Random(0), random.Random(1).randbytes(5000)
    assert cache.get("key") is None
    for _ in range(50):
        cache.put("key", program)
        assert cache.get("key") == program
        (entry,) = tmp_path.iterdir()
        assert entry.stat().st_mode & 0o777 == 0o600
        flip_a_bit(entry, rng)
        assert cache.get("key") is None and not entry.exists()
    cache.put("key", program)
    os.truncate(next(tmp_path.iterdir()), 20)
    assert cache.get("key") is None


def test_a_damaged_entry_that_cannot_be_deleted_is_none_either(tmp_path, monkeypatch):
    cache = VerifiedCache(tmp_path)
    cache.put("key", bytes(100))
    flip_a_bit(next(tmp_path.iterdir()), random.Random(0))

    def unlink(*_, **__):
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", unlink)
    assert cache.get("key") is None


def test_the_least_recently_used_entries_go(tmp_path):
    cache = VerifiedCache(tmp_path, max_bytes=3 * 132)
    for number, key in enumerate("abc"):
        cache.put(key, bytes(100))
        os.utime(next(path for path in tmp_path.iterdir() if path.stat().st_mtime > 1000), (number, number))
    assert cache.get("a")
    cache.put("d", bytes(100))
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]


def test_another_processor_has_entries_of_its_own(tmp_path, monkeypatch):
    VerifiedCache(tmp_path).put("key", b"program")
    monkeypatch.setattr(compilation_cache, "machine", lambda: "another one")
    assert VerifiedCache(tmp_path).get("key") is None


def test_a_directory_that_others_can_write_to_is_not_used(tmp_path, monkeypatch):
    installed, lines = [], []
    monkeypatch.setattr(compilation_cache, "install", installed.append)
    tmp_path.chmod(0o777)
    use_compilation_cache(str(tmp_path), lines.append)
    use_compilation_cache(str(tmp_path / "below"), lines.append)  # which they could replace
    assert "other users can write" in lines.pop()
    tmp_path.chmod(0o700)
    (tmp_path / "file").touch()
    use_compilation_cache(str(tmp_path / "file"), lines.append)
    assert not installed and "other users can write" in lines[0] and "Compiling without it" in lines[1]
    use_compilation_cache("none", lines.append)
    use_compilation_cache("auto", lines.append)  # the suite has set up jax's own
    assert not installed and len(lines) == 2
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    use_compilation_cache("auto", lines.append)
    assert [cache.directory for cache in installed] == [default_directory()]
    assert default_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-has-this-name/cache")  # as ~ without a home directory
    use_compilation_cache("auto", lines.append)
    assert len(installed) == 1 and "Compiling without it" in lines[2]


def test_a_later_run_without_a_cache_has_none(tmp_path, monkeypatch):
    before = jax_cache.get_file_cache
    monkeypatch.setattr(jax_cache, "get_file_cache", before)
    monkeypatch.setattr(jax_cache, "reset_cache", lambda: None)
    directory = jax.config.jax_compilation_cache_dir
    try:
        for _ in range(2):
            compilation_cache.install(VerifiedCache(tmp_path))
        assert jax_cache.get_file_cache is not before and jax.config.jax_compilation_cache_dir == str(tmp_path)
        use_compilation_cache("none", print)
        assert jax_cache.get_file_cache is before and jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)


@pytest.mark.slow
def test_a_damaged_cache_changes_no_loss(tmp_path):
    cache, rng = tmp_path / "cache", random.Random(0)
    small = ["model.layers=4", "model.scan=false", "train.steps=2", "train.log_every=1", "checkpoint.every=0"]

    def losses(name: str) -> list[float]:
        overrides = [*small, f"run.dir={tmp_path / name}", f"run.compilation_cache={cache}"]
        line = [sys.executable, "-m", "spmd_lm", "train", "configs/debug.yaml", "--devices", "8", *overrides]
        done = processes.finish(line, cwd=processes.ROOT)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    cold = losses("cold")
    entries = {path: path.stat().st_ino for path in cache.iterdir()}
    assert entries
    assert losses("warm") == cold
    assert {path: path.stat().st_ino for path in cache.iterdir()} == entries  # nothing was compiled
    for path in entries:
        flip_a_bit(path, rng)
    assert losses("damaged") == cold
    for path in entries:  # compiled again
        content = path.read_bytes()
        assert hashlib.sha256(content[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]
