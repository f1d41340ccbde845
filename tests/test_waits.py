"""Tests wait for what processes do, however busy the machine is: seconds are no measure of it."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests import processes

BY_SECONDS = r"timeout=\d|\.wait\(\d|\.join\([1-9]|monotonic\(\) [+<]|< \w*(?:deadline|end)\b"
ALLOWED = {
    "processes.py": 1,  # a moment, after which it looks whether there is progress
    "run_notebooks.py": 1,  # the same
    "mutants.py": 1,  # after which a mutant counts as noticed
    "test_slurm.py": 7,  # SLURM's own waits take no CPU time
    "test_peers.py": 3,  # what docs/reliability.md promises in seconds
    "test_jobs.py": 1,  # the same
    "test_group_store.py": 1,  # between samples of the process's memory
}


def test_no_test_waits_by_seconds():
    found = {
        path.name: re.findall(BY_SECONDS, path.read_text())
        for path in Path(__file__).parent.rglob("*.py")
        if path != Path(__file__)
    }
    assert {name: len(waits) for name, waits in found.items() if waits} == ALLOWED, {
        n: w for n, w in found.items() if w
    }


@pytest.fixture
def clock(monkeypatch):
    """Readings of CPU time and the clock, which a test sets."""
    shown = {"cpu": 5.0, "now": 0.0}
    monkeypatch.setattr(processes, "family", lambda *_: {1: shown["cpu"]})
    monkeypatch.setattr(processes.time, "monotonic", lambda: shown["now"])
    return shown


@pytest.mark.parametrize(
    ("share", "seconds", "problem"),
    [
        (1.0, 1700, ""),
        (0.05, 30_000, ""),  # twenty processes beside it on one core
        (0.0, 100, ""),
        (0.0, 130, "no CPU time for 12"),
        (0.001, 300, "no CPU time for 12"),  # threads that only look whether there is work
        (2.0, 1000, "no end after 180"),
    ],
)
def test_a_process_is_waited_for_as_long_as_it_gets_on(clock, share, seconds, problem):
    progress = processes.Progress(1)
    for clock["now"] in range(2, seconds, 2):
        clock["cpu"] += 2 * share
        if told := progress.problem():
            assert problem and told.startswith(problem)
            return
    assert not problem


BUSY_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('on', flush=True)\\nwhile True: pass"])
child.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux alone tells the times of processes in /proc")
def test_what_a_child_does_is_progress_and_it_is_killed_too():
    process = processes.start_command([sys.executable, "-c", BUSY_CHILD])
    assert process.stdout.readline() == "on\n"
    before = sum(processes.family(process.pid).values())
    processes.wait_until(lambda: sum(processes.family(process.pid).values()) > before + 0.05, process)
    assert len(processes.family(process.pid)) == 2
    processes.kill(process.pid)
    assert processes.communicate(process)[0] == "" and not processes.family(process.pid)


def test_a_process_that_hangs_is_ended_with_what_it_said(monkeypatch):
    monkeypatch.setattr(processes, "STALLED_SECONDS", 0)
    hangs = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]
    waits = {
        "nothing": lambda process: processes.wait_until(lambda: False, process, told=lambda: "nothing"),
        "('', None)": processes.communicate,
    }
    for told, wait in waits.items():
        process = processes.start_command(hangs)
        assert process.stdout.readline() == "here\n"
        with pytest.raises(AssertionError, match=rf"no CPU time for \d+ s: {re.escape(told)}"):
            wait(process)
        assert process.wait() == -signal.SIGKILL
