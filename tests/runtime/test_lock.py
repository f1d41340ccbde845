"""A directory has one run at a time, and a second one is told who has it."""

import errno
import subprocess
import sys

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.runtime import directories
from spmd_lm.runtime.directories import is_locked, lock_directory, was_killed


def no_log(line):
    pytest.fail(line)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the directory until it dies."""
    program = "from spmd_lm.runtime.directories import lock_directory; import pathlib, sys, time\n"
    program += "with lock_directory(pathlib.Path(sys.argv[1]), print, True): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path, holder):
    who = rf"run\.dir={tmp_path}: process {holder.pid} on \S+ since \S+ is writing there"
    with pytest.raises(ConfigError, match=who), lock_directory(tmp_path, no_log, True):
        pytest.fail("two at once")
    holder.kill()
    holder.wait()
    with lock_directory(tmp_path, no_log, True):
        pass


def test_a_path_in_which_no_checkpoint_could_be_opened_is_refused(tmp_path):
    directory = tmp_path.joinpath(*["x" * 200] * 20)
    with (
        pytest.raises(ConfigError, match=r"its path has 4,\d+ bytes, of at most 3,840"),
        lock_directory(directory, no_log, True),
    ):
        pytest.fail("locked")
    assert not list(tmp_path.iterdir())


def test_the_lock_ends_with_its_block(tmp_path):
    for _ in range(2):
        with lock_directory(tmp_path, no_log, True):
            pass


def test_directories_created_for_the_lock_are_removed_with_it(tmp_path):
    directory = tmp_path / "runs" / "new"
    with lock_directory(directory, no_log, True):
        assert (directory / ".lock").exists()
    assert list(tmp_path.iterdir()) == []
    with lock_directory(directory, no_log, True):
        (directory / "config.yaml").write_text("")
    assert [path.name for path in directory.iterdir()] == ["config.yaml"]


def test_a_lock_on_a_file_that_its_holder_removed_does_not_count(tmp_path, monkeypatch):
    flock = directories.fcntl.flock

    def late_flock(file, how):  # between our open and our lock, the holder ends and removes the file
        monkeypatch.setattr(directories.fcntl, "flock", flock)
        (tmp_path / ".lock").unlink()
        flock(file, how)

    monkeypatch.setattr(directories.fcntl, "flock", late_flock)
    with (
        lock_directory(tmp_path, no_log, True),
        pytest.raises(ConfigError, match="is writing there"),
        lock_directory(tmp_path, no_log, True),
    ):
        pytest.fail("two at once")


def test_only_the_first_process_of_a_job_locks(tmp_path):
    with lock_directory(tmp_path, no_log, True):
        with lock_directory(tmp_path, no_log, False):
            pass
        assert (tmp_path / ".lock").exists()


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directories.fcntl, "flock", flock)
    messages = []
    with lock_directory(tmp_path, messages.append, True):
        (line,) = messages
    assert "cannot be locked (No locks available)" in line


def test_a_full_disk_leaves_the_lock_without_a_name(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spmd_lm.runtime.directories.os.write", fail)
    with lock_directory(tmp_path, no_log, True):
        assert is_locked(tmp_path) and (tmp_path / ".lock").read_text() == ""


def test_a_lock_file_that_no_process_holds_is_of_a_killed_one(tmp_path):
    assert not was_killed(tmp_path)
    with lock_directory(tmp_path, no_log, True):
        assert not was_killed(tmp_path)
        left = (tmp_path / ".lock").read_text()
    assert not was_killed(tmp_path)
    (tmp_path / ".lock").write_text(left)
    assert was_killed(tmp_path)
