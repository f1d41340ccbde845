"""Input that is no document is counted with its place, or ends with it; the rest is as if it had not been there."""

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.cli import main
from spmd_lm.errors import DataError, Exit, OutputError
from spmd_lm.prepare import streams
from spmd_lm.runtime import outputs
from tests.prepare.corpora import make, sentence, step, texts, write_parquet

GOOD = [json.dumps({"text": text}).encode() for text in ("first", "last")]
DEEP = b"[" * 100_000
LINES = {  # a line of JSON, and the reason that is told
    "invalid UTF-8": (b'{"text": "\xff\xfe"}', "not UTF-8"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "not UTF-8"),
    "NUL": (b'{"text": "a\\u0000b"}', "a NUL character"),
    "broken JSON": (b'{"text": "a', "not JSON"),
    "deep JSON": (DEEP, "not JSON"),
    "long number": (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
    "list": (b'["text"]', "not a JSON object"),
    "missing key": (b'{"body": "a"}', "no text under 'text'"),
    "null": (b'{"text": null}', "no text under 'text'"),
    "number": (b'{"text": 3}', "no text under 'text'"),
    "long line": (b'{"text": "' + b"a" * 200_000 + b'"}', "longer than 150,000 bytes"),
    "many values": (b'{"text": "a", "b": [' + b"0," * 4_000_000 + b"0]}", "longer than 150,000 bytes"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_is_skipped_and_counted_or_ends_it(case, tmp_path):
    line, reason = LINES[case]
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"\n".join([GOOD[0], line, GOOD[1], b""]))
    report = make(tmp_path / "skip", source, max_document_bytes=150_000)
    assert texts(tmp_path / "skip") == ["first", "last"]
    assert step(report, "read") == {"name": "read", "in": 3, "out": 2, "reasons": {reason: 1}}
    assert report["bad"][0].startswith(f"{source}:2: {reason}") and len(report["bad"][0]) < 300
    with pytest.raises(DataError, match=rf"a\.jsonl:2: {reason}.*\. Mend it, or set on_bad=skip\.$"):
        make(tmp_path / "error", source, max_document_bytes=150_000, on_bad="error")
    assert not (tmp_path / "error/manifest.json").exists()


def test_a_line_of_ten_megabytes_is_a_document_within_the_limit(tmp_path):
    long = sentence(0, 2_000_000)[: 10 * 2**20]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": long}) + "\n")
    make(tmp_path / "out", tmp_path / "a.jsonl", steps={"near_duplicates": True, "exact_duplicates": True})
    assert texts(tmp_path / "out") == [long]


FILES = {  # of text
    "invalid UTF-8": (b"caf\xe9", "not UTF-8"),
    "UTF-16": ("text".encode("utf-16"), "not UTF-8"),
    "NUL": (b"a\0b", "a NUL character"),
    "long": (b"a" * 151, "longer than 150 bytes"),
    "empty": (b"", "empty"),
    "white space": (b" \n", "empty"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_skipped_and_counted(case, tmp_path):
    content, reason = FILES[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.txt").write_bytes(content)
    (tmp_path / "in/c.txt").write_text("good")
    report = make(tmp_path / "out", tmp_path / "in", max_document_bytes=150)
    assert texts(tmp_path / "out") == ["good"] and step(report, "read")["reasons"] == {reason: 1}
    if reason != "empty":
        with pytest.raises(DataError, match=rf"in/b\.txt: {reason}"):
            make(tmp_path / "error", tmp_path / "in", max_document_bytes=150, on_bad="error")


@pytest.mark.parametrize(
    ("first", "expected"),
    {
        b"abc": b"abc",
        b"abc\r": b"abc",
        b"abc\r\r": b"abc",
        b"abc" + b"\r" * 2**20: b"abc",
        b"abcd": None,
        b"abc\r\rd": None,
        b"abc\r\r\r" + b"d" * 2**20: None,
        b"abc" + b"\r" * 2**20 + b"d": None,
    }.items(),
)
def test_a_line_is_measured_without_its_end(first, expected):
    lines = list(streams.documents_of_lines(io.BytesIO(first + b"\nxy\nz"), 3, per_line=True))
    assert [(number, line and line.rstrip(b"\r\n")) for number, line in lines] == [(1, expected), (2, b"xy"), (3, b"z")]


def test_byte_order_marks_go_and_lines_end_in_a_line_feed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (tmp_path / "in/b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "\xef\xbb\xbffour\\r\\nfive"}\r\n\r\n')
    make(tmp_path / "out", tmp_path / "in")
    assert texts(tmp_path / "out") == ["one\ntwo\nthree\n", "four\nfive"]


def test_a_source_without_documents_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    for source, problem in [("a.jsonl", "no document in"), ("b.jsonl", "no such file"), (".", "no file in this")]:
        path = tmp_path / source if source != "." else tmp_path / "empty"
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(DataError, match=problem):
            make(tmp_path / "out", path)


BOMB_BYTES = 150_000_000


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress(content)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("per", ["file", "line"])
def test_a_compressed_bomb_is_never_in_memory(suffix, per, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / f"in/a.txt{suffix}").write_bytes(compressed(b"a" * BOMB_BYTES + b"\n", suffix))
    (tmp_path / "in/b.txt").write_text("good")
    tracemalloc.start()
    report = make(tmp_path / "out", [{"path": str(tmp_path / "in"), "per": per}], max_document_bytes=100_000)
    assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES // 2
    tracemalloc.stop()
    assert texts(tmp_path / "out") == ["good"] and step(report, "read")["reasons"] == {"longer than 100,000 bytes": 1}


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "not compressed"])
def test_a_damaged_file_is_read_up_to_there(suffix, damage, tmp_path):
    lines = b"".join(json.dumps({"text": sentence(seed, 200)}).encode() + b"\n" for seed in range(300))
    content = bytearray(compressed(lines, suffix))
    if damage == "truncated":
        del content[len(content) * 2 // 3 :]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        content = bytearray(lines)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(GOOD[0])
    sources = [str(tmp_path / f"a.jsonl{suffix}"), str(tmp_path / "b.jsonl")]
    report = make(tmp_path / "out", sources)
    reasons = step(report, "read")["reasons"]
    assert f"damaged {suffix[1:]}" in reasons and texts(tmp_path / "out")[-1] == "first"


def test_what_decompresses_is_what_was_compressed(tmp_path):
    """Two frames follow each other, as `cat` joins them."""
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.txt{suffix}"
        path.write_bytes(compressed(b"one ", suffix) + compressed(b"two" * 100_000, suffix))
        with open(path, "rb", buffering=0) as file:
            read = streams.decompressed(streams.HashingFile(file, [].append), suffix).read()
        assert zlib.crc32(read) == zlib.crc32(b"one " + b"two" * 100_000)


def footer(metadata: bytes) -> bytes:
    return b"PAR1" + metadata + len(metadata).to_bytes(4, "little") + b"PAR1"


def varint(number: int) -> bytes:
    parts = [number >> shift & 127 for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(part | 128 for part in parts[:-1]), parts[-1]])


SCHEMA = b"\x19\x2c\x48\x04root\x15\x02\x00\x15\x0c\x25\x00\x18\x04text\x00"  # a root, and a column of text
HOSTILE = {  # metadata in Thrift's compact protocol, unless they are no Parquet at all
    "2**31 - 1 elements of a schema": footer(b"\x15\x02\x19\xfc" + varint(2**31 - 1) + bytes(48)),
    "2**24 elements of a schema": footer(b"\x15\x02\x19\xfc" + varint(2**24) + bytes(48)),
    "2**31 - 1 row groups": footer(b"\x15\x02" + SCHEMA + b"\x16\x02\x19\xfc" + varint(2**31 - 1) + bytes(9)),
    "a name of 2**62 bytes": footer(b"\x15\x02\x19\x1c\x48" + varint(2**62) + bytes(30)),
    "structures in structures": footer(b"\x1c" * 100_000),
    "a child that is its own parent": footer(b"\x15\x02\x19\x1c\x48\x04root\x15\x02\x00" + bytes(9)),
    "a footer longer than the file": b"PAR1" + b"\xff\xff\xff\x7fPAR1",
    "two marks": b"PAR1PAR1",
    "nothing": b"",
    "text": b"text" * 10,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_parquet_file_is_damaged_and_no_more(case, tmp_path):
    (tmp_path / "a.parquet").write_bytes(HOSTILE[case])
    (tmp_path / "b.txt").write_text("good")
    report = make(tmp_path / "out", tmp_path, max_document_bytes=100_000)
    assert texts(tmp_path / "out") == ["good"]
    assert case == "nothing" or step(report, "read")["reasons"] == {"damaged parquet": 1}


@pytest.mark.parametrize("damage", ["flipped", "cut", "zeros"])
def test_a_parquet_file_that_was_damaged_at_random_ends_nothing(damage, tmp_path):
    intact = Path(write_parquet(tmp_path / "a.parquet", {"text": [sentence(seed, 40) for seed in range(20)]}))
    draw, content = random.Random(damage), intact.read_bytes()
    intact.unlink()
    for i in range(6):
        at = draw.randrange(len(content) - 200, len(content) - 8) if i % 2 else draw.randrange(len(content))
        ways = {
            "flipped": content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            "cut": content[:at] + content[at + draw.randrange(1, 60) :],
            "zeros": content[:at] + bytes(20) + content[at + 20 :],
        }
        (tmp_path / f"{i}.parquet").write_bytes(ways[damage])
    (tmp_path / "b.txt").write_text("good")
    make(tmp_path / "out", tmp_path)
    assert texts(tmp_path / "out")[-1] == "good"


def test_rows_of_parquet_are_in_memory_one_at_a_time(tmp_path):
    """A file of 90 kB has 1.3 GB of rows; those that are too long are bad input."""
    rows = [chr(97 + i % 26) * 5_000_000 for i in range(40)]
    source = write_parquet(tmp_path / "a.parquet", {"text": [*rows, "good"]}, "zstd(1)")
    assert os.path.getsize(source) < 50_000
    tracemalloc.start()
    report = make(tmp_path / "out", source, max_document_bytes=10_000)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    assert texts(tmp_path / "out") == ["good"]
    assert step(report, "read")["reasons"] == {"longer than 10,000 bytes": 40}


LONGEST = 2**22  # bytes of a document
LONG = {  # of which there is the most to keep: words of one letter, of few and of many kinds
    "one word": lambda: b"a " * (LONGEST // 2),
    "many words": lambda: np.random.default_rng(0).choice(np.frombuffer(b"abcdefghijkl  ", "u1"), LONGEST).tobytes(),
    "lines": lambda: b"a\n" * (LONGEST // 2),
    "no word": lambda: b". " * (LONGEST // 2),
}


@pytest.mark.parametrize("role", ["document", "evaluation text"])
@pytest.mark.parametrize("case", LONG)
def test_a_process_takes_14_times_its_longest_document(case, role, tmp_path):
    """docs/prepare.md promises this, besides what it has before."""
    for name in ("document", "evaluation text"):
        (tmp_path / f"{name}.txt").write_bytes(LONG[case]() if name == role else b"z y x " * 9)
    (tmp_path / "short.txt").write_text("short")
    steps = {"leaks": {"files": [str(tmp_path / "evaluation text.txt")]}, "near_duplicates": True}
    make(tmp_path / "first", tmp_path / "short.txt", steps=steps, max_document_bytes=LONGEST)  # tables for all
    tracemalloc.start()
    split = {"validation": 0.01, "test": 0.01}  # which divide it
    make(tmp_path / "out", tmp_path / "document.txt", steps=steps, max_document_bytes=LONGEST, split=split)
    assert tracemalloc.get_traced_memory()[1] < 14 * LONGEST
    tracemalloc.stop()


@pytest.mark.parametrize("line", [b"[],", b'"",', b"{},", b'{"a":0},', b"[[[0]]],"])
def test_an_evaluation_text_of_many_values_is_refused_before_it_is_parsed(line, tmp_path):
    (tmp_path / "eval.jsonl").write_bytes(b'{"text": [' + line * 4_000_000 + b"0]}")
    (tmp_path / "a.txt").write_text("text")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"eval\.jsonl:1: steps\.leaks\.files: it has more than 3,000,000 values"):
        make(tmp_path / "out", tmp_path / "a.txt", steps={"leaks": {"files": [str(tmp_path / "eval.jsonl")]}})
    assert tracemalloc.get_traced_memory()[1] < 200_000_000
    tracemalloc.stop()


def test_a_link_out_of_a_directory_is_not_followed(tmp_path):
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "in/b.txt").symlink_to(tmp_path / "elsewhere/a.txt")
    (tmp_path / "in/c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/.hidden.txt").write_text("hidden")
    report = make(tmp_path / "out", tmp_path / "in")
    assert texts(tmp_path / "out") == ["in"]
    assert step(report, "read")["reasons"] == {"a link out of the directory": 1}


def test_text_of_a_wrong_encoding_is_repaired(tmp_path):
    pytest.importorskip("ftfy")
    given = [
        b'{"text": "caf\xe9"}',
        b'{"text": "caf\xc3\x83\xc2\xa9"}',
        b'{"text": "a\\u0000b"}',
        b'{"text": "fine \xe2\x80\x9cq\xe2\x80\x9d"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(given))
    report = make(tmp_path / "out", tmp_path / "a.jsonl", steps={"utf8": "repair"})
    assert texts(tmp_path / "out") == ["café", "café", "ab", "fine “q”"]
    assert step(report, "utf8") == {"name": "utf8", "in": 4, "out": 4, "reasons": {"repaired": 3}}


@pytest.mark.parametrize("module", ["ftfy", "zstandard", "datasets"])
def test_what_is_not_installed_is_named(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.jsonl").write_bytes(GOOD[0])
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    source = {"zstandard": str(tmp_path / "a.jsonl.zst"), "datasets": "{dataset: some/thing}"}
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"sources: [{source.get(module, tmp_path / 'a.jsonl')}]\nout: {tmp_path / 'out'}\n")
    steps = ["steps.utf8=repair"] if module == "ftfy" else []
    assert main(["prepare", str(recipe), "workers=1", *steps]) == Exit.CONFIG
    told = capsys.readouterr().err
    assert f"{module}" in told and "is not installed. Run pip install" in told and told.count("\n") == 1


def test_a_full_disk_ends_in_a_line_and_leaves_no_half_file(tmp_path, monkeypatch):
    """The file size limit stands for it: EFBIG is what ENOSPC is."""
    (tmp_path / "a.txt").write_text(sentence(0, 100_000))
    (tmp_path / "r.yaml").write_text("sources: [a.txt]\nout: out\nworkers: 1\nsplit: {validation: 0.0}\n")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "from spmd_lm.cli import main; raise SystemExit(main(['prepare', 'r.yaml']))"
    )
    path = str(Path(outputs.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],  # a module's bytecode would be cut short too, for all who import it later
        cwd=tmp_path,
        env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},  # that would be cut short too
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == OutputError.code and "File too large" in done.stderr and "Traceback" not in done.stderr
    files = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not files
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "r.yaml"]) == 0 and len(texts(tmp_path / "out")) == 1


def test_where_no_document_is_left_it_says_why_and_leaves_nothing(tmp_path):
    """Nothing hinders a second run of the command, once its source is mended."""
    source = tmp_path / "race.jsonl"
    source.write_text('{"article": "An article.", "questions": ["q"]}\n' * 3)
    with pytest.raises(DataError) as told:
        make(tmp_path / "out", source)
    why = f"no text under 'text' (it has article, questions: write {{path: {source}, text: article}})"
    bad = "".join(f"; {source}:{line}: {why}" for line in (1, 2, 3))
    removed = "read removed 3 (no text under 'text' 3)"
    assert str(told.value) == f"sources: no document is left of 3: {removed}{bad}. Mend the sources."
    right = {"path": str(source), "text": "article"}
    for tokenizer in ({"train": "bpe", "vocab_size": 300}, "bytes"):
        with pytest.raises(
            DataError, match=r"min_tokens removed 3 \(fewer than 99 tokens 3\)\. Lower steps\.min_tokens"
        ):
            make(tmp_path / "out", [right], steps={"min_tokens": 99}, tokenizer=tokenizer)
        assert [path.name for path in tmp_path.iterdir()] == ["race.jsonl"]
    with pytest.raises(DataError, match="no document is in the training split"):
        make(tmp_path / "out", [right], split={"validation": 0.999}, tokenizer={"train": "bpe", "vocab_size": 300})
    make(tmp_path / "out", [right])
    assert texts(tmp_path / "out") == ["An article."] * 3
