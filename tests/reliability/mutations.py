"""Changes to files, as accidents and enemies make them, each chosen by hypothesis, which can then make it smaller."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Choose = Callable[[st.SearchStrategy], Any]

DEEP = 100_000
NUMBERS = [
    "1e17",
    str(2**31),
    str(2**63),
    str(2**64),
    "-1",
    "0",
    "1e-320",
    "1e999",
    "0.5",
    "1" * 400,
    "1" * 5000,
    "true",
    "3",
]
TEXTS = ["", "x", "/", "../../x", "\0", "\ud800", "é" * 200, "a" * 70_000, "${HOME}", "~root/x", "~nobody-there/x"]
TEXTS += ["file:///etc/passwd", "<script>", "%s{0}", "*", "-1", "1e5", "$(touch x)"]
JSON_VALUES = [
    *NUMBERS,
    "null",
    "NaN",
    "-Infinity",
    "[]",
    "{}",
    "[[[1]]]",
    '{"a": {"b": 1}}',
    "[" * DEEP,
    '{"a":' * DEEP,
]
JSON_VALUES += ["[" * n + "]" * n for n in (500, 900)] + ['{"a":' * n + "1" + "}" * n for n in (300, 900)]
JSON_VALUES += [json.dumps(text) for text in TEXTS]
YAML_VALUES = [
    *NUMBERS,
    ".nan",
    "-.inf",
    "null",
    "[]",
    "{}",
    "[[[]]]",
    "[" * 3000,
    "'1'",
    "0x10",
    "1_000",
    "1:30",
    "yes",
]
YAML_VALUES += [
    "!!binary aGk=",
    "!!binary é",
    "!!timestamp 2001-01-01",
    "!!timestamp x",
    "!!set {a, b}",
    "!!omap [a: 1]",
]
YAML_VALUES += [
    "!!omap 1",
    "!!pairs [a: 1]",
    "!!set [a]",
    "!!python/object/apply:os.system [x]",
    "!!python/name:os.system",
]
YAML_VALUES += ["!!python/tuple [1]", "!!int 0b1", "!!int x", "!!float 1e9999", "!!float x", "!!bool x", "!!null x"]
YAML_VALUES += ["!!str {a: 1}", "!!seq a", "!!map [a]", "!local 1", "!<tag:yaml.org,2002:int> x", "&a [*a]", "*nothing"]
YAML_VALUES += ["{<<: 3}", "{<<: [1]}", "{? [a] : 1}", "{? {a: 1} : 1}", "{1: 2, null: 3}", "2001-01-01", "2001-13-45"]
YAML_VALUES += [
    "{a: 1, a: 2}",
    "| \n  x",
    "> ",
    "'",
    '"\\ud800"',
    '"\\x00"',
    "@x",
    "%x",
    "`",
    "- 1",
    "---",
    "!!merge x",
]
YAML_VALUES += [text if text.isprintable() and text else json.dumps(text) for text in TEXTS]
YAML_LINES = ["base: loop.yaml", "base: ../../../../etc/passwd", "base: /dev/zero", "base: /etc/hostname", "base: pipe"]
YAML_LINES += ["base: file:///etc/passwd", "base: [a]", "base: .", "base: ''", "base: 1", 'base: "\\0"', "base: link"]
YAML_LINES += [
    "<<: {model: 1}",
    "x: &x {y: 1}",
    "  <<: *x",
    "model:",
    "train: {}",
    "---",
    "...",
    "%YAML 1.3",
    "\t",
    "- a",
]
YAML_LINES += [
    "? a",
    "run: {dir: '*'}",
    "run: {init_from: .}",
    "run: {init_from: /dev}",
    "data: {source: text, path: /}",
]
BYTES = [
    b"\0",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n",
    b"\t",
    b"{",
    b"]",
    b'"',
    b":",
    b"#",
    b"&",
    b"\xed\xa0\x80",
    b"\x85",
]

small = st.integers(0, 40)


def change_bytes(choose: Choose, data: bytes) -> bytes:
    """Noise, a part that is missing or there twice, or another encoding."""
    kind = choose(st.sampled_from(["insert", "insert", "flip", "cut", "truncate", "double", "encode", "replace"]))
    at = choose(st.integers(0, len(data)))
    if kind == "insert":
        return data[:at] + choose(st.sampled_from(BYTES)) * choose(st.sampled_from([1, 1, 2, 1000])) + data[at:]
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << choose(st.integers(0, 7))]) + data[at + 1 :]
    if kind == "cut":
        return data[:at] + data[at + 1 + choose(small) :]
    if kind == "truncate":
        return data[:at]
    if kind == "double":
        return data[:at] + data[at:] * 2
    if kind == "encode":
        text = data.decode("utf-8", "replace")
        how = choose(st.sampled_from(["utf-16", "utf-8-sig", "utf-32-le", "utf-7", "crlf"]))
        return text.replace("\n", "\r\n").encode() if how == "crlf" else text.encode(how)
    return choose(
        st.sampled_from([b"", b"\n", b"null", b"[]", b"{}", b"1", b'"a"', b"\0" * 4096, b"[" * DEEP, b"a\n" * 9999])
    )


def change_json(choose: Choose, data: bytes) -> bytes:
    """Another value, a key that is gone, renamed or there twice, somewhere in it."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(choose, data)
    mark, place = "\x01", [tree]
    parent, key = place, 0
    while True:
        parent, key = place, choose(st.sampled_from([*(place if isinstance(place, dict) else range(len(place)))]))
        place = place[key]
        if not isinstance(place, dict | list) or not place or choose(small) < 8:
            break
    kind = choose(st.sampled_from(["value", "value", "value", "delete", "rename", "twice", "wrap"]))
    value = choose(st.sampled_from(JSON_VALUES))
    if kind == "delete" and parent is not None and len(parent) > 1:
        del parent[key]
        return json.dumps(tree).encode()
    if kind == "rename" and isinstance(parent, dict):
        parent[choose(st.sampled_from(TEXTS))] = parent.pop(key)
        return json.dumps(tree).encode()
    if kind == "twice" and isinstance(parent, dict):
        value = f"{json.dumps(place)}, {json.dumps(key)}: {value}"
    if kind == "wrap":
        value = f"[{json.dumps(place)}]"
    parent[key] = mark
    text = json.dumps(tree if parent is not None else mark)
    return text.replace(json.dumps(mark), value).encode("utf-8", "surrogatepass")


