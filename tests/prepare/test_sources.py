"""Sources of every kind give their documents, in an order of their own."""

import gzip
import hashlib
import inspect
import json
import os
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest

import spmd_lm
from spmd_lm.cli import main
from spmd_lm.errors import DataError, Exit
from spmd_lm.prepare import pipeline
from spmd_lm.prepare import sources as sources_module
from spmd_lm.prepare.parquet import ParquetError, read_rows
from spmd_lm.prepare.report import render_report
from tests.prepare.corpora import make, texts, write_lines, write_parquet


def test_files_directories_globs_and_keys(tmp_path):
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/z.txt").write_text("z")
    (tmp_path / "d/sub/a.md").write_text("a")
    (tmp_path / "d/image.png").write_bytes(b"\x89PNG")
    (tmp_path / "lines.txt").write_text("one\n\ntwo\r\n")
    (tmp_path / "x.tex").write_text("tex")
    write_lines(tmp_path / "b.jsonl", [{"body": "body"}])
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "gz"}))
    given = [
        str(tmp_path / "c.jsonl.gz"),
        str(tmp_path / "d"),
        {"path": str(tmp_path / "lines.txt"), "per": "line"},
        {"path": str(tmp_path / "b.jsonl"), "text": "body"},
        str(tmp_path / "**/*.tex"),
    ]
    report = make(tmp_path / "out", given)
    assert texts(tmp_path / "out") == ["gz", "a", "z", "one", "two", "body", "tex"]
    whole = (tmp_path / "lines.txt").read_bytes()
    assert report["sources"][2] == {
        "path": str(tmp_path / "lines.txt"),
        "files": 1,
        "bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    assert report["sources"][1]["files"] == 2 and report["sources"][1]["bytes"] == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_name_that_is_not_utf8(workers, tmp_path):
    (tmp_path / "in").mkdir()
    for name, content in ((b"a\xff.txt", b"good"), (b"b\xff.txt", b"a\0b")):
        Path(os.fsdecode(os.fsencode(tmp_path / "in") + b"/" + name)).write_bytes(content)
    report = make(tmp_path / "out", tmp_path / "in", workers=workers)
    assert texts(tmp_path / "out") == ["good"] and report["bad"][0].startswith(f"{tmp_path}/in/b\udcff.txt: a NUL")


def make_links(root: Path, links: dict[str, str]) -> None:
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/f.txt").write_text("f")
    (root / "a/g.txt").write_text("g")
    for name, target in links.items():
        (root / name).symlink_to(target)


LINKS = {
    "two to their directory": {"a/x": ".", "a/y": "."},
    "two cycles": {"a/x": "b", "a/b/x": "..", "a/b/y": "../.."},
    "one to itself": {"a/x": "x", "a/b/x.txt": "x.txt"},
    "a diamond": {"x": "a", "y": "a", "a/x": "b", "a/y": "b"},
    "files twice": {"a/b/h.txt": "f.txt", "h.txt": "a/g.txt"},
    "thirty to the root": {f"a/{i}": ".." for i in range(30)},
}


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "**/**", "a/**/*.txt", "**/*/**", "*/**/b/**/*"])
@pytest.mark.parametrize("case", LINKS)
def test_a_file_is_read_once_whatever_links_lead_to_it(case, pattern, tmp_path):
    """`**` follows none: of two that lead back the paths would double with each level."""
    make_links(tmp_path / "in", LINKS[case])
    source = sources_module.Source(path=str(tmp_path / "in" / pattern))
    reader = sources_module.SourceReader(0, source, 100)
    read = [raw.data.decode() for raw in reader.documents() if not raw.problem]
    assert sorted(read) == sorted({*read}) and {*read} <= {"f", "g"} and "f" in read


