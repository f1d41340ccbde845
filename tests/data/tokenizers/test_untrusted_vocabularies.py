"""Vocabularies that others made: refused with a sentence, whatever is in them, and never a way to other files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_lm.data.tokenizers import trial
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary
from spmd_lm.errors import DataError
from tests.data.tokenizers.test_subwords import byte_level, wordpiece
from tests.reliability import test_untrusted

at_once, victim = test_untrusted.at_once, test_untrusted.victim


def refused(name: Path) -> str:
    with pytest.raises(DataError) as error:
        SubwordTokenizer(str(name))
    assert len(str(error.value)) < 1000
    return str(error.value)


def test_a_vocabulary_leads_nowhere_else(tmp_path, victim):
    source = tmp_path / "source"
    source.mkdir()
    byte_level(source)
    (source / "merges.txt").unlink()
    (source / "merges.txt").symlink_to(victim)
    for name in (source, source / "vocab.json"):
        said = refused(name)
        assert f"{source}/merges.txt: it is a link out of {source}, to {victim}: copy the file there." in said
        with pytest.raises(DataError, match="it is a link out of"):
            copy_vocabulary(str(name), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    (source / "merges.txt").unlink()
    (source / "other").write_text("#version: 0.2\nb c\n")
    (source / "merges.txt").symlink_to("other")
    SubwordTokenizer(str(source))
    (tmp_path / "named").symlink_to(source / "vocab.json")  # what the user names may lead anywhere
    assert "merges.txt: no such file" in refused(tmp_path / "named")


def test_the_cache_of_the_hub_is_made_of_links(tmp_path, victim):
    model = tmp_path / "models--org--name"
    snapshot, blobs = model / "snapshots" / "0123", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    byte_level(blobs)
    for name in ("vocab.json", "merges.txt"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    SubwordTokenizer(str(snapshot))
    copy_vocabulary(str(snapshot), tmp_path / "copy")
    assert not (tmp_path / "copy" / "merges.txt").is_symlink()
    (snapshot / "tokenizer_config.json").symlink_to(victim)
    assert "it is a link out of" in refused(snapshot)


LETTERS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZERS = {
    "deep": "[" * 100_000,
    "deep objects": '{"model":' * 30_000,
    "empty": "",
    "a list": "[]",
    "null": "null",
    "text that is no UTF-8": b'{"model": {"a\xff": 1}}',
    "merges of numbers": {"model": LETTERS | {"merges": [[1, 2]]}},
    "merges of other tokens": {"model": LETTERS | {"merges": [["a", "c"]]}},
    "huge ids": {"model": LETTERS | {"vocab": {"a": 10**18}}},
    "the largest id": {"model": LETTERS | {"vocab": {"a": 2**32 - 1, "b": 1, "ab": 2}}},
    "negative ids": {"model": LETTERS | {"vocab": {"a": -1}}},
    "fractions": {"model": LETTERS | {"vocab": {"a": 1.5}}},
    "the same id twice": {"model": LETTERS | {"vocab": {"a": 1, "b": 1, "ab": 2}}},
    "no tokens": {"model": LETTERS | {"vocab": {}, "merges": []}},
    "a prefix, which ends the process": {
        "model": LETTERS
        | {"continuing_subword_prefix": "#", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": [["a", "é"]]}
    },
    "a prefix, which panics": {"model": LETTERS | {"continuing_subword_prefix": "#####"}},
    "a table, which panics": {"model": LETTERS, "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "an expression": {"model": LETTERS, "pre_tokenizer": SPLIT | {"pattern": {"Regex": "("}}},
    "an expression without end": {"model": LETTERS, "pre_tokenizer": SPLIT | {"pattern": {"Regex": "(a+)+$"}}},
    "text that doubles 40 times": {
        "model": LETTERS,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
        },
    },
}


@pytest.mark.parametrize("content", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(tmp_path, capfd, content):
    text = json.dumps({"version": "1.0", "added_tokens": []} | content) if isinstance(content, dict) else content
    (tmp_path / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"{tmp_path}/tokenizer.json: " in refused(tmp_path)
    assert capfd.readouterr() == ("", "")  # no panic of Rust either


def test_a_text_that_a_tokenizer_cannot_encode_is_told(tmp_path):
    plan = {"version": "1.0", "added_tokens": [], "model": {"type": "WordPiece", "unk_token": "[UNK]"}}
    plan["model"] |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9, "vocab": {"a": 0}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plan))
    tokenizer = SubwordTokenizer(str(tmp_path))
    assert tokenizer.encode("a").tolist() == [0]
    with pytest.raises(DataError, match=r"cannot encode 'b': .*Missing \[UNK\] token"):
        tokenizer.encode("b")


def test_a_stop_does_not_make_a_tokenizer_a_bad_one(tmp_path):
    """A launcher may send SIGTERM to every process of a job."""
    child = subprocess.Popen([sys.executable, "-P", trial.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    while not int(ignored_signals(child.pid), 16) >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.communicate(b"{")[0].startswith(b"EOF while parsing") and child.returncode == 1


def ignored_signals(pid: int) -> str:
    """The mask, in hexadecimal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("SigIgn:"))


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "tokenizer_config.json"])
@pytest.mark.parametrize("what", ["a pipe", "a device", "a directory", "a large file"])
def test_a_vocabulary_that_is_no_file_is_refused(tmp_path, name, what):
    (wordpiece if name in ("vocab.txt", "tokenizer_config.json") else byte_level)(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    elif what == "a device":
        path.symlink_to("/dev/zero")
    else:
        with open(path, "wb") as file:
            file.truncate(10**8)
    if name == "tokenizer.json" and what != "a large file":
        return  # not used: there is a vocab.json
    assert len(refused(tmp_path if name != "vocab.txt" or what == "a large file" else path)) > 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"do_lower_case": "yes"}'),
        ("tokenizer_config.json", '{"strip_accents": 2}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "[" * 100_000),
        ("vocab.txt", "[UNK]\n" * 2_000_000),
        ("vocab.txt", ""),
        ("vocab.txt", "[UNK]\n\x00"),
    ],
)
def test_settings_and_word_lists_of_wrong_types(tmp_path, name, content):
    wordpiece(tmp_path)
    (tmp_path / name).write_text(content)
    if content.endswith("\x00"):
        SubwordTokenizer(str(tmp_path))
    else:
        assert f"{tmp_path}/{name}: " in refused(tmp_path)


@pytest.mark.parametrize("ids", ['{"a": true}', '{"a": 1e18}', '{"a": -1}', '{"a": 4294967296}', '{"a": NaN}'])
def test_ids_of_wrong_types(tmp_path, ids):
    byte_level(tmp_path)
    (tmp_path / "vocab.json").write_text(ids)
    assert f"{tmp_path}/vocab.json: " in refused(tmp_path)


def test_names_that_no_file_has(tmp_path):
    for name in ("x" * 300, "~nobody-of-this-name/x", "a\0b"):
        assert f"data.tokenizer={name}: " in refused(Path(name))
