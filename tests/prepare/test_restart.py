"""Any number of workers, and any number of kills, make the same files; what is not ours is left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import spmd_lm
from spmd_lm.cli import main
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.prepare import chunks
from spmd_lm.prepare.stage_files import npy_bytes
from spmd_lm.runtime.directories import lock_directory
from tests import processes
from tests.prepare.corpora import contents, make, sentence, texts, write_lines

ROOT = Path(spmd_lm.__file__).parents[1]
STEPS = {"exact_duplicates": True, "near_duplicates": True, "min_tokens": 60}
KEYS = {"steps": STEPS, "split": {"validation": 0.1, "test": 0.1}, "shard_tokens": 20_000}
TRAINED = {"train": "bpe", "vocab_size": 400}
PROGRAM = """
import sys
from spmd_lm.prepare import chunks
from spmd_lm.runtime.directories import lock_directory
chunks.CHUNK_DOCUMENTS = 20
from spmd_lm.cli import main
sys.exit(main(["prepare", *sys.argv[1:]]))
"""


def write_documents(path: Path, count: int) -> str:
    """Writes documents, a fifth near or exact duplicates, some of few words."""
    draw = random.Random(0)
    given = [sentence(seed, draw.randrange(10, 150)) for seed in range(count)]
    given += [f"{text} {draw.choice(['', 'end'])}" for text in draw.choices(given, k=count // 4)]
    draw.shuffle(given)
    return write_lines(path, [{"text": text} for text in given])


def write_recipe(directory: Path, tokenizer, count: int) -> Path:
    recipe = directory / "r.yaml"  # JSON is YAML
    source = write_documents(directory / "a.jsonl", count)
    recipe.write_text(json.dumps({"sources": [source], "out": str(directory / "out"), "tokenizer": tokenizer, **KEYS}))
    return recipe


def start(*arguments: str, path: Path = ROOT) -> subprocess.Popen:
    """path: of modules, besides ours."""
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, start_new_session=True, **streams)


def check_same_after_kills(directory: Path, kills: int, tokenizer, count: int) -> None:
    """Kills the process at random points of the time that an undisturbed one takes; its workers end with it.  Where
    it was done before, it begins anew."""
    recipe, draw, out = write_recipe(directory, tokenizer, count), random.Random(kills), directory / "out"
    began = time.monotonic()
    undisturbed = start(str(recipe), f"out={directory / 'undisturbed'}", "workers=1")
    assert processes.exit_codes(undisturbed) == [0], undisturbed.stderr.read()
    seconds, expected = time.monotonic() - began, contents(directory / "undisturbed")
    for life in range(kills):
        if (out / "manifest.json").exists():
            assert contents(out) == expected
            shutil.rmtree(out)
        process = start(str(recipe), f"workers={life % 2 + 1}")
        with suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.2, 0.9) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = start(str(recipe), "workers=2")
    assert processes.exit_codes(last) == [0], last.stderr.read()
    assert contents(out) == expected and not (directory / "out.partial").exists()


@pytest.mark.slow
def test_it_is_the_same_after_two_kills_and_with_two_workers(tmp_path):
    check_same_after_kills(tmp_path, 2, "bytes", 400)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [TRAINED, {"train": "wordpiece", "vocab_size": 1000}], ids=["bpe", "wordpiece"])
def test_it_is_the_same_after_twenty_kills(tmp_path, tokenizer):
    check_same_after_kills(tmp_path, 20, tokenizer, 2000)


IN_A_WORKER = r"""
import os, pathlib, re, select, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    select.select([int(re.search(r"pipe_handle=(\d+)", str(sys.orig_argv))[1])], [], [])
    parent, here = os.getppid(), pathlib.Path(__file__).parent
    (here / f"{os.getpid()}.told").touch()
    while not (here / "stopped").exists() and os.getppid() == parent:
        time.sleep(0.01)
