"""Verbs that read a checkpoint, on one that is damaged, and on one that was made to do harm.

Arrays of megabytes, so that most of what is flipped is array data.  No verb compiles a step: each is stopped where it
has what it restored, which is compared with what was saved, bit for bit."""

import hashlib
import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from spmd_lm.checkpoints import init_from
from spmd_lm.checkpoints.checkpointer import Checkpointer, make_meta
from spmd_lm.checkpoints.record import read_record
from spmd_lm.cli import main
from spmd_lm.config.schema import Checkpoint as CheckpointOptions
from spmd_lm.errors import Exit
from spmd_lm.parallel.fingerprint import fingerprints
from spmd_lm.step.program import Program
from tests.reliability.test_damage import cut_last_byte, delete, empty, flip, truncate, zero_block
from tests.reliability.test_fallback import DEBUG, UNDROPPED, contents, text  # noqa: F401 (a fixture)

SIZES = ["model.layers=1", "model.width=256", "model.vocab=512", "train.batch=8", "train.log_every=1", *UNDROPPED]
NEWEST, BEFORE = 4, 2
VERBS = ("train", "eval", "generate", "export", "init_from", "replay", "verify")


def command(directory: Path, text: Path, *overrides: str) -> list[str]:  # noqa: F811
    data = ["data.source=text", f"data.path={text}", f"run.dir={directory}"]
    return ["train", DEBUG, "--devices", "8", *SIZES, *data, "checkpoint.every=2", "checkpoint.keep=3", *overrides]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> Path:  # noqa: F811
    """Four steps, saved at 2 and 4."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    assert main(command(directory, text, "train.steps=4")) == Exit.DONE
    return directory


class Restored(Exception):
    """Carries what a verb restored."""


@pytest.fixture
def stop_when_restored(monkeypatch):
    def stop(restored):
        raise Restored(restored)

    monkeypatch.setattr(Program, "from_canonical", lambda self, state: stop({"params": state.params}))
    monkeypatch.setattr(Program, "params_from_canonical", lambda self, params: stop({"params": params}))
    monkeypatch.setattr(init_from.PretrainedRun, "initial_state", lambda self: stop({"params": self.params}))


class Verbs:
    """A run; one file at a time is changed and restored again, before every verb."""

    def __init__(self, finished: Path, tmp_path: Path, text: Path):  # noqa: F811
        self.run, self.tmp_path, self.text = Path(shutil.copytree(finished, tmp_path / "run")), tmp_path, text
        self.exported = b""  # the digest of what was exported first
        self.records = {step: read_record(finished / "checkpoints" / str(step)) for step in (NEWEST, BEFORE)}

    def line(self, verb: str) -> list[str]:
        run, devices = str(self.run), ["--devices", "8"]
        return {
            "train": command(self.run, self.text, "train.steps=5"),
            "init_from": command(self.tmp_path / "new", self.text, f"run.init_from={run}"),
            "export": ["export", run, str(self.tmp_path / "exported"), *devices],
            "replay": ["replay", run, str(NEWEST), *devices],
            "verify": ["ckpt", "verify", run, "--step", str(NEWEST)],
        }.get(verb, [verb, run, *devices])

    def result(self, verb: str, step: int) -> str:
        """The outcome: detected, fell back, or harmless, if the verb has what was saved at `step`."""
        try:
            code = main(self.line(verb))
        except Restored as restored:
            return "harmless" if self.is_as_saved(restored.args[0]["params"], step) else "fell back"
        if verb in ("export", "verify") and code == Exit.DONE:
            if verb == "export":
                digest = hashlib.sha256((self.tmp_path / "exported" / "model.safetensors").read_bytes()).digest()
                assert digest == (self.exported or digest), "exported other bits"
                self.exported = digest
            return "harmless"
        assert code == (Exit.CHECK_FAILED if verb == "verify" else Exit.CHECKPOINT), (verb, code)
        return "detected"

    def is_as_saved(self, params, step: int) -> bool:
        found, _ = fingerprints({"params": params})
        by_path = {path.removeprefix("params."): value for path, value in found.items()}
        for saved in self.records.values():
            same = all(saved.leaves[f"params.{path}"].fingerprint == value for path, value in by_path.items())
            if same:
                return saved.step == step
        raise AssertionError("bits that were never saved")

    def after(self, verb: str, path: Path, change) -> str:
        """path: in the checkpoint that the verb reads first."""
        step = BEFORE if verb == "replay" else NEWEST
        file = self.run / "checkpoints" / str(step) / path
        before = file.read_bytes()
        change(file, before)
        try:
            return self.result(verb, step)
        finally:
            aside = self.run / "checkpoints" / f"{step}.corrupt"
            if aside.exists():
                assert verb == "train"
                aside.rename(self.run / "checkpoints" / str(step))
            file.write_bytes(before)
            for leftover in ("exported", "new"):
                shutil.rmtree(self.tmp_path / leftover, ignore_errors=True)

    def files(self, step: int) -> tuple[list[Path], list[Path]]:
        """The files with array data, and one of each other kind that has bytes, in one checkpoint."""
        directory = self.run / "checkpoints" / str(step)
        files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.stat().st_size]
        data = [path.relative_to(directory) for path in files if path.stat().st_size > 2**20]
        others = [path.relative_to(directory) for path in files if path.relative_to(directory) not in data]
        kinds = {str(path)[: -len(path.name)] + path.suffix: path for path in others}  # one of each
        return data, sorted(kinds.values(), key=lambda path: (path.name != "record.json", path))


@pytest.fixture
def verbs(finished, tmp_path, text, stop_when_restored) -> Verbs:  # noqa: F811
    return Verbs(finished, tmp_path, text)


def check_verb(verbs: Verbs, verb: str, number: int) -> None:
    """Checks `number` cases each of flipped bits, zeroed blocks, and cut, deleted and empty files."""
    rng, found = random.Random(verb), "fell back" if verb == "train" else "detected"
    data, others = verbs.files(step := BEFORE if verb == "replay" else NEWEST)
    assert data and others[0] == Path("record.json") and verbs.result(verb, step) == "harmless"
    shutil.rmtree(verbs.tmp_path / "exported", ignore_errors=True)
    read_alone = verb in ("eval", "generate", "export", "init_from")  # the parameters: a third of the state
    for change in (flip(rng), zero_block(rng)):
        for _ in range(number):
            outcome = verbs.after(verb, rng.choice(data), change)
            assert outcome == found or (read_alone and outcome == "harmless")
    for path in itertools.islice(itertools.cycle(others), number):
        outcome = verbs.after(verb, path, flip(rng))
        assert outcome == found or (outcome == "harmless" and path.name != "record.json")
    paths = itertools.cycle([*others[:1], *data, *others[1:]])
    for change in (truncate, cut_last_byte, delete, empty):
        for path in itertools.islice(paths, number):
            assert verbs.after(verb, path, change) == found


@pytest.mark.parametrize(
    "verb", [pytest.param(each, marks=[pytest.mark.slow] * (each in ("train", "verify"))) for each in VERBS]
)
def test_no_verb_takes_damage_for_what_was_saved(verbs, verb, capsys):
    check_verb(verbs, verb, number=1)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_takes_any_damage_for_what_was_saved(verbs, verb, capsys):
    check_verb(verbs, verb, number=5)


# ---- checkpoints that were made to do harm, with a record whose SHA-256 is right

LEAF = "params.embedding.tokens"


def of_leaf(**values):
    return lambda record: record["leaves"][LEAF].update(values)


def renamed(name: str):
    return lambda record: record["leaves"].update({name: record["leaves"].pop(LEAF)})


def with_leaves(count: int):
    leaf = {"shape": [1], "dtype": "float32", "fingerprint": "0" * 16}
    return lambda record: record["leaves"].update({f"params.x{i}": leaf for i in range(count)})


def with_meta(**values):
    return lambda record: record["meta"].update(values)


HOSTILE = {
    "10^12 rows": of_leaf(shape=[10**12]),
    "10^12 numbers": of_leaf(shape=[10**6, 10**6]),
    "negative": of_leaf(shape=[-1, 64]),
    "many dims": of_leaf(shape=[1] * 1000),
    **{dtype: of_leaf(dtype=dtype) for dtype in ("object", "float1024", "V8", "M8[s]", "f4,f4")},
    "a fingerprint": of_leaf(fingerprint="?" * 16),
    **{f"leaf {name!r}": renamed(name) for name in ("params...x", "params./../etc", "a\0b", "", "params.embedding")},
    "10^5 leaves": with_leaves(100_000),
    **{f"file {name!r}": lambda r, name=name: r["files"].update({name: 4}) for name in ("/etc/passwd", "../x", "\0")},
    "no meta": lambda record: record.update(meta={}),
    "no config": with_meta(config=[]),
    "a config of strings": with_meta(config={"model": 7}),
    "an empty config": with_meta(config={}),
    "no position": with_meta(data=7),
    "no samples": with_meta(data={"samples": "x", "fingerprint": ""}),
}


def write_record(directory: Path, change) -> None:
    record = json.loads((directory / "record.json").read_bytes().partition(b"\n")[0])
    change(record)
    line = json.dumps(record).encode()
    (directory / "record.json").write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


QUICK = ("10^12 numbers", "float1024", "leaf 'params...x'", "no config")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name.replace("\0", "NUL"), marks=[] if name in QUICK else [pytest.mark.slow])
        for name, change in HOSTILE.items()
    ],
)
def test_a_record_that_was_made_to_do_harm(verbs, change, capsys):
    checkpoint = verbs.run / "checkpoints" / str(NEWEST)
    write_record(checkpoint, change)
    start = time.thread_time()
    run = str(verbs.run)
    assert main(["ckpt", "ls", run]) == Exit.DONE
    assert main(["ckpt", "verify", run, "--step", str(NEWEST)]) in (Exit.DONE, Exit.CHECK_FAILED, Exit.CHECKPOINT)
    assert main(["ckpt", "diff", f"{run}@{NEWEST}", f"{run}@{BEFORE}"]) in (Exit.CHECK_FAILED, Exit.CHECKPOINT)
    assert main(verbs.line("eval")) == Exit.CHECKPOINT
    try:
        assert main(verbs.line("train")) == Exit.CHECKPOINT
    except Restored as restored:  # it fell back
        assert verbs.is_as_saved(restored.args[0]["params"], BEFORE)
    assert time.thread_time() - start < 5 * 10  # of five verbs
    assert len(capsys.readouterr().err) < 20_000


def test_metadata_of_orbax_that_declares_a_huge_array(verbs, capsys):
    checkpoint = verbs.run / "checkpoints" / str(NEWEST)
    path = checkpoint / "state" / "_METADATA"
    path.write_text(path.read_text().replace("[512, 256]", "[1000000000000, 256]"))
    write_record(checkpoint, lambda record: record["files"].update({"state/_METADATA": path.stat().st_size}))
    assert main(verbs.line("verify")) in (Exit.DONE, Exit.CHECK_FAILED)
    assert verbs.result("eval", NEWEST) in ("harmless", "detected")


def test_links_and_odd_names_are_neither_followed_nor_taken_for_steps(verbs, tmp_path, capsys):
    checkpoints = verbs.run / "checkpoints"
    for name in ("9" * 200, "²", "٣", "0004", "99999999999"):
        shutil.copytree(checkpoints / str(BEFORE), checkpoints / name)
    elsewhere = Path(shutil.move(checkpoints / str(BEFORE), tmp_path / str(BEFORE)))
    (checkpoints / str(BEFORE)).symlink_to(elsewhere)
    (checkpoints / "7").symlink_to(checkpoints / "7")
    (checkpoints / "8.saving").symlink_to(elsewhere)
    (checkpoints / str(NEWEST) / "root").symlink_to("/")
    before = contents(elsewhere)
    assert main(["ckpt", "ls", str(verbs.run), "--json", "-"]) == Exit.DONE
    steps = {each["step"]: each["state"] for each in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert steps == {2: "intact", 4: "intact", 8: "uncommitted"}
    assert verbs.result("train", NEWEST) == "harmless"
    out = capsys.readouterr().out
    assert all(f"{name} is no checkpoint: ignored." in out for name in ("٣", "0004", "99999999999"))
    saver = Checkpointer(checkpoints, CheckpointOptions(keep=1))
    saver.save(5, {"w": jnp.arange(8.0)}, make_meta({}, 0, ""))
    saver.close()
    assert contents(elsewhere) == before and not (checkpoints / str(BEFORE)).exists()


def test_a_file_that_is_a_link_a_pipe_or_a_device_is_damage(verbs, capsys):
    checkpoint = verbs.run / "checkpoints" / str(NEWEST)
    for path in (checkpoint / "record.json", checkpoint / verbs.files(NEWEST)[0][0]):
        before = path.read_bytes()
        for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)):
            path.unlink()
            replace(path)
            codes = [main(verbs.line(verb)) for verb in ("verify", "eval")]
            assert codes[0] in (Exit.CHECK_FAILED, Exit.CHECKPOINT) and codes[1] == Exit.CHECKPOINT
        path.unlink()
        path.write_bytes(before)
    assert main(verbs.line("verify")) == Exit.DONE
