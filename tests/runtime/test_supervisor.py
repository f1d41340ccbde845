"""A command is started again if its exit code asks for it and it makes progress."""

import json
import os
import signal
import threading

import pytest

from spmd_lm.cli import main
from spmd_lm.commands.supervise import saved_steps
from spmd_lm.errors import Exit
from spmd_lm.runtime import supervisor
from spmd_lm.runtime.supervisor import Supervisor
from tests.processes import handled


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(supervisor, "CHECK_SECONDS", 0.05)


def supervise(directory, script: str, saves: bool = True, attempts: int = 2):
    """Runs `script` with $N, the number of its start; each saves a step, or none.  Its code, starts and messages."""
    starts, messages = directory / "starts", []
    command = ["sh", "-c", f"echo >> {starts}; N=$(wc -l < {starts}); {script}"]

    def count() -> int:
        return len(starts.read_text()) if starts.exists() else 0

    code = Supervisor(command, lambda: count() if saves else 0, attempts, messages.append).run()
    return code, count(), messages


def test_it_starts_again_until_the_end_is_another(tmp_path):
    script = "case $N in 1) exit 8;; 2) kill -9 $$;; 3) exit 3;; 4) exit 7;; esac"
    code, starts, messages = supervise(tmp_path, script)
    assert (code, starts) == (Exit.DONE, 5)
    for message, reason in zip(messages, ("peer", "SIGKILL", "preempted", "hung"), strict=True):
        assert reason in message or "another process" in message


@pytest.mark.parametrize("code", [Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, Exit.NON_FINITE, Exit.INTERRUPTED, 1])
def test_what_would_fail_again_is_not_started_again(tmp_path, code):
    assert supervise(tmp_path, f"exit {int(code)}")[:2] == (code, 1)


def test_what_is_saved_counts_whatever_run_of_a_directory_has_it(tmp_path):
    for number, steps in enumerate((4, None, -1)):
        cell = tmp_path / "cells" / str(number)
        cell.mkdir(parents=True)
        status = {"state": "running", "step": 5, "restarts": 0, "goodput": {}, "saved_step": steps}
        (cell / "status.json").write_text(json.dumps(status))
    assert [saved_steps(run) for run in (*sorted((tmp_path / "cells").iterdir()), tmp_path)] == [4, 0, 0, 0]


def test_it_gives_up_without_progress(tmp_path):
    code, starts, messages = supervise(tmp_path, "exit 8", saves=False)
    assert (code, starts) == (Exit.PEER_LOST, 3)
    assert "no progress in 2 restarts, so giving up" in messages[-1]
    assert supervise(tmp_path / "..", "kill -9 $$", saves=False)[0] == 128 + signal.SIGKILL


def test_a_stopped_process_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "STOPPED_SECONDS", 0.2)
    code, starts, messages = supervise(tmp_path, "[ $N = 2 ] || kill -STOP $$")
    assert (code, starts) == (Exit.DONE, 2)
    assert "was stopped" in messages[0] and "SIGKILL" in messages[1]


def test_ctrl_c_while_it_waits_is_told_as_that(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 9.0)
    with handled(signal.SIGINT, signal.default_int_handler):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert supervise(tmp_path, "exit 8")[:2] == (Exit.INTERRUPTED, 1)


def test_a_hangup_that_was_ignored_stays_ignored(tmp_path, monkeypatch):
    with handled(signal.SIGHUP, signal.SIG_IGN):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGHUP)).start()
        assert supervise(tmp_path, "sleep 0.6; kill -HUP $$; exit 0")[:2] == (Exit.DONE, 1)


@pytest.mark.parametrize("script", ["trap 'exit 3' TERM; sleep 9 & wait", "exit 8"], ids=["passed on", "while waiting"])
def test_a_signal_ends_it_with_the_command(tmp_path, monkeypatch, script):
    monkeypatch.setattr(supervisor, "FIRST_WAIT", 9.0)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert supervise(tmp_path, script)[:2] == (Exit.PREEMPTED, 1)


@pytest.mark.parametrize(
    "line, complaint",
    [
        (["supervise"], "no verb given"),
        (["supervise", "--", "nothing"], "no verb given"),
        (["supervise", "--", "eval", "configs/debug.yaml"], "Supervise `train`"),
        (["supervise", "--", "train", "no.yaml"], "no such file"),
        (["supervise", "--attempts", "0", "--", "train", "configs/debug.yaml"], "a whole number from 1 to"),
    ],
)
def test_a_wrong_command_is_refused_before_it_starts(capsys, line, complaint):
    assert main(line) == Exit.CONFIG
    assert complaint in capsys.readouterr().err
