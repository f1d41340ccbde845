"""Whatever of a run's directory is damaged, the verbs that read it end with the documented code and a sentence, and
change nothing; what they do not need, they do not miss."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_lm.checkpoints.record import RECORD_FILE
from spmd_lm.errors import Exit
from spmd_lm.step.program import Program
from tests.reliability.contained import run as run_verb
from tests.reliability.test_fallback import DEBUG, UNDROPPED, contents, text  # noqa: F401 (a fixture)

DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "missing": lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(),
    "file": lambda path: (DAMAGE["missing"](path), path.write_text("x")),
    "directory": lambda path: (DAMAGE["missing"](path), path.mkdir()),
    "pipe": lambda path: (DAMAGE["missing"](path), os.mkfifo(path)),
    "loop": lambda path: (DAMAGE["missing"](path), path.symlink_to(path.name)),
    "another's": lambda path: path.write_text(path.read_text().replace("width: 16", "width: 32") + "\n"),
    "another run's": lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": "another"})),
    "a line more": lambda path: path.write_text(path.read_text() + "nonsense: {a: 1}\n"),
}
READERS = ("replay", "generate", "eval", "export")
ALL = (*READERS, "ls")
CASES = [  # what, how it is damaged, the verbs that miss it, and their code
    *(("config.yaml", how, READERS, Exit.CONFIG) for how in ("cut", "binary", "missing", "directory", "pipe", "loop")),
    ("config.yaml", "a line more", READERS, Exit.CONFIG),
    ("config.yaml", "another's", READERS, Exit.CHECKPOINT),
    *(("metrics.jsonl", how, ("replay",), Exit.CHECKPOINT) for how in ("binary", "directory", "pipe")),
    *(("metrics.jsonl", how, (), Exit.DONE) for how in ("cut", "missing", "loop")),
    *(("status.json", how, (), Exit.DONE) for how in ("cut", "binary", "directory", "pipe", "missing", "loop")),
    ("status.json", "another run's", READERS, Exit.CHECKPOINT),
    *(("tokenizer", how, READERS, Exit.CONFIG) for how in ("missing", "file", "directory", "pipe", "loop")),
    *(("tokenizer/tokenizer.json", how, READERS, Exit.CONFIG) for how in ("cut", "binary", "another's", "pipe")),
    *((f"checkpoints/4/{RECORD_FILE}", how, READERS[1:], Exit.CHECKPOINT) for how in ("cut", "binary", "missing")),
    *((f"checkpoints/2/{RECORD_FILE}", how, READERS[:1], Exit.CHECKPOINT) for how in ("cut", "binary", "missing")),
    *(("checkpoints/2", how, READERS[:1], Exit.CHECKPOINT) for how in ("missing", "file", "directory", "pipe")),
    *(("checkpoints/4", how, (), Exit.DONE) for how in ("missing", "file", "directory", "pipe")),
    *(("checkpoints", how, (*READERS, "ls"), None) for how in ("missing", "file", "pipe", "loop")),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> Path:  # noqa: F811
    """A run of four steps, saved at 2 and 4, with its own tokenizer."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    small = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "model.vocab=300", *UNDROPPED]
    data = ["data.source=text", f"data.path={text}", "data.tokenizer=bpe", "train.batch=8", "train.log_every=1"]
    steps = ["train.steps=4", "optim.warmup=1", "checkpoint.every=2", f"run.dir={directory}"]
    assert run_verb("train", DEBUG, "--devices", "8", *small, *data, *steps, limited=False)[0] == Exit.DONE
    return directory


@pytest.fixture
def run(finished, tmp_path, monkeypatch) -> Path:
    """A copy of it; no verb computes with what it has restored."""
    monkeypatch.setattr(Program, "from_canonical", stop)
    monkeypatch.setattr(Program, "params_from_canonical", stop)
    monkeypatch.setattr("spmd_lm.huggingface.transfer.read_params", stop)
    return Path(shutil.copytree(finished, tmp_path / "run"))


def stop(*_: object, **__: object) -> None:
    raise SystemExit(0)


def line_of(verb: str, run: Path) -> list[object]:
    return {
        "replay": ["replay", run, "4"],
        "export": ["export", run, run.parent / "exported"],
        "ls": ["ckpt", "ls", run],
    }.get(verb, [verb, run])


@pytest.mark.parametrize(("what", "how", "missed_by", "code"), CASES, ids=lambda value: str(value)[:30])
def test_a_damaged_run_ends_each_verb_that_misses_what_is_damaged(run, what, how, missed_by, code):
    DAMAGE[how](run / what)
    before = contents(run)
    for verb in ALL:
        ended, _, error = run_verb(*line_of(verb, run), limited=False)
        if verb not in missed_by:
            assert ended == Exit.DONE, (verb, error)
        else:
            assert ended == code if code is not None else ended in (Exit.CONFIG, Exit.CHECKPOINT), (verb, error)
            assert f"{run}" in error, verb
    assert contents(run) == before


def test_a_run_that_is_whole_is_said_to_have_changed_in_nothing(run):
    """The tokenizer is one that the run trained."""
    assert run_verb(*line_of("replay", run), limited=False)[::2] == (Exit.DONE, "")