"""
"""Waits for the stop once this worker has its task: earlier, multiprocessing would raise in it."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_that_are_stopped_while_they_start_say_nothing(number, tmp_path):
    """Ctrl-C and a scheduler signal all of them; a kill is of the first, which the others follow."""
    (tmp_path / "sitecustomize.py").write_text(IN_A_WORKER)
    recipe = write_recipe(tmp_path, "bytes", 50)
    process = start(str(recipe), "workers=2", path=tmp_path)
    processes.wait_until(lambda: len([*tmp_path.glob("*.told")]) == 2, process)
    (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
    (tmp_path / "stopped").touch()
    assert processes.communicate(process)[1] == b"" and process.returncode == -number


class Stopped(Exception):
    pass


@contextmanager
def stopped_at(stage: str):
    """`prepare` ends where it would call this function of its pipeline."""
    with mock.patch(f"spmd_lm.prepare.pipeline.{stage}", side_effect=Stopped), pytest.raises(Stopped):
        yield


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("tokenizer", ["bytes", TRAINED], ids=["bytes", "bpe"])
def test_it_goes_on_from_every_file_that_was_written(tmp_path, monkeypatch, tokenizer):
    """A stop before each file, and a new start, writes no finished file twice."""
    from spmd_lm import files

    monkeypatch.setattr(chunks, "CHUNK_DOCUMENTS", 150)
    source = write_documents(tmp_path / "a.jsonl", 200)
    keys = {**KEYS, "tokenizer": tokenizer}
    make(tmp_path / "undisturbed", source, **keys)
    write, written, stops = files.write_atomically, [], 0

    def write_once(path: Path, content) -> None:
        if path.name not in stopped_at and path.suffix == ".json":
            stopped_at.add(path.name)
            raise Stopped
        written.append(path)
        write(path, content)

    stopped_at = set()
    monkeypatch.setattr(files, "write_atomically", write_once)
    while not (tmp_path / "out/manifest.json").exists():
        try:
            make(tmp_path / "out", source, **keys)
        except Stopped:
            stops += 1
    assert stops >= 5 and contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    records = [path for path in written if path.suffix == ".json" and path.name != "report.json"]
    assert len(records) == len({*records})


def test_a_finished_data_set_is_told_and_left_alone(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "r.yaml").write_text(f"sources: [{tmp_path}/a.txt]\nout: {tmp_path}/out\nworkers: 1\n")
    recipe = str(tmp_path / "r.yaml")
    assert main(["prepare", recipe, "split.validation=0.0"]) == Exit.DONE
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    capsys.readouterr()
    (tmp_path / "a.txt").unlink()
    assert main(["prepare", recipe, "split.validation=0.0", "workers=2", "--json", "-"]) == Exit.DONE
    result = json.loads(capsys.readouterr().out)
    assert result["finished_before"] and result["splits"]["train"]["tokens"] == 5
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert main(["prepare", recipe, "split.validation=0.0", "steps.min_tokens=2"]) == Exit.CONFIG
    assert (
        "made with a different value of steps.min_tokens. Remove this directory, or choose another out."
        in capsys.readouterr().err
    )


def test_what_is_left_of_a_start_that_was_killed_while_it_tidied_up_goes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            make(tmp_path / "out", tmp_path / "a.txt")
    assert (tmp_path / "out/manifest.json").exists() and (tmp_path / "out.partial/identity.json").exists()
    assert make(tmp_path / "out", tmp_path / "a.txt")["finished_before"]
    assert not (tmp_path / "out.partial").exists()


def test_what_is_not_ours_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for name, file in [("out", "letter.txt"), ("other", "manifest.json"), ("third.partial", "letter.txt")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        out = tmp_path / name.removesuffix(".partial")
        with pytest.raises(ConfigError, match=r"(?i)choose another out"):
            make(out, tmp_path / "a.txt")
        assert [path.name for path in (tmp_path / name).iterdir()] == [file]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        make(tmp_path / "file", tmp_path / "a.txt")


def test_what_was_begun_with_another_configuration_or_other_files_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "a.jsonl"
    write_lines(source, [{"text": "one"}, {"text": 2}])
    with pytest.raises(DataError, match="no text"):
        make(tmp_path / "out", source, on_bad="error")
    with pytest.raises(
        ConfigError, match=r"begun with a different value of config\.steps\.min_tokens\. Go on with that one"
    ):
        make(tmp_path / "out", source, steps={"min_tokens": 1})
    make(tmp_path / "out", source, on_bad="skip")  # as the error says
    assert texts(tmp_path / "out") == ["one"]

    monkeypatch.setattr(chunks, "CHUNK_DOCUMENTS", 1)
    with pytest.raises(DataError):
        make(tmp_path / "new", source, on_bad="error")
    write_lines(source, [{"text": "two"}, {"text": "2"}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: changed since this data set was begun\. Remove"):
        make(tmp_path / "new", source, on_bad="error")


def test_a_data_set_that_is_finished_keeps_its_split_and_one_that_was_begun_by_older_rules_is_refused(tmp_path):
    source = tmp_path / "a.jsonl"
    write_lines(source, [{"text": "one"}, {"text": 2}])
    with pytest.raises(DataError, match="no text"):
        make(tmp_path / "out", source, on_bad="error")
    identity = tmp_path / "out.partial/identity.json"
    begun = json.loads(identity.read_text())
    identity.write_text(json.dumps(begun | {"versions": begun["versions"] | {"rules": "1"}}))
    with pytest.raises(ConfigError, match=r"versions\.rules\. Go on with that one, remove the directory and .*out, or"):
        make(tmp_path / "out", source)
    identity.write_text(json.dumps(begun))
    make(tmp_path / "out", source)
    manifest = tmp_path / "out/manifest.json"
    manifest.write_text(manifest.read_text().replace('"rules": "2"', '"rules": "1"'))
    before = contents(tmp_path / "out")
    assert make(tmp_path / "out", source)["finished_before"] and contents(tmp_path / "out") == before


def test_workers_make_what_one_process_makes_and_import_no_jax(tmp_path, monkeypatch):
    (tmp_path / "no_jax.py").write_text("import sys\ndef check(text): return 'jax' not in sys.modules\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(chunks, "CHUNK_DOCUMENTS", 50)
    source = write_documents(tmp_path / "a.jsonl", 200)
    keys = {**KEYS, "steps": STEPS | {"language": "no_jax:check"}}
    make(tmp_path / "two", source, **keys, workers=2)
    assert len(texts(tmp_path / "two")) > 100
    monkeypatch.setattr("spmd_lm.prepare.clean.call_hook", lambda *_: True)
    make(tmp_path / "one", source, **keys)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_bad_input_that_was_skipped_before_it_was_stopped_is_an_error_where_it_is_to_be(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": 2}])

    with stopped_at("find_duplicates"):
        make(tmp_path / "out", source)
    with pytest.raises(DataError, match=r"a\.jsonl:2: no text under 'text' \(not text\)\. Mend it"):
        make(tmp_path / "out", source, on_bad="error")


def test_what_is_left_where_tidying_up_was_stopped_is_not_taken_for_all(tmp_path, monkeypatch):
    """A data set is made anew, whole, if tidying stopped at each file and the data set was removed."""
    source = write_documents(tmp_path / "a.jsonl", 100)
    make(tmp_path / "undisturbed", source, **KEYS)
    out, remove = tmp_path / "out", shutil.rmtree

    def stop(path, **_):
        for each in sorted(Path(path).iterdir())[:1]:
            each.unlink()
        raise Stopped

    for _ in range(3):  # what was renamed before is in the way of nothing
        with monkeypatch.context() as patched, pytest.raises(Stopped):
            patched.setattr("spmd_lm.prepare.workspace.shutil.rmtree", stop)
            make(out, source, **KEYS)
        remove(out)
    make(out, source, **KEYS)
    assert contents(out) == contents(tmp_path / "undisturbed")


def test_chunks_that_are_gone_are_told(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl", [{"text": "one"}])

    with stopped_at("find_duplicates"):
        make(tmp_path / "out", source)
    next((tmp_path / "out.partial/read").glob("*.json")).unlink()
    with pytest.raises(DataError, match="1 of its 1 chunks are gone"):
        make(tmp_path / "out", source)


@pytest.mark.parametrize("name", ["titles", "files"])
def test_leaks_are_those_that_it_was_begun_with(name, tmp_path, monkeypatch):
    """A list of titles, or an evaluation text, that changes in between makes no mixture."""
    source, listed = write_lines(tmp_path / "a.jsonl", [{"text": "one two"}, {"text": "three"}]), tmp_path / "listed"
    steps = {"leaks": {"ngram": 2, name: str(listed) if name == "titles" else [str(listed)]}}

    listed.write_text("three four")
    with stopped_at("find_duplicates"):
        make(tmp_path / "out", source, steps=steps)
    listed.write_text("one two")
    changed = rf"a different value of sha256\.steps\.leaks\.{name}\. "
    with pytest.raises(ConfigError, match=rf"begun with {changed}Go on with that one"):
        make(tmp_path / "out", source, steps=steps)
    listed.write_text("three four")
    make(tmp_path / "out", source, steps=steps)
    assert make(tmp_path / "out", source, steps=steps)["finished_before"]
    listed.write_text("one two")
    with pytest.raises(ConfigError, match=rf"{changed}Remove this directory, or choose another"):
        make(tmp_path / "out", source, steps=steps)


def test_a_finished_data_set_that_is_damaged_is_told(tmp_path):
    source, out = write_documents(tmp_path / "a.jsonl", 50), tmp_path / "out"
    for name in ("train/shard-00000.bin", "test/shard-00000.idx", "train/shard-00000.json", "tokenizer/tokenizer.json"):
        make(out, source, **KEYS, tokenizer=TRAINED)
        (out / name).write_bytes((out / name).read_bytes()[:-2])
        told = name.replace("/tokenizer.json", "")
        with pytest.raises(DataError, match=rf"{told}: damaged: .*Remove the data set, and prepare or copy it again"):
            make(out, source, **KEYS, tokenizer=TRAINED)
        shutil.rmtree(out)


def test_the_root_is_no_data_set(tmp_path):
    with pytest.raises(ConfigError, match=r"out=/: has no name\. Choose another out"):
        make(Path("/"), tmp_path / "a.txt")


DAMAGE = {  # of a file below `a`, and the start that is to find it stops before this function of the pipeline
    "a short text": ("out.partial/read/00001.text", lambda data: data[:5000], "find_duplicates"),
    "no text": ("out.partial/read/00001.text", None, "find_duplicates"),
    "an empty record": ("out.partial/read/00000.json", lambda data: b"", "find_duplicates"),
    "another digit": ("out.partial/read/00000.json", lambda data: data.replace(b"150", b"151"), "find_duplicates"),
    "a flipped bit of a key": ("out.partial/read/00001.exact.npy", flipped, "find_duplicates"),
    "a record of all": ("out.partial/read.json", lambda data: data[:-9], "find_duplicates"),
    "fates": ("out.partial/fates.npy", lambda data: data[:-30], "make_vocabulary"),
    "a tokenizer": ("out/tokenizer/tokenizer.json", lambda data: data.replace(b'"a"', b'"a1"'), "tokenize"),
    "an empty record of tokens": ("out.partial/tokens/00001.json", lambda data: b"", "write_shards"),
    "tokens": ("out.partial/tokens/00000.bin", flipped, "write_shards"),
    "a shard": ("out/train/shard-00000.bin", lambda data: data[:-2], "Workspace.finish"),
}


def forged(change):
    """A record whose value, and the files that it lists, are as `change` makes them; its checksum is right."""

    def forge(data: bytes) -> bytes:
        line = json.dumps(change(*json.loads(data.splitlines()[0]))).encode()
        return b"%s\n%d\n" % (line, zlib.crc32(line))

    return forge


def array(shape, dtype="<u8", fill=0) -> bytes:
    return npy_bytes(np.full(shape, fill, dtype))


def forged_array(path: Path, content: bytes) -> None:
    """Writes the array, and a record to match."""
    path.write_bytes(content)
    name, _, suffix = path.name.partition(".")
    record = path.with_name(f"{name}.json")
    listed = {f".{suffix}": [len(content), zlib.crc32(content)]}
    record.write_bytes(forged(lambda value, before: [value, before | listed])(record.read_bytes()))


READ, TOKENS = "out.partial/read/00000", "out.partial/tokens/00000"
FORGED = {  # records that are no records of ours, by file and the stage that its start stops before
    "a number": (f"{READ}.json", forged(lambda value, files: 3), "find_duplicates"),
    "null": (f"{READ}.json", forged(lambda value, files: [None, files]), "find_duplicates"),
    "a key less": (f"{READ}.json", forged(lambda value, files: [{"number": 0}, files]), "find_duplicates"),
    "minus one": (f"{READ}.json", forged(lambda value, files: [{**value, "documents": -1}, files]), "find_duplicates"),
    "10**400": (f"{READ}.json", forged(lambda value, files: [{**value, "documents": 10**400}, files]), "tokenize"),
    "more documents": (f"{READ}.json", forged(lambda value, files: [{**value, "documents": 999}, files]), "tokenize"),
    "counts": (f"{READ}.json", forged(lambda value, files: [{**value, "counts": [[1]]}, files]), "tokenize"),
    "no files": (f"{READ}.json", forged(lambda value, files: [value, {}]), "find_duplicates"),
    "files elsewhere": (f"{READ}.json", forged(lambda value, files: [value, {"/../x": [1, 1]}]), "find_duplicates"),
    "sizes of files": (f"{READ}.json", forged(lambda value, files: [value, dict.fromkeys(files, 1)]), "tokenize"),
    "chunks": ("out.partial/read.json", forged(lambda value, files: [{**value, "chunks": 10**12}, files]), "tokenize"),
    "no sources": ("out.partial/read.json", forged(lambda value, files: [{**value, "sources": []}, files]), "tokenize"),
    "a list": ("out.partial/read.json", forged(lambda value, files: [[], files]), "tokenize"),
    "deep": ("out.partial/read.json", lambda data: b"[" * 10**5 + b"\n%d\n" % zlib.crc32(b"[" * 10**5), "tokenize"),
    "tokens": (f"{TOKENS}.json", forged(lambda value, files: ["x", files]), "write_shards"),
    "few tokens": (f"{TOKENS}.json", forged(lambda value, files: [[0, 1, 1], files]), "write_shards"),
    "another chunk of tokens": ("out.partial/tokens/00009.json", None, "write_shards"),
    "tokenizer": ("out.partial/tokenizer.json", forged(lambda value, files: [{"a": 1}, files]), "tokenize"),
    "ends of floats": (f"{READ}.ends.npy", array(151, "<f8"), "find_duplicates"),
    "ends before starts": (f"{READ}.ends.npy", npy_bytes(np.arange(151, dtype="<u8")[::-1]), "find_duplicates"),
    "ends beyond the text": (f"{READ}.ends.npy", array(151, fill=2**63), "find_duplicates"),
    "a text in no encoding": (f"{READ}.text", b"\xff" * 2**20, "find_duplicates"),
    "documents that are not": (f"{READ}.bands.npy", array((2, 9), fill=2**40), "find_duplicates"),
    "one dimension": (f"{READ}.exact.npy", array(9), "find_duplicates"),
    "an array of Python's": (f"{READ}.exact.npy", b"\x93NUMPY\x01\0\x10\0{'descr': '|O'}  ", "find_duplicates"),
    "no array": (f"{READ}.digests.npy", b"text", "find_duplicates"),
    "a shape of 2**62": (
        f"{READ}.exact.npy",
        array((3, 1)).replace(b"(3, 1), }", b"(3, %d), }" % 2**60),
        "find_duplicates",
    ),
    "fates of fewer": ("out.partial/fates.npy", array(3, "u1"), "make_vocabulary"),
    "lengths": (f"{TOKENS}.lengths.npy", array((3, 150), fill=2**63), "write_shards"),
}
KINDS = {"a pipe": os.mkfifo, "a directory": Path.mkdir, "endless": lambda path: path.symlink_to("/dev/zero")}
UNREADABLE = {
    f"{kind} as {name}": (name, kind, stage)
    for kind in KINDS
    for name, stage in (
        (f"{READ}.json", "find_duplicates"),
        (f"{READ}.text", "find_duplicates"),
        ("out.partial/read.json", "find_duplicates"),
        ("out.partial/fates.json", "make_vocabulary"),
        (f"{TOKENS}.json", "write_shards"),
    )
}


@pytest.mark.parametrize("case", [*FORGED, *UNREADABLE])
def test_what_records_say_is_not_trusted(case, tmp_path, monkeypatch):
    """Others who share a disk may have written them.  The start that finds them ends in a sentence, or is unharmed."""
    name, change, stage = (FORGED | UNREADABLE)[case]
    source = write_documents(tmp_path / "a.jsonl", 120)
    tokenizer = TRAINED if case == "tokenizer" else "bytes"

    with stopped_at(stage):
        make(tmp_path / "out", source, **KEYS, tokenizer=tokenizer)
    path = tmp_path / name
    if change in KINDS:
        path.unlink()
        KINDS[change](path)
    elif isinstance(change, bytes):
        forged_array(path, change)
    else:
        path.write_bytes(change(path.read_bytes()) if change else b"")
    if case == "another chunk of tokens":
        make(tmp_path / "out", source, **KEYS)
        return
    with pytest.raises(DataError, match=r"out\.partial.* Remove ") as error:
        make(tmp_path / "out", source, **KEYS, tokenizer=tokenizer)
    assert len(str(error.value)) < 600 and not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_between_a_stop_and_a_start_is_told(case, tmp_path, monkeypatch):
    name, change, stage = DAMAGE[case]
    monkeypatch.setattr(chunks, "CHUNK_DOCUMENTS", 150)
    source = write_documents(tmp_path / "a.jsonl", 200)
    keys = {**KEYS, "tokenizer": TRAINED}

    with stopped_at(stage):
        make(tmp_path / "out", source, **keys)
    path = tmp_path / name
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(DataError, match=rf"{name}.* Remove ") as error:
        make(tmp_path / "out", source, **keys)
    assert "damaged" in str(error.value) and not (tmp_path / "out/manifest.json").exists()


def test_a_second_one_is_refused_while_the_first_is_at_work(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with (
        lock_directory(tmp_path / "out.partial", print, True, key="out"),
        pytest.raises(ConfigError, match=rf"process {os.getpid()} on \S+ since \S+ is writing there"),
    ):
        make(tmp_path / "out", tmp_path / "a.txt")
