"""A tracker gets every record, under one id; one that hangs or fails costs a run nothing but a message."""

import io
import math
import sys
import threading
import time

import pytest
from rich.console import Console

from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import ConfigError
from spmd_lm.runtime import trackers
from spmd_lm.runtime.outputs import CONTROL_CHARACTERS
from spmd_lm.runtime.progress import Progress
from spmd_lm.runtime.trackers import Trackers, read_id, require_packages
from tests import processes

FAKE = """
import threading

calls = []


Settings = dict


def setup(settings):
    pass


class Run:
    url = "https://example.org/run"

    def log(self, metrics, step):
        {log}
        calls.append(("log", step, metrics))

    def finish(self, exit_code=0):
        {finish}
        calls.append(("finish", exit_code))


def init(**arguments):
    {init}
    calls.append(("init", arguments))
    return Run()
"""
HANG = "import sys; sys.hung.set(); threading.Event().wait()"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a module of that name, with these lines in its functions."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")

    def make(name, log="", finish="", init=""):
        (tmp_path / "site" / f"{name}.py").write_text(FAKE.format(log=log, finish=finish, init=init))
        monkeypatch.delitem(sys.modules, name, raising=False)
        made.append(name)

    made = []
    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def hung(monkeypatch):
    """An event, set once a tracker hangs."""
    event = threading.Event()
    monkeypatch.setattr(sys, "hung", event, raising=False)
    return event


def at_its_end(hung, name="wandb"):
    """Waits until a tracker hangs, or has all of RECORDS."""

    def wait():
        while not hung.is_set() and len(getattr(sys.modules.get(name), "calls", [])) < 1 + len(RECORDS):
            time.sleep(0.001)

    return wait


def track(directory, records, names=("wandb",), seconds=600.0, exit_code=0, before_end=None):
    """Messages of a run with these records."""
    tree = {
        "run": {"name": "mine", "dir": str(directory), "trackers": list(names)},
        "model": {"layers": 1, "width": 8, "heads": 1, "context": 8, "vocab": 16},
        "data": {"source": "synthetic"},
        "optim": {"lr": 0.1},
        "train": {"steps": 12, "batch": 4},
    }
    messages = []
    tracked = Trackers(RunConfig.model_validate(tree), messages.append)
    for record in records:
        tracked.write(record)
    if before_end:
        before_end()
    tracked.close(exit_code, seconds)
    return messages


RECORDS = [{"step": step, "loss": 1 / step, "mfu": None, "bad": math.nan} for step in (1, 2, 3)]


@pytest.mark.parametrize(("name", "exit_code"), [("wandb", 1), ("trackio", 0)])
def test_a_tracker_gets_all_records_and_a_resumed_run_keeps_its_id(tmp_path, package, name, exit_code):
    package(name)
    for _ in range(2):
        messages = track(tmp_path, RECORDS, [name], exit_code=exit_code)
        assert messages == (["wandb: https://example.org/run"] if name == "wandb" else [])
    first, *logged, finish, second = sys.modules[name].calls[:6]
    assert logged == [("log", step, {"loss": 1 / step}) for step in (1, 2, 3)] and finish == ("finish", exit_code)
    arguments, run_id = first[1], read_id(tmp_path)
    assert first == second and len(run_id) == 8
    assert (arguments["project"], arguments["resume"]) == ("spmd-lm", "allow")
    expected = {"wandb": ("mine", run_id), "trackio": (f"mine-{run_id}", None)}
    assert (arguments["name"], arguments.get("id")) == expected[name]
    assert arguments["config"]["model"]["width"] == 8


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ({"init": HANG}, ["did not finish in time", "3 of 3 records were lost"]),
        ({"log": HANG}, ["https", "did not finish in time", "3 of 3 records were lost"]),
        ({"finish": HANG}, ["https", "did not finish in time"]),
        (
            {"init": "raise OSError('no', 'network')"},
            ["OSError: [Errno no] network (said once", "3 of 3 records were lost"],
        ),
        ({"init": "raise SystemExit(1)"}, ["SystemExit: 1", "3 of 3 records were lost"]),
        ({"log": "raise OSError(step)"}, ["https", "OSError: 1 (said once", "3 of 3 records were lost"]),
        ({"log": "assert step != 2"}, ["https", "AssertionError", "1 of 3 records were lost"]),
        ({"finish": "raise OSError('gone')"}, ["https", "OSError: gone"]),
    ],
)
def test_a_tracker_that_hangs_or_fails_costs_a_message(tmp_path, package, hung, lines, said):
    package("wandb", **lines)
    hangs = HANG in lines.values()
    messages = track(tmp_path, RECORDS, seconds=0.5 if hangs else 600, before_end=at_its_end(hung) if hangs else None)
    assert len(messages) == len(said), messages
    for message, text in zip(messages, said, strict=True):
        assert message.startswith("wandb: ") and text in message


@pytest.mark.parametrize("where", ["init", "log", "finish"])
@pytest.mark.parametrize("text", ["\x1b]0;title\a", "\x1b[2J", "\x9b31m", "a\x08b"])
def test_what_a_tracker_says_steers_no_terminal(tmp_path, package, text, where):
    package("wandb", **{where: f"raise OSError({text!r})"})
    messages = track(tmp_path, RECORDS)
    file = io.StringIO()
    Progress(3, Console(file=file, width=200)).log(*messages)
    said = file.getvalue()
    assert text.encode("unicode_escape").decode() in said and not CONTROL_CHARACTERS.search(said)


def test_a_tracker_that_hangs_holds_up_no_other(tmp_path, package, hung):
    package("wandb", init=HANG)
    package("trackio")
    messages = track(tmp_path, RECORDS, ["wandb", "trackio"], 1.0, before_end=at_its_end(threading.Event(), "trackio"))
    assert [call[0] for call in sys.modules["trackio"].calls] == ["init", "log", "log", "log", "finish"]
    assert len(messages) == 2


def test_a_full_queue_drops_records(tmp_path, package, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_QUEUED", 2)
    release = threading.Event()
    package("wandb", init="import sys; sys.release.wait()")
    monkeypatch.setattr(sys, "release", release, raising=False)
    messages = track(tmp_path, RECORDS, before_end=release.set)
    assert messages == [
        "wandb: https://example.org/run",
        f"wandb: 1 of 3 records were lost; {tmp_path} has all of them",
    ]


def test_python_exits_without_waiting_for_a_tracker_that_was_left_behind(package):
    hook = "import atexit; atexit.register(lambda: threading.Event().wait())"
    package("wandb", init=f"{hook}; {HANG}")
    script = f"""
import atexit, sys, threading
from spmd_lm.runtime.trackers import RunIdentity, TrackerThread
sys.hung = threading.Event()
atexit.register(lambda: print("ours runs"))
sys.path.insert(0, {str(sys.path[0])!r})
thread = TrackerThread("wandb", RunIdentity("mine", "id", {{}}, "nowhere"))
sys.hung.wait()
thread.join(0)
print(thread.messages())
"""
    done = processes.finish([sys.executable, "-c", script])
    assert done.returncode == 0 and "left behind" in done.stdout and done.stdout.endswith("ours runs\n"), done.stderr


def test_a_missing_package_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"run\.trackers: nowhere is not installed\. pip install 'spmd-lm\[nowhere\]'"
    ):
        require_packages(["json", "nowhere"])


def test_a_run_without_trackers_starts_no_thread(tmp_path):
    before = threading.active_count()
    messages = track(tmp_path, RECORDS, [])
    assert not messages and threading.active_count() <= before and not list(tmp_path.iterdir())
