"""A run whose newest checkpoint is damaged: no verb uses it in silence, and training resumes from the one before."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from spmd_lm.checkpoints.checkpointer import Checkpointer
from spmd_lm.checkpoints.record import RECORD_FILE
from spmd_lm.checkpoints.storage import OrbaxStorage
from spmd_lm.cli import main
from spmd_lm.errors import Exit

DEBUG = str(Path(__file__).parents[2] / "configs" / "debug.yaml")
UNDROPPED = ["model.dropout=0", "model.attention_dropout=0"]  # compiles faster
SMALL = ["model.layers=1", "train.batch=8", "parallel.data=4", "parallel.model=2", "train.log_every=1", *UNDROPPED]


def command(directory: Path, text: Path, *overrides: str) -> list[str]:
    data = ["data.source=text", f"data.path={text}", f"run.dir={directory}"]
    return ["train", DEBUG, "--devices", "8", *SMALL, *data, "checkpoint.every=2", "checkpoint.keep=3", *overrides]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(" ".join(map(str, range(20_000))))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> Path:
    """Six steps, saved at 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    assert main(command(directory, text, "train.steps=6")) == Exit.DONE
    return directory


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip_a_bit(directory: Path, step: int, flip: tuple[str, int, int]) -> None:
    name, position, bit = flip
    with open(directory / "checkpoints" / str(step) / name, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.fixture(scope="module")
def flips(finished, tmp_path_factory) -> list[tuple[str, int, int]]:
    """Five flips that damage a parameter, which all verbs read."""
    copy = Path(shutil.copytree(finished, tmp_path_factory.mktemp("copy") / "run"))
    checkpoints, rng, found = Checkpointer(copy / "checkpoints"), random.Random(0), []
    record = checkpoints.record(6)
    name = max((name for name in record.files), key=record.files.__getitem__)
    while len(found) < 5:
        flip = name, rng.randrange(record.files[name]), rng.randrange(8)
        flip_a_bit(copy, 6, flip)
        if checkpoints.leaf_problem(record, "params.embedding.tokens"):
            found.append(flip)
        flip_a_bit(copy, 6, flip)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def metrics(directory: Path) -> list[tuple]:
    records = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records]


def readers(run: Path, text: Path, tmp_path: Path) -> list[list[str]]:
    return [
        ["eval", str(run), "--devices", "8"],
        ["generate", str(run), "--devices", "8"],
        ["export", str(run), str(tmp_path / "exported"), "--devices", "8"],
        command(tmp_path / "new", text, f"run.init_from={run}"),
    ]


@pytest.mark.parametrize("reader", range(4), ids=["eval", "generate", "export", "init_from"])
def test_no_verb_reads_a_damaged_checkpoint(flips, run, text, tmp_path, capsys, reader):
    line, newest = readers(run, text, tmp_path)[reader], run / "checkpoints" / "6"
    for flip in flips:
        flip_a_bit(run, 6, flip)
        before = contents(run)
        assert main(line) == Exit.CHECKPOINT
        error = capsys.readouterr().err
        assert f"{newest} is damaged" in error and "--fallback for step 4" in error
        assert contents(run) == before and not (tmp_path / "exported").exists() and not (tmp_path / "new").exists()
        flip_a_bit(run, 6, flip)


@pytest.mark.slow
def test_fallback_names_the_step_that_it_uses(run, flips, capsys):
    flip_a_bit(run, 6, flips[0])
    before = contents(run)
    assert main(["eval", str(run), "--devices", "8", "--fallback", "--json", "-"]) == Exit.DONE
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 4
    assert "6 is damaged" in err and "step 4 is used, of steps [2, 4, 6]" in err
    assert contents(run) == before
    assert main(["ckpt", "diff", f"{run}@6", f"{run}@6"]) == Exit.CHECKPOINT  # the records are the same
    assert "6 is damaged: params." in capsys.readouterr().err


def test_where_all_were_moved_aside_that_is_said(run, capsys):
    for step in (2, 4, 6):
        (run / "checkpoints" / str(step)).rename(run / "checkpoints" / f"{step}.corrupt")
    assert main(["ckpt", "ls", str(run)]) == Exit.DONE
    assert "checkpoints: 2.corrupt, 4.corrupt, 6.corrupt are damaged, and moved aside" in capsys.readouterr().out
    assert main(["eval", str(run), "--devices", "8"]) == Exit.CHECKPOINT
    assert "holds no checkpoint. 2.corrupt, 4.corrupt, 6.corrupt are damaged" in capsys.readouterr().err


def test_training_goes_on_from_the_one_before(run, flips, text, tmp_path, capsys):
    """The bits are those of an undisturbed run; the damaged one stays, under another name."""
    assert main(command(tmp_path / "reference", text, "train.steps=8")) == Exit.DONE
    flip_a_bit(run, 6, flips[0])
    capsys.readouterr()
    assert main(command(run, text, "train.steps=8")) == Exit.DONE
    out = capsys.readouterr().out
    assert "6 is damaged" in out and "moved to 6.corrupt" in out and "resuming after step 4" in out
    assert (run / "checkpoints" / "6.corrupt").is_dir() and (run / "checkpoints" / "8").is_dir()
    assert metrics(run) == metrics(tmp_path / "reference")


