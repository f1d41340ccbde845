"""What is read is data: it neither runs, nor hangs, nor fills the memory, nor loses a part in silence."""

import ast
import itertools
import os
import time
from pathlib import Path

import pytest

from spmd_lm.cli import main
from spmd_lm.config.load import load
from spmd_lm.errors import ConfigError, Exit

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "configs" / "debug.yaml")
LETTERS = "abcdefghijklm"
HOSTILE = {
    "aliases": "a: &a [x, x, x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise(LETTERS)),
    "merge keys": "a: &a {x: 1}\n"
    + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}, *{a}]}}\n" for a, b in itertools.pairwise(LETTERS)),
    "an alias in its anchor": "model: &a {layers: *a}\n",
    "deep": "model: " + "[" * 3000 + "]" * 3000,
    "700,000 keys": "model:\n" + "".join(f"  k{i}: 1\n" for i in range(100_000)),
    "9,000 keys": "model:\n" + "".join(f"  k{i}: 1\n" for i in range(9_000)),
    "9,000 sections": "".join(f"k{i}: 1\n" for i in range(9_000)),
    "a tag": "model: !!python/object/apply:os.system ['true']\n",
    "twice on one line": "model: {layers: 2, layers: 3}\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_at_once(tmp_path, text):
    path, start = tmp_path / "config.yaml", time.monotonic()
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert time.monotonic() - start < 10 and len(str(error.value)) < 20_000
    if text == HOSTILE["twice on one line"]:
        assert "duplicate key 'layers'" in str(error.value)


def test_a_pipe_or_a_device_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no regular file"):
            load(path)


@pytest.mark.parametrize("value", ["a #b", "#b", "a # b"])
def test_the_command_line_has_no_comments(value):
    config = load(DEBUG, ["data.source=text", f"data.path={value}"])
    assert config.data.path == value
    assert load(DEBUG, ["data.source=text", "data.path='a #b'"]).data.path == "a #b"


BANNED = {
    "names": {"eval", "exec", "compile", "__import__"},
    "modules": {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "torch", "subprocess.getoutput"},
    "attributes": {"system", "popen", "unsafe_load", "full_load", "allow_pickle", "trust_remote_code"},
}


def banned_uses(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED["names"]:
            found.append(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in BANNED["modules"]]
        elif isinstance(node, ast.Attribute) and node.attr in BANNED["attributes"]:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle", "trust_remote_code"}:
            found.append(node.arg)
        elif (
            isinstance(node, ast.Attribute) and node.attr == "load" and getattr(node.value, "id", "") in ("yaml", "np")
        ):
            found.append(f"{node.value.id}.load")
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "spmd_lm").rglob("*.py")), ids=lambda path: path.stem)
def test_the_package_runs_nothing_that_it_reads(path):
    assert not banned_uses(path)


def test_the_scan_sees_what_is_banned(tmp_path):
    (tmp_path / "bad.py").write_text("import pickle\neval('1')\nos.system('x')\nrun(shell=True)\nyaml.load(x)\n")
    assert len(banned_uses(tmp_path / "bad.py")) == 5


@pytest.mark.parametrize(
    "override",
    [
        "model.dropout=0.99999999999",
        "optim.warmup=2999999999",
        "precision.scale_window=1e17",
        "parallel.microbatches=1000000",
    ],
)
def test_numbers_that_no_run_has_are_refused(override, capsys):
    start = time.monotonic()
    assert main(["plan", DEBUG, "--devices", "8", override]) == Exit.CONFIG
    assert override.partition("=")[0].split(".")[1] in capsys.readouterr().err
    assert time.monotonic() - start < 10
