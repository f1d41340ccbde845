"""Files that others put where a run reads or writes: none is followed out of its directory, none hangs a command, and
none ends it without a sentence."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_lm import files
from spmd_lm.checkpoints import restored
from spmd_lm.checkpoints.restored import restore_run
from spmd_lm.checkpoints.saved_run import check_vocabulary
from spmd_lm.cli import VERBS, main
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.text_files import read_documents
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary
from spmd_lm.errors import ConfigError, DataError, Exit, UserError
from spmd_lm.reports.runs import write_report
from spmd_lm.runtime.directories import is_locked, lock_directory, was_killed
from spmd_lm.sweeps.jobs import LocalJobs
from spmd_lm.training import loop
from tests.data.tokenizers.test_subwords import TINY, wordpiece
from tests.training import test_loop
from tests.training.test_loop import FakeProgram, make_config

fake = test_loop.fake  # no step is compiled


@pytest.fixture(autouse=True)
def at_once():
    start = time.thread_time()
    yield
    assert time.thread_time() - start < 10


@pytest.fixture
def victim(tmp_path):
    """A file that nobody may write to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_a_run_writes_through_no_link(tmp_path, victim):
    run = tmp_path / "run"
    (run / TOKENIZER_DIR).mkdir(parents=True)
    written = ["status.json", "config.yaml", "metrics.jsonl", "loss.png", "tracker_id"]
    for name in written:
        (run / f"{name}.tmp").symlink_to(victim)
    for name in ("loss.png", "samples.txt"):
        (run / name).symlink_to(victim)
    assert loop.train(make_config(run)) is Exit.DONE
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG") and not (run / "loss.png").is_symlink()
    (run / "samples.txt").unlink()  # a report reads nothing through a link either, and says so
    write_report([run], None)
    (run / "report.html").unlink()
    for name in ("report.html", "report.html.tmp"):
        (run / name).symlink_to(victim)
    write_report([run], None)
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_a_link_that_became_the_log_is_not_followed(tmp_path, victim):
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="it is a link, and may lead anywhere"):
        files.open_regular(tmp_path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND)


def test_the_output_of_a_cell_is_written_through_no_link(tmp_path, victim):
    (tmp_path / "output.log").symlink_to(victim)
    cell = SimpleNamespace(id="a", directory=tmp_path, config=make_config(tmp_path))
    with pytest.raises(OSError, match="it is a link"):
        LocalJobs().start(cell, 0)


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path, victim):
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"\.lock: cannot be written: it is a link, .*: remove it"):
        loop.train(make_config(tmp_path))
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert not is_locked(tmp_path) and not was_killed(tmp_path)
    with pytest.raises(ConfigError, match="it is not a regular file"), lock_directory(tmp_path, print, True):
        pass


@pytest.mark.parametrize("name", ["status.json", "config.yaml", "metrics.jsonl"])
def test_a_directory_in_the_way_is_told(tmp_path, name):
    (tmp_path / f"{name}.tmp").mkdir()
    with pytest.raises(UserError, match=rf"{name}: cannot be written: Is a directory"):
        loop.train(make_config(tmp_path))


def test_a_run_and_its_checkpoints_may_be_elsewhere(tmp_path):
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoints").symlink_to(tmp_path / "other")
    assert loop.train(make_config(tmp_path / "run")) is Exit.DONE
    assert (tmp_path / "other" / "12").is_dir() and (tmp_path / "disk" / "status.json").exists()


def test_the_copy_of_a_vocabulary_is_written_through_no_link(tmp_path, victim):
    (tmp_path / "copy").mkdir()
    for name in ("vocab.txt", "vocab.txt.tmp", ".vocab.txt"):
        (tmp_path / "copy" / name).symlink_to(victim)
    copy_vocabulary(str(wordpiece(tmp_path)), tmp_path / "copy")
    assert "[MASK]" in (tmp_path / "copy" / "vocab.txt").read_text()
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    with pytest.raises(DataError, match="link: it is a link"):
        copy_vocabulary(str(tmp_path), tmp_path / "link")


# --- inputs that never end --------------------------------------------------------------------------------------------


@pytest.fixture
def loops(tmp_path):
    """A directory with one text, and links that lead back, to a pipe and to nowhere."""
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    (tmp_path / "texts" / "inner" / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    for name, target in {"x": ".", "y": "..", "b.txt": "b.txt", "c.txt": "/dev/zero", "d.txt": "../pipe"}.items():
        (tmp_path / "texts" / name).symlink_to(target)
    return tmp_path / "texts"


@pytest.mark.parametrize("pattern", ["", "*/*.txt", "**/*.txt", "**", "**/" * 50 + "a.*", "in*/**/*"])
def test_directories_that_contain_themselves_are_read_once(loops, pattern):
    assert [document.text for document in read_documents([str(loops / pattern)])] == [b"text"]


def test_data_that_never_ends_is_refused(loops):
    for name in ("../pipe", "c.txt", "b.txt", "d.txt", "x" * 300, "a\0b", "**/*.md", "/dev/zero"):
        with pytest.raises(DataError, match=r"^(data.validation_path=|.*: cannot be read: )"):
            read_documents([os.path.join(loops, name)], "data.validation_path", (".jsonl",))


def test_more_text_than_memory_is_refused(tmp_path):
    with open(tmp_path / "a.txt", "wb") as file:
        file.truncate(2**43)
    with pytest.raises(DataError, match=r"8,796,093,022,208 bytes of text, but this host has [\d,]+ of memory"):
        read_documents([str(tmp_path)])


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"supervise"}))
def test_names_that_no_file_has_are_told(verb, capsys):
    for name in ("x" * 300, "a\0b"):
        names = {"STEP": "1", "ACTION": "ls"}
        assert main([verb, *(names.get(each, name) for each in VERBS[verb].positionals)]) == Exit.CONFIG
        assert "no file can have this name" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--picture", "--hardware"])