def test_directories_may_be_nested_deeper_than_python_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limit = sys.getrecursionlimit()
    try:
        for _ in range(300):
            os.mkdir("d")
            os.chdir("d")
        Path("a.txt").write_text("deep")
        os.chdir(tmp_path)
        sys.setrecursionlimit(len(inspect.stack()) + 200)
        for pattern in ("", "**/*.txt"):
            reader = sources_module.SourceReader(0, sources_module.Source(path=f"d/{pattern}"), 100)
            assert [raw.data for raw in reader.documents()] == [b"deep"], pattern
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("moment", ["size", "documents"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz"])
def test_a_source_that_is_removed_once_it_was_found_is_told(name, moment, tmp_path):
    (tmp_path / name).write_bytes(b"text")
    reader = sources_module.SourceReader(0, sources_module.Source(path=str(tmp_path)), 100)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: cannot be read: No such file.* Put it back, or leave it out of so"):
        _ = reader.size if moment == "size" else [*reader.documents()]


@pytest.mark.parametrize("after", ["check_steps", "open_evaluation_texts", "identify", "open_sources"])
@pytest.mark.parametrize("leaks", [{"files": ["leaks"]}, {"titles": "leaks"}, {"titles": "leaks", "files": ["leaks"]}])
def test_what_is_removed_between_two_passes_is_told(leaks, after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "leaks"):
        Path(name).write_text("text")
    owner = pipeline.clean if after == "check_steps" else pipeline
    function = getattr(owner, after)

    def remove_after(*arguments):
        returned = function(*arguments)
        Path("leaks").unlink()
        return returned

    monkeypatch.setattr(owner, after, remove_after)
    expected = (
        pytest.raises(DataError, match="leaks") if "files" in leaks else nullcontext()
    )  # titles are known by then
    with expected:
        make(Path("out"), "a.txt", steps={"leaks": leaks})


@pytest.mark.parametrize("source", ["", "**/*.json*"])
def test_what_it_writes_is_none_of_its_sources(source, tmp_path, monkeypatch):
    """OUT is in the directory that is read, and the start is a second one."""
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in/a.jsonl", [{"text": "one"}])
    (tmp_path / "link").symlink_to("in")
    source, out = str(tmp_path / "link" / source), tmp_path / "in/out"

    def stop(*_):
        raise InterruptedError

    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr("spmd_lm.prepare.pipeline.write_stage", stop)  # all is read, and not told so
        make(out, source)
    make(out, source)
    assert texts(out) == ["one"]


def test_parquet(tmp_path):
    source = write_parquet(
        tmp_path / "a.parquet", {"text": ["one\n", "two", None, "four"], "title": ["a", "b", "c", "d"]}
    )
    (tmp_path / "titles").write_text("B")
    report = make(tmp_path / "out", source, steps={"leaks": {"titles": str(tmp_path / "titles")}})
    assert texts(tmp_path / "out") == ["one\n", "four"]
    assert [each["reasons"] for each in report["steps"]] == [{"no text under 'text'": 1}, {"title": 1}]
    assert report["sources"][0]["sha256"] == hashlib.sha256((tmp_path / "a.parquet").read_bytes()).hexdigest()
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body', but text, title\. Set text in sources\[0\]="):
        make(tmp_path / "other", [{"path": source, "text": "body"}])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    report = make(tmp_path / "third", [str(tmp_path / "b.parquet"), source])
    assert report["steps"][0]["reasons"]["damaged parquet"] == 1 and len(texts(tmp_path / "third")) == 3


def test_the_library_of_parquet_is_that_of_this_process(tmp_path, monkeypatch):
    (tmp_path / "arro3").mkdir()
    (tmp_path / "arro3" / "io.py").write_text("def read_parquet(*_, **__):\n    raise ValueError('found')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with open(__file__, "rb") as file, pytest.raises(ParquetError, match="found"):
        list(read_rows(file, "text", "title", 100))


def test_standard_input(tmp_path):
    (tmp_path / "r.yaml").write_text("sources: [{path: '-'}]\nout: out\nworkers: 2\nsplit: {validation: 0.0}\n")
    environment = {"PYTHONPATH": str(Path(spmd_lm.__file__).parents[1])}
    given = b'{"text": "one"}\n{"text": 1}\n'
    command = [sys.executable, "-m", "spmd_lm", "prepare", "r.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        texts(tmp_path / "out") == ["one"] and b"bad input: <stdin>:2: no text under 'text' (not text)" in done.stdout
    )


def test_a_hugging_face_data_set(tmp_path, monkeypatch):
    """A fake library records the call and gives the rows."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"body": "one", "title": "t"}, {"body": None}, {"body": "two"}])

    def load_from_disk(path):
        return {"train": [{"body": path[-4:]}]}

    library = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", library)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/dataset_dict.json").write_text("{}")
    given = [
        {"dataset": "some/thing", "name": "en", "split": "validation", "text": "body"},
        {"dataset": str(tmp_path / "disk"), "text": "body"},
    ]
    report = make(tmp_path / "out", given)
    assert asked == [
        (("some/thing", "en"), {"split": "validation", "streaming": True})
    ]  # and no code of the data set's
    assert texts(tmp_path / "out") == ["one", "two", "disk"]
    assert report["sources"][0] == {"dataset": "some/thing", "name": "en", "split": "validation"}


def test_files_of_a_directory_that_are_not_read_are_told(tmp_path):
    """Reports name them; the manifest has the same bytes with and without them."""
    for name in ("a.txt", "b.tex", "c.tex", "d.tar.gz", "Makefile", ".hidden.tex"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("text")
    report = make(tmp_path / "out", tmp_path / "in")
    unread = {"path": str(tmp_path / "in"), "files": 4, "suffixes": {".tex": 2, ".tar.gz": 1, "no suffix": 1}}
    assert report["not_read"] == [unread] == json.loads((tmp_path / "out/report.json").read_text())["not_read"]
    line = f"not read: {tmp_path / 'in'}: 4 files: .tex 2, no suffix 1, .tar.gz 1. Name them by a glob."
    assert line in render_report(report).splitlines()
    assert "not_read" not in json.loads((tmp_path / "out/manifest.json").read_text())


def test_sources_and_files_that_nothing_was_read_of_are_told(tmp_path):
    """Empty ones are not: they have nothing to read."""
    (tmp_path / "in").mkdir()
    good = write_lines(tmp_path / "in/good.jsonl", [{"text": "one"}])
    bad = write_lines(tmp_path / "in/bad.jsonl", [{"id": "1", "article": "a text", "questions": []}] * 2)
    (tmp_path / "empty.txt").write_text("")
    report = make(tmp_path / "out", [str(tmp_path / "in"), bad, good, str(tmp_path / "empty.txt")])
    why = "not one document of it was read: no text under 'text' (it has id, article, questions: write {path:"
    assert report["warnings"] == [
        f"{bad}: {why} {tmp_path / 'in'}, text: article}}).",
        f"{bad}: {why} {bad}, text: article}}).",
    ]
    assert render_report(report).splitlines()[-1] == f"warning: {report['warnings'][1]}"
    report = make(tmp_path / "two", write_lines(tmp_path / "one.jsonl", [{"text": "1"}]), split={"validation": 0.001})
    assert report["warnings"][0] == "no document is in the split train. Name more sources."


def test_a_data_set_that_cannot_be_loaded_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    def load_dataset(*_, **options):
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "r.yaml").write_text(f"sources: [{{dataset: some/thing}}]\nout: {tmp_path}/out\nworkers: 1\n")
    assert main(["prepare", str(tmp_path / "r.yaml")]) == Exit.DATA
    told = capsys.readouterr().err
    cause = "cannot be loaded: ConnectionError: Couldn't reach the Hub. Look for its id"
    assert f"error: sources[0]=some/thing: {cause}" in told and "Traceback" not in told


def test_keys_of_a_data_set_without_the_text_are_told(tmp_path, monkeypatch):
    rows = [{"body": "one"}]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **options: iter(rows)))
    with pytest.raises(DataError, match=r"\(it has body: write \{dataset: some/thing, text: body\}\)"):
        make(tmp_path / "out", [{"dataset": "some/thing"}])
