"""A start that is stopped before its first checkpoint, at any moment, leaves a run that the same command finishes as
if nothing had stopped it.

What SIGKILL leaves is what is on the disk at that moment: one start is copied before each of its writes."""

import itertools
import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from spmd_lm.config.load import load_run
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.tokenizers.training import train_bpe
from spmd_lm.errors import CheckpointError, ConfigError, Exit
from spmd_lm.training import loop
from tests.data.token_files.conftest import write_dataset
from tests.data.tokenizers.test_subwords import wordpiece
from tests.reliability.contained import WRITES
from tests.task_files import write_jsonl
from tests.training.test_loop import FakeProgram, fake, make_config, metrics, snapshot, status  # noqa: F401 (a fixture)

slow = pytest.mark.slow
TEXT = "".join(f"{first} {second} are not the same. " for first in ("one", "two", "ten") for second in range(60))


def byte_level(directory: Path) -> Path:
    """A vocabulary in two files."""
    train_bpe(260, lambda: iter([TEXT])).model.save(str(directory))
    return directory


def config_of(name: str, root: Path, directory: Path, **changes) -> RunConfig:
    """A run's config whose data and tokenizer have this name."""
    root.mkdir(exist_ok=True)
    (root / "text.txt").write_text(TEXT)
    shape = {"train__steps": 4, "checkpoint__every": 2, "train__log_every": 1, "train__eval_every": 0}
    tree = make_config(directory, **shape | changes).model_dump(by_alias=True)
    tree["model"]["vocab"] = changes.get("model__vocab", 320)
    data = {"source": "text", "path": str(root / "text.txt"), "validation_fraction": 0.2}
    (root / "vocabulary").mkdir(exist_ok=True)
    if name == "tokens":
        documents = [[[*range(n, 250)] for n in range(10)]]
        write_dataset(root / "tokens", {"train": documents, "validation": documents}, vocab=256, eos=255)
        data = {"source": "tokens", "path": str(root / "tokens")}
    if name == "task":
        write_jsonl(root / "task.jsonl", random.Random(0), 60)
        tree["model"] |= {"kind": "bert", "context": 32}
        tree["objective"] = {"kind": "classification", "classes": 3}
        data = {"source": "task", "task": "jsonl"} | dict.fromkeys(
            ["path", "validation_path"], str(root / "task.jsonl")
        )
    tokenizers = {"wordpiece file": wordpiece, "byte level": byte_level}
    if name in tokenizers:
        data["tokenizer"] = str(tokenizers[name](root / "vocabulary"))
    elif name in ("bpe", "wordpiece"):
        data["tokenizer"] = name
    tree["data"] = {"source": "synthetic"} if name in ("synthetic", "init_from") else data
    if name == "init_from":
        tree["run"]["init_from"] = str(root / "first")
        if not (root / "first").exists():
            loop.train(config_of("synthetic", root, root / "first"))
    return RunConfig.model_validate(tree)


NAMES = ["bytes", "bpe", "wordpiece", "wordpiece file", "byte level", "task", "tokens", "synthetic", "init_from"]
LATER = ("bpe", "wordpiece", "wordpiece file", "byte level", "synthetic", "tokens", "bytes")


class Snapshots:
    """Copies of a directory before each write to it, as long as `taking`; of those that have the same files one."""

    def __init__(self):
        self.directory, self.target, self.found, self.numbers = None, None, {}, itertools.count()
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        directory = self.directory
        if directory is None or not (event in WRITES or event == "open"):
            return
        if threading.current_thread() is not threading.main_thread():  # orbax's: tests/reliability kills real saves
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        if not str(arguments[0]).startswith(str(directory)) or not directory.exists():
            return
        self.directory = None  # what follows is of this hook
        try:
            self.take(directory)
        finally:
            self.directory = directory

    def take(self, directory: Path) -> None:
        try:
            files = {str(path.relative_to(directory)) for path in directory.rglob("*")}
            outside = frozenset(name for name in files if not name.startswith("checkpoints/"))
            saves = frozenset(name.split("/")[1] for name in files - outside)
            sizes = frozenset((name, (directory / name).stat().st_size > 0) for name in outside)
            if (key := (sizes, saves)) not in self.found:
                shutil.copytree(directory, target := self.target / str(next(self.numbers)))
                self.found[key] = target
        except (FileNotFoundError, shutil.Error):  # other threads renamed files meanwhile: no state of a disk
            return


@pytest.fixture(scope="module")
def snapshots():
    return Snapshots()


def names_of(files: dict) -> set:
    return {path.name for path in files if path.name != ".lock" and not {"checkpoints", "tensorboard"} & {*path.parts}}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name in LATER else ()) for name in NAMES])