def change_lines(choose: Choose, data: bytes, values: list[str], more: list[str]) -> bytes:
    """Removes, moves or repeats a line, or changes its key or value."""
    lines = data.decode("utf-8", "replace").split("\n")
    at = choose(st.sampled_from([i for i, line in enumerate(lines) if not line.startswith("#")] or [0]))
    rarely = ["key", "delete", "twice", "move", "insert", "indent"]
    kind = choose(st.sampled_from(["value"] * 2 + ["number"] * 4 + rarely))
    head, colon, _ = lines[at].partition(":")
    if kind == "value" and colon:
        lines[at] = f"{head}: {choose(st.sampled_from(values))}"
    elif kind == "number":
        lines[at] = re.sub(r"\d+", choose(st.sampled_from(["1", "2", "3", "8", "64", "1000", "100000"])), lines[at])
    elif kind == "key" and colon:
        lines[at] = lines[at].replace(
            head.strip(), choose(st.sampled_from(["x", "1", "null", "[a]", "<<", "'base'", "kind"]))
        )
    elif kind == "delete":
        del lines[at]
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "move":
        lines.insert(choose(st.integers(0, len(lines) - 1)), lines.pop(at))
    elif kind == "indent":
        lines[at] = choose(st.sampled_from(["  ", " ", "\t", "- "])) + lines[at]
    else:
        lines.insert(at, choose(st.sampled_from(more)))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def change_file(choose: Choose, path: Path) -> None:
    """Replaces a file by something that is no file, is gone, or is longer than any memory."""
    path.unlink()
    kind = choose(
        st.sampled_from(["missing", "directory", "pipe", "loop", "dangling", "device", "endless", "unreadable"])
    )
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "dangling":
        path.symlink_to("nothing")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "endless":
        with open(path, "wb") as file:
            file.truncate(2**33)
    elif kind == "unreadable":
        path.write_bytes(b"{}")
        path.chmod(0)


def change(choose: Choose, path: Path) -> None:
    """Makes one to three changes to a file, by what it holds."""
    if choose(small) < 3:
        return change_file(choose, path)
    data = path.read_bytes()
    for _ in range(choose(st.sampled_from([1, 1, 1, 2, 3]))):
        if choose(small) < 6:
            data = change_bytes(choose, data)
        elif path.suffix in (".yaml", ".yml"):
            data = change_lines(choose, data, YAML_VALUES, YAML_LINES)
        elif path.suffix == ".jsonl":
            lines = data.split(b"\n")
            at = choose(st.integers(0, len(lines) - 1))
            lines[at] = change_json(choose, lines[at])
            data = b"\n".join(lines)
        elif path.name == "record.json":  # with the digest that belongs to it
            line = change_json(choose, data.partition(b"\n")[0])
            data = line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"
        elif path.suffix == ".txt":
            data = change_lines(choose, data, ["x"], ["", " ", "a b c", "[UNK]", "\r", "\u2028"])
        else:
            data = change_json(choose, data)
    path.write_bytes(data)
    return None


def copy(source: Path, target: Path) -> Path:
    """A fresh copy; files that are not small are links to the original's."""
    remove(target)
    shutil.copytree(source, target, copy_function=_copy_or_link)
    return target


def _copy_or_link(source: str, target: str) -> None:
    if os.path.getsize(source) > 2**20:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