def test_a_newest_checkpoint_that_is_gone_is_missed(run, text, capsys):
    shutil.rmtree(run / "checkpoints" / "6")
    assert main(command(run, text, "train.steps=5")) == Exit.DONE
    out = capsys.readouterr().out
    assert "checkpoints/6 was saved, and is gone." in out


def test_training_never_starts_over_in_silence(run, text, capsys):
    """Checkpoints are damaged, or gone, which status.json contradicts."""
    for step in (2, 4, 6):
        path = max((run / "checkpoints" / str(step)).rglob("*"), key=lambda path: path.stat().st_size)
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        assert main(command(run, text, "train.steps=8")) == Exit.CHECKPOINT
        assert "no readable checkpoint is left" in capsys.readouterr().err
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["2.corrupt", "4.corrupt", "6.corrupt"]
    shutil.rmtree(run / "checkpoints")
    before = contents(run)
    assert main(command(run, text, "train.steps=8")) == Exit.CHECKPOINT
    assert "status.json says that 6 steps were done" in capsys.readouterr().err
    assert contents(run) == before


def test_foreign_files_are_ignored_and_never_deleted(run, text, capsys):
    checkpoints = run / "checkpoints"
    (checkpoints / "999").mkdir()
    (checkpoints / "8").write_text("a note")
    shutil.copytree(checkpoints / "6" / "state", checkpoints / "7" / "state")  # half copied
    assert main(command(run, text, "train.steps=8")) == Exit.DONE
    out = capsys.readouterr().out
    assert "999 is no checkpoint" in out and "record.json is missing" in out and "8.foreign" in out
    assert (checkpoints / "8.foreign").read_text() == "a note" and (checkpoints / "999").is_dir()
    assert "resuming after step 6" in out


@pytest.mark.slow
def test_another_run_s_checkpoint_is_ignored_aloud(run, text, tmp_path, capsys):
    assert main(command(tmp_path / "other", text, "train.steps=8", "train.seed=1")) == Exit.DONE
    shutil.copytree(tmp_path / "other" / "checkpoints" / "8", run / "checkpoints" / "8")
    capsys.readouterr()
    assert main(command(run, text, "train.steps=7")) == Exit.DONE
    out = capsys.readouterr().out
    assert "8 is of another run" in out and "resuming after step 6" in out


def test_without_permission_nothing_is_called_damaged(run, text, monkeypatch, capsys):
    """Errors of the disk and of memory are no damage either."""
    for error in (PermissionError(13, "Permission denied"), OSError(5, "Input/output error"), MemoryError()):
        monkeypatch.setattr(OrbaxStorage, "load", lambda *_, error=error: (_ for _ in ()).throw(error))
        before = contents(run)
        assert main(command(run, text, "train.steps=8")) == Exit.CHECKPOINT
        assert "cannot be read" in capsys.readouterr().err
        assert {*contents(run)} == {*before} and (run / "checkpoints" / "6").is_dir()


