"""A directory has one run at a time, and whoever comes second learns who is there."""

import errno
import subprocess
import sys

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.runtime import lock
from spmd_lm.runtime.lock import claimed


def silent(line):
    pytest.fail(line)


@pytest.fixture
def neighbour(tmp_path):
    """Another process that holds the directory until it dies."""
    program = "from spmd_lm.runtime.claim import claimed; import pathlib, sys, time\n"
    program += "with claimed(pathlib.Path(sys.argv[1]), print): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path, neighbour):
    who = rf"run\.dir={tmp_path}: process {neighbour.pid} on \S+ is training there"
    with pytest.raises(ConfigError, match=who), claimed(tmp_path, silent):
        pytest.fail("two at once")
    neighbour.kill()
    neighbour.wait()
    with claimed(tmp_path, silent):
        pass


def test_a_claim_ends_with_its_block(tmp_path):
    for _ in range(2):
        with claimed(tmp_path, silent):
            pass


def test_what_was_made_for_a_claim_goes_with_it(tmp_path):
    directory = tmp_path / "runs" / "new"
    with claimed(directory, silent):
        assert (directory / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    with claimed(directory, silent):
        (directory / "config.yaml").write_text("")
    assert [path.name for path in directory.iterdir()] == ["config.yaml"]


def test_a_lock_on_a_file_that_its_holder_took_away_is_none(tmp_path, monkeypatch):
    flock = lock.fcntl.flock

    def late(file, how):  # between our opening the file and our locking it, its holder ends and removes it
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        (tmp_path / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    with (
        claimed(tmp_path, silent),
        pytest.raises(ConfigError, match="is training there"),
        claimed(tmp_path, silent),
    ):
        pytest.fail("two at once")


def test_only_the_first_process_of_a_job_locks(tmp_path, monkeypatch):
    with claimed(tmp_path, silent):
        monkeypatch.setattr(lock.jax, "process_index", lambda: 1)
        with claimed(tmp_path, silent):
            pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    told = []
    with claimed(tmp_path, told.append):
        (line,) = told
    assert "cannot be locked (No locks available)" in line