def test_nor_can_an_option_s_file_have_them(option, capsys):
    assert (
        main(["preflight", "configs/debug.yaml", "--topology", "h100:1x8", option, "x" * 300 + ".png"]) == Exit.CONFIG
    )
    assert "no file can have this name" in capsys.readouterr().err


trained = test_loop.reference


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("config.yaml", ["eval", "RUN"], Exit.CONFIG),
        ("config.yaml", ["replay", "RUN", "12"], Exit.CONFIG),
        ("status.json", ["report", "RUN"], Exit.CHECKPOINT),
        ("metrics.jsonl", ["report", "RUN"], Exit.CHECKPOINT),
        ("config.yaml", ["report", "RUN"], Exit.DONE),
        ("samples.txt", ["report", "RUN"], Exit.DONE),
        ("checkpoints/12/record.json", ["ckpt", "verify", "RUN"], Exit.CHECKPOINT),
    ],
)
def test_a_run_with_a_pipe_for_a_file_is_told(tmp_path, trained, capsys, name, line, code):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert main([str(run) if word == "RUN" else word for word in line]) == code
    if code:
        assert name in capsys.readouterr().err


def test_training_is_refused_by_a_pipe_for_a_file(tmp_path, trained):
    for name in ("status.json", "metrics.jsonl"):
        run = shutil.copytree(trained, tmp_path / name.partition(".")[0])
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(UserError, match=f"{name}: "):
            loop.train(make_config(run, train__steps=14))


# --- vocabularies of a run --------------------------------------------------------------------------------------------


def text_run(tmp_path, vocabulary: Path, **changes):
    (tmp_path / "corpus.txt").write_text("wanted a want. " * 200)
    data = {"source": "text", "path": str(tmp_path / "corpus.txt"), "tokenizer": str(vocabulary)}
    made = make_config(tmp_path / "run", **changes).model_dump(by_alias=True) | {"data": data}
    return RunConfig.model_validate(made)


def vocabulary(directory: Path, *pieces: str) -> Path:
    directory.mkdir()
    return wordpiece(directory, *pieces)


def test_a_vocabulary_without_an_end_finishes_its_run(tmp_path, monkeypatch, capsys):
    prompts = []
    monkeypatch.setattr(loop, "generate_text", lambda *arguments: prompts.extend(arguments[2]) or ["The end"])
    config = text_run(tmp_path, vocabulary(tmp_path / "of", "[UNK]", "wanted", "a", "want", "."))
    FakeProgram.at = {1: lambda: prompts.append("after the line") or 1}
    assert loop.train(config) is Exit.DONE
    assert (
        "samples.txt leaves out the prompt '': this run's tokenizer has no token to start a" in capsys.readouterr().out
    )
    assert prompts == ["after the line", "The ", "def "]
    assert (tmp_path / "run" / "samples.txt").read_text() == "The end\n"


def test_prompts_with_tokens_that_the_model_lacks_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "generate_text", lambda *arguments: arguments[2])
    config = text_run(tmp_path, "bytes")
    (tmp_path / "corpus.txt").write_bytes(bytes([9, 10]) * 500)  # both below model.vocab, 16
    assert loop.train(config) is Exit.DONE
    said = capsys.readouterr().out
    assert "leaves out the prompt 'The ': token 104 is not below model.vocab=16" in said and "prompt '':" not in said
    assert (tmp_path / "run" / "samples.txt").read_text() == "\n"


def test_a_checkpoint_is_used_with_its_own_vocabulary_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "sample", lambda run: "")
    monkeypatch.setattr(restored, "Program", FakeProgram)
    own, same = (vocabulary(tmp_path / name) for name in ("own", "same"))
    other = vocabulary(tmp_path / "other", *reversed(TINY))
    config = text_run(tmp_path, own)
    assert loop.train(config) is Exit.DONE
    file = str(tmp_path / "run" / "config.yaml")
    for line in (["eval", file], ["generate", file], ["export", file, str(tmp_path / "out")]):
        assert main([*line, f"data.tokenizer={other}"]) == Exit.CONFIG
        assert f"data.tokenizer={other} is not the vocabulary of {tmp_path}/run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for found in (own, same):
        assert restore_run(text_run(tmp_path, found))[2] == 12
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(ConfigError, match=f"Use data.tokenizer={own}, or another run"):
        restore_run(text_run(tmp_path, other))
    own.write_text("\n".join(reversed(TINY)))
    with pytest.raises(ConfigError, match="is not the vocabulary"):
        restore_run(config)


def test_a_checkpoint_of_a_version_that_kept_no_hash(tmp_path):
    own, other = vocabulary(tmp_path / "own"), vocabulary(tmp_path / "other", *reversed(TINY))
    run, meta = tmp_path / "run", {"data": {}, "config": {"data": {"tokenizer": "bytes"}}}
    with pytest.raises(ConfigError, match=r"Use data\.tokenizer=bytes"):
        check_vocabulary(text_run(tmp_path, own), run, meta)
    (run / TOKENIZER_DIR).mkdir(parents=True)
    copy_vocabulary(str(own), run / TOKENIZER_DIR)
    meta["config"]["data"]["tokenizer"] = str(own)
    check_vocabulary(text_run(tmp_path, own), run, meta)
    with pytest.raises(ConfigError, match=f"Use data.tokenizer={run}/tokenizer"):
        check_vocabulary(text_run(tmp_path, other), run, meta)