def test_a_directory_that_cannot_be_looked_into_is_not_damaged(run, text, monkeypatch, capsys):
    scandir = os.scandir

    def refused(path="."):
        if str(path).endswith("/6/state"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    before = contents(run / "checkpoints" / "4")
    assert main(command(run, text, "train.steps=8")) == Exit.CHECKPOINT
    assert re.search(r"6 cannot be read: Permission denied .*Nothing was changed", capsys.readouterr().err)
    assert sorted(os.listdir(run / "checkpoints")) == ["2", "4", "6"] and contents(run / "checkpoints" / "4") == before


@pytest.mark.parametrize("verb", ["ls", "verify", "diff", "eval", "generate", "export", "train"])
def test_a_directory_without_permission_is_not_empty(run, text, monkeypatch, tmp_path, capsys, verb):
    """Another user is simulated: root, who runs the tests, may read all."""
    listdir, scandir = os.listdir, os.scandir

    def refused(call):
        def list_it(path="."):
            if str(path).endswith("checkpoints"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path)

        return list_it

    monkeypatch.setattr(os, "listdir", refused(listdir))
    monkeypatch.setattr(os, "scandir", refused(scandir))
    lines = {
        "diff": ["ckpt", "diff", f"{run}@2", f"{run}@4"],
        "train": command(run, text, "train.steps=8"),
        "export": ["export", str(run), str(tmp_path / "out")],
    }
    default = ["ckpt", verb, str(run)] if verb in ("ls", "verify") else [verb, str(run)]
    assert main(lines.get(verb, default)) == Exit.CHECKPOINT
    assert "checkpoints: cannot be read: Permission denied" in capsys.readouterr().err


def test_a_checkpoint_of_another_version_is_left_alone(run, text, capsys):
    record = run / "checkpoints" / "6" / RECORD_FILE
    line = json.dumps(json.loads(record.read_text().splitlines()[0]) | {"compression": "zstd"}).encode()
    record.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
    for verb in (command(run, text, "train.steps=8"), ["eval", str(run), "--devices", "8", "--fallback"]):
        assert main(verb) == Exit.CHECKPOINT
        assert "is not a record of this version of spmd_lm (compression: " in capsys.readouterr().err
    assert sorted(os.listdir(run / "checkpoints")) == ["2", "4", "6"]
    assert main(["ckpt", "verify", str(run), "--step", "6"]) == Exit.CHECKPOINT


def test_no_verb_uses_another_run_s_checkpoint(run, text, capsys):
    record = run / "checkpoints" / "6" / RECORD_FILE
    line = json.dumps(json.loads(record.read_text().splitlines()[0]) | {"run_id": "another"}).encode()
    record.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
    assert main(["eval", str(run), "--devices", "8", "--json", "-"]) == Exit.DONE
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 4 and "6 is of another run (another, not" in err


def test_what_a_run_deletes_meanwhile_is_not_damaged(run, monkeypatch, capsys):
    """The newest is gone when it is to be read: the next newest is."""
    load, steps = OrbaxStorage.load, []

    def delete(self, path, *arguments):
        if path.name == "6":
            shutil.rmtree(path)
        steps.append(path.name)
        return load(self, path, *arguments)

    monkeypatch.setattr(OrbaxStorage, "load", delete)
    assert main(["eval", str(run), "--devices", "8"]) == Exit.DONE
    assert set(steps) == {"6", "4"}


def test_a_reader_that_fails_once_is_no_damage(run, text, monkeypatch, capsys):
    load, failures = OrbaxStorage.load, [ValueError("DATA_LOSS: a cosmic ray")]

    def load_after_failing(*arguments):
        if failures:
            raise failures.pop()
        return load(*arguments)

    monkeypatch.setattr(OrbaxStorage, "load", load_after_failing)
    assert main(command(run, text, "train.steps=7")) == Exit.DONE
    assert "Reading it again" in capsys.readouterr().out
    assert not [*(run / "checkpoints").glob("*.corrupt")]


@pytest.mark.parametrize("step, code", [("6", Exit.CHECK_FAILED), ("4", Exit.DONE)])
def test_ckpt_verify_names_the_leaf(run, flips, capsys, step, code):
    flip_a_bit(run, 6, flips[0])
    assert main(["ckpt", "verify", str(run), "--step", step, "--json", "-"]) == code
    (report,) = json.loads(capsys.readouterr().out)["checkpoints"]
    damaged = [leaf["path"] for leaf in report["leaves"] if leaf["state"] == "damaged"]
    assert bool(damaged) == (code != Exit.DONE) == (report["state"] == "damaged")


def test_ckpt_ls_and_diff(run, capsys):
    (run / "checkpoints" / "5.saving").mkdir()
    (run / "checkpoints" / "4" / "state" / "manifest.ocdbt").write_bytes(b"")
    assert main(["ckpt", "ls", str(run), "--json", "-"]) == Exit.DONE
    states = {each["step"]: each["state"] for each in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert states == {2: "intact", 4: "damaged", 5: "uncommitted", 6: "intact"}
    assert main(["ckpt", "diff", f"{run}@6", f"{run}@6"]) == Exit.DONE
    assert "the same bits" in capsys.readouterr().out
    assert main(["ckpt", "diff", f"{run}@2", str(run)]) == Exit.CHECK_FAILED
    assert "params.embedding.tokens" in capsys.readouterr().out
    for line in (["ckpt", "ls", str(run / "no")], ["ckpt", "what", str(run)], ["ckpt", "diff", str(run)]):
        assert main(line) == Exit.CONFIG
    assert main(["ckpt", "verify", str(run), "--step", "99"]) == Exit.CHECKPOINT
    capsys.readouterr()
    assert main(["ckpt", "verify", f"{run}@6"]) == Exit.CONFIG
    assert f"no such run. Write {run} --step 6." in capsys.readouterr().err


@pytest.mark.slow
def test_a_replayed_step_computes_the_same_bits(run, capsys):
    """Bits differ if a logged figure, or what was saved, is not what the step computes."""
    before = contents(run)
    assert main(["replay", str(run), "4", "--devices", "8", "--json", "-"]) == Exit.DONE
    result = json.loads(capsys.readouterr().out)
    assert (result["from"], result["same"], len(result["compared"]), result["leaves"]) == (2, True, 4, [])
    assert contents(run) == before
    log = run / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[3]["loss"] += 1e-9
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(run), "4", "--devices", "8"]) == Exit.CHECK_FAILED
    assert "step 4: loss was" in capsys.readouterr().out
    assert main(["replay", str(run), "4", "--devices", "8", "optim.lr=1"]) == Exit.CHECK_FAILED
    assert re.search("may be due to what changed since step 2 was saved.*\n  optim.lr: ", capsys.readouterr().err)
    for step, code in (("1", Exit.CHECKPOINT), ("99", Exit.CONFIG), ("x", Exit.CONFIG)):
        assert main(["replay", str(run), step, "--devices", "8"]) == code