def test_a_start_that_is_killed_at_any_write_is_started_again(name, snapshots, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "sample", lambda run: "")
    monkeypatch.setattr(loop, "draw_loss", lambda records, title: b"picture")
    here = tmp_path / "run"
    config = config_of(name, tmp_path / "data", here)
    snapshots.target, snapshots.found = tmp_path / "killed", {}
    wait = loop.TrainingRun.wait_for_save

    def wait_and_stop_copying(run, seconds=None):  # once there is a checkpoint, other tests take over
        wait(run, seconds)
        if run.status.saved_step > 0:
            snapshots.directory = None

    monkeypatch.setattr(loop.TrainingRun, "wait_for_save", wait_and_stop_copying)
    snapshots.directory = here
    try:
        assert loop.train(config) is Exit.DONE
    finally:
        snapshots.directory = None
    alone, kept = metrics(here), names_of(snapshot(here))
    assert len(snapshots.found) >= 8
    for killed in snapshots.found.values():
        shutil.rmtree(here)
        killed.rename(here)
        assert loop.train(config) is Exit.DONE, killed
        assert metrics(here) == alone and kept <= names_of(snapshot(here)), killed
        assert status(here)["state"] == "done"


MOMENTS = {  # what a start calls, in order
    "check": (loop.RunDir, "check_config"),
    "program": (FakeProgram, "__init__"),
    "data": (loop, "open_data"),
    "state": (loop, "initial_state"),
    "files": (loop.RunDir, "open_files"),
    "compile": (FakeProgram, "compile"),
    "step": (FakeProgram, "step"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["init_from", *(pytest.param(name, marks=slow) for name in ("bpe", "byte level"))])
def test_a_start_that_is_terminated_at_any_moment_is_started_again(name, moment, tmp_path, monkeypatch):
    """A second start takes the same command, or the run's directory, which `supervise` and people use."""
    monkeypatch.setattr(loop, "sample", lambda run: "")
    monkeypatch.setattr(loop, "draw_loss", lambda records, title: b"picture")
    configs = [config_of(name, tmp_path / "data", tmp_path / each) for each in ("alone", "run")]
    assert loop.train(configs[0]) is Exit.DONE
    owner, function = MOMENTS[moment]
    call = getattr(owner, function)

    def terminated(*arguments):
        monkeypatch.setattr(owner, function, call)
        os.kill(os.getpid(), signal.SIGTERM)
        return call(*arguments)

    monkeypatch.setattr(owner, function, terminated)
    assert loop.train(configs[1]) is Exit.PREEMPTED
    again = load_run(tmp_path / "run") if moment == "compile" else configs[1]
    assert loop.train(again) is Exit.DONE
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")


def test_what_an_unsaved_start_trained_is_trained_again(tmp_path, monkeypatch):
    """The text was another: nothing saved depends on its tokenizer."""
    monkeypatch.setattr(loop, "sample", lambda run: "")
    config = config_of("bpe", tmp_path / "data", tmp_path / "run")
    (tmp_path / "data/text.txt").write_text(TEXT.replace("same", "zzyzx"))
    FakeProgram.at = {"compile": lambda: os.kill(os.getpid(), signal.SIGTERM)}
    assert loop.train(config) is Exit.PREEMPTED
    FakeProgram.at = {}
    (tmp_path / "data/text.txt").write_text(TEXT)
    assert loop.train(config) is Exit.DONE
    assert "zzyzx" not in (tmp_path / "run/tokenizer/tokenizer.json").read_text()


@pytest.mark.parametrize("changes", [{}, {"train__steps": 6}], ids=["finished", "more steps"])
def test_a_finished_run_without_checkpoints_knows_its_tokenizer(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "sample", lambda run: "")
    config = config_of("bpe", tmp_path / "data", tmp_path / "run", checkpoint__every=0)
    assert loop.train(config) is Exit.DONE
    again = config_of("bpe", tmp_path / "data", tmp_path / "run", checkpoint__every=0, **changes)
    if changes:
        with pytest.raises(CheckpointError, match="finished its 4 steps without a checkpoint"):
            loop.train(again)
    else:
        assert loop.train(again) is Exit.DONE


def test_a_foreign_tokenizer_in_the_directory_is_not_overwritten(tmp_path, monkeypatch):
    (tmp_path / "run/tokenizer").mkdir(parents=True)
    (mine := wordpiece(tmp_path / "run/tokenizer")).chmod(0o600)
    before = mine.read_bytes()
    with pytest.raises(ConfigError, match=r"run\.dir=.*run: .*tokenizer.* belongs to no run"):
        loop.train(config_of("bpe", tmp_path / "data", tmp_path / "run"))
    assert mine.read_bytes() == before and [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer"]
