"""Input is data: it neither runs, nor hangs, nor fills the memory, nor loses a part in silence."""

import ast
import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest

from spmd_lm.checkpoints.record import RECORD_FILE, read_record
from spmd_lm.cli import main
from spmd_lm.config.load import load
from spmd_lm.config.schema import RunConfig, variants
from spmd_lm.config.section import Section, yaml_fields
from spmd_lm.config.types import MOST
from spmd_lm.errors import CheckpointError, ConfigError, Exit
from spmd_lm.runtime.metrics import Status
from tests.reports.run_files import LIFE

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
    path, start = tmp_path / "config.yaml", time.thread_time()
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert time.thread_time() - start < 10 and len(str(error.value)) < 20_000
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


VALID = Path(DEBUG).read_text()
ODD_TEXTS = {  # as bytes, and what is said of them; nothing: it is read as the file without them is
    "byte order mark": (b"\xef\xbb\xbf" + VALID.encode(), None),
    "CRLF": (VALID.replace("\n", "\r\n").encode(), None),
    "NUL": (VALID.encode() + b"\0", "not YAML"),
    "UTF-16": (VALID.encode("utf-16"), "is not UTF-8"),
    "Latin-1": (VALID.encode() + "# é".encode("latin-1"), "is not UTF-8"),
    "surrogate": (VALID.encode() + b"# \xed\xa0\x80", "is not UTF-8"),
    "escaped surrogate": (VALID.replace("name: debug", 'dir: "\\ud800"').encode(), "run.dir: expected text in UTF-8"),
    "escaped NUL": (VALID.replace("name: debug", 'dir: "a\\0b"').encode(), "run.dir: expected text without NUL"),
    "two documents": (VALID.encode() + b"---\n" + VALID.encode(), "another document"),
}


@pytest.mark.parametrize(("content", "problem"), ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_a_file_of_another_encoding_is_read_or_refused(tmp_path, content, problem):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    if problem is None:
        assert load(path) == load(DEBUG)
    else:
        with pytest.raises(ConfigError, match=problem):
            load(path)


TAGGED = ["!!binary aGk=", "!!binary é", "!!timestamp 2001-01-01", "!!timestamp x", "!!set {a, b}", "!!set [a]"]
TAGGED += ["!!omap [a: 1]", "!!omap 1", "!!pairs [a: 1]", "!!python/name:os.system", "!!python/tuple [1]", "!local 1"]
TAGGED += ["!!int x", "!!int 0b1", "!!float x", "!!bool x", "!!str {a: 1}", "!!seq a", "!!map [a]", "!!merge x"]
TAGGED += ["!!python/object/new:os.system [x]", "!!python/module:os", "!<tag:yaml.org,2002:int> x", "{? [a] : 1}"]


@pytest.mark.parametrize("value", TAGGED)
def test_a_tag_is_refused(tmp_path, value):
    path = tmp_path / "config.yaml"
    for text in (f"model: {value}\n", f"model: {{layers: {value}}}\n", f"run: {{compiler_options: {{a: {value}}}}}\n"):
        path.write_text(f"base: {DEBUG}\n{text}")
        with pytest.raises(ConfigError):
            load(path)
    path.write_text(value)
    with pytest.raises(ConfigError):
        load(path)


def test_a_text_is_what_it_says(tmp_path):
    """No environment variable is read, and no shell started."""
    for text in ("${HOME}/$USER", "$(touch x)", "`touch x`", "%(asctime)s", "{0}"):
        assert load(DEBUG, [f'run.dir="{text}"']).run.dir == text


def test_a_base_is_a_file_that_is_read_and_nothing_else(tmp_path):
    (tmp_path / "deep").mkdir()
    path, pipe, loop = tmp_path / "deep/config.yaml", tmp_path / "deep/pipe", tmp_path / "deep/loop"
    os.mkfifo(pipe)
    loop.symlink_to("loop")
    (tmp_path / "deep/self.yaml").write_text("base: config.yaml")
    for base in (DEBUG, os.path.relpath(DEBUG, path.parent)):
        path.write_text(f"base: {base}")
        assert load(path) == load(DEBUG)
    for base, problem in {
        f"file://{DEBUG}": "file:// is not read: write the path alone",
        "/etc/passwd": "expected sections of keys|not YAML",
        "../" * 30 + "dev/zero": "no regular file",
        "pipe": "no regular file",
        "loop": "Too many levels of symbolic links",
        "self.yaml": "circular chain",
        "config.yaml": "circular chain",
        ".": "Is a directory",
        '"a\\0b"': "no file can have this name",
        "~/x": "no such file",
        "a" * 5000: "File name too long",
    }.items():
        path.write_text(f"base: {base}")
        with pytest.raises(ConfigError, match=problem):
            load(path)


def test_a_long_chain_of_bases_is_refused(tmp_path):
    for i in range(1200):
        (tmp_path / f"{i}.yaml").write_text(f"base: {i + 1}.yaml")
    (tmp_path / "1200.yaml").write_text(VALID)
    with pytest.raises(ConfigError, match="more than 20 files, each the base of another"):
        load(tmp_path / "0.yaml")


@pytest.mark.parametrize("directory", ["a b", "é 漢字", "-x", "'", "$HOME", "a;b", "a\nb", "%s", "..", "#", " "])
def test_a_directory_has_any_name_that_a_file_system_takes(tmp_path, directory):
    path = tmp_path / "config.yaml"
    path.write_text(VALID.replace("name: debug", f"dir: {json.dumps(str(tmp_path / directory))}"))
    assert load(path).run.directory == tmp_path / directory


LEAF = {"shape": [2], "dtype": "float32", "fingerprint": "0123456789abcdef"}
RECORD = {"step": 2, "run_id": "x", "leaves": {"w": LEAF}, "files": {}}
RECORD |= {"meta": {"config": {}, "data": {"samples": 0, "fingerprint": ""}, "versions": {}}}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"leaves": {"w": LEAF | change}} for change in ({"dtype": "../x"}, {"dtype": "O"}, {"shape": [-1]})),
        *({"leaves": {"w": LEAF | change}} for change in ({"shape": [2**63]}, {"shape": [True]}, {"shape": 2})),
        *({"meta": meta} for meta in ({}, {"config": {}}, {"config": 1, "data": {"samples": 0, "fingerprint": ""}})),
        {"meta": {"config": {"run": []}, "data": {"samples": "1", "fingerprint": ""}}},
        {"step": -2},
    ],
    ids=str,
)
def test_a_record_of_another_form_is_refused(tmp_path, wrong):
    """The digest is right: a writer of the directory can write that too."""
    for fields, reads in ((RECORD, True), (RECORD | wrong, False)):
        line = json.dumps(fields).encode()
        directory = tmp_path / str(fields["step"])
        directory.mkdir(exist_ok=True)
        (directory / RECORD_FILE).write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
        with nullcontext() if reads else pytest.raises(CheckpointError, match="not a record of this version"):
            read_record(directory)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lives": [LIFE | {"devices": 10**30}]},
        {"lives": [LIFE | {"devices": -1}]},
        {"lives": [LIFE | {"peak_bytes": 10**400}]},
        {"lives": [LIFE | {"started": "yesterday"}]},
        {"lives": [LIFE | {"started": "2026-99-99"}]},
        {"goodput": {"step": 1e308}},
        {"step": -5},
        {"restarts": -1},
    ],
    ids=lambda wrong: str(wrong)[:60],
)
def test_numbers_that_no_status_has_are_refused(tmp_path, wrong):
    status = {"state": "preempted", "step": 3, "restarts": 0, "goodput": {}, "lives": [LIFE]}
    for fields, refused in ((status, False), (status | wrong, True)):
        (tmp_path / "status.json").write_text(json.dumps(fields))
        with pytest.raises(CheckpointError, match="not a run's status") if refused else nullcontext():
            Status.read(tmp_path)


def test_a_message_does_not_steer_the_terminal(capsys):
    assert main(["plan", DEBUG, "model.\x1b[2J\x9b\x07=1"]) == Exit.CONFIG
    assert r"unknown key '\x1b[2J\x9b\x07'" in capsys.readouterr().err


BANNED = {
    "names": {"eval", "exec", "compile", "__import__"},
    "modules": {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib", "jsonpickle", "torch"}
    | {"runpy", "code", "codeop", "pty", "tarfile", "zipfile"},
    "attributes": {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell", "import_module"}
    | {"unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "load_all", "UnsafeLoader", "FullLoader"}
    | {"extractall", "unpack_archive", "allow_pickle", "trust_remote_code", "mktemp"},
    "loads": {"yaml", "np", "numpy", "jnp", "torch"},  # whose `load` and `Loader` may run what they read
}


def banned_uses(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED["names"]:
            found.append(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [module, *(alias.name for alias in node.names)]
            banned = BANNED["modules"] | (BANNED["attributes"] if module else set())
            found += [name for name in names if name.split(".")[0] in banned]
            found += [f"{module}.load"] * (module in BANNED["loads"] | {"numpy", "jax.numpy"} and "load" in names)
        elif isinstance(node, ast.Attribute) and node.attr in BANNED["attributes"]:
            found.append(node.attr)
        elif isinstance(node, ast.keyword) and node.arg in {"shell", "allow_pickle", "trust_remote_code"}:
            found.append(node.arg)
        elif isinstance(node, ast.Attribute) and node.attr in ("load", "Loader"):
            found += [node.attr] * (getattr(node.value, "id", "") in BANNED["loads"])
    return found


ALLOWED = {
    "evaluation/tasks/task.py": {"import_module"},  # the modules of its own package
    "own_module.py": {"compile", "exec"},  # of the file that model.module and others name
    "prepare/clean.py": {"import_module"},  # of the function that steps.language names
    "runtime/child.py": {"pickle"},  # between a process and the child that it starts
}


@pytest.mark.parametrize("path", sorted((ROOT / "spmd_lm").rglob("*.py")), ids=lambda path: path.stem)
def test_the_package_runs_nothing_that_it_reads(path):
    assert set(banned_uses(path)) == ALLOWED.get(str(path.relative_to(ROOT / "spmd_lm")), set())


def test_the_scan_sees_what_is_banned(tmp_path):
    lines = ["import pickle", "eval('1')", "os.system('x')", "run(shell=True)", "yaml.load(x)", "from yaml import load"]
    lines += [
        "from os import system",
        "np.load(x)",
        "np.lib.npyio.load(x, allow_pickle=True)",
        "from numpy import load",
    ]
    lines += ["tarfile.open(x).extractall()", "shutil.unpack_archive(x)", "import zipfile", "Loader = yaml.Loader"]
    lines += [
        "subprocess.getoutput('x')",
        "from subprocess import getoutput",
        "from torch import load",
        "import dill as d",
    ]
    for line in lines:
        (tmp_path / "bad.py").write_text(line)
        assert banned_uses(tmp_path / "bad.py"), line


SECTIONS = {
    "bert": ["model.kind=bert", "model.vocab=260"],
    "task": ["data.source=task", "data.path=a", "data.validation_path=b"],
    "masked_lm": ["bert", "objective.kind=masked_lm"],
    "classification": ["bert", "task", "data.task=sst2", "objective.kind=classification", "objective.classes=2"],
    "multiple_choice": ["bert", "task", "data.task=race", "objective.kind=multiple_choice", "train.batch=32"],
    "span": ["bert", "task", "data.task=squad", "objective.kind=span"],
    "lion": ["optim.kind=lion", "optim.lr=1e-4"],
    "text": ["data.source=text", "data.path=a"],
    "synthetic": ["data.source=synthetic"],
    "profile": ["train.profile.steps=[2, 3]"],
    "local": ["checkpoint.local={dir: a, every: 1}"],
}
NUMBERS = ["1e17", str(2**63), str(2**64), str(10**17), str(MOST), "-1", "0", ".nan", ".inf", "1e-320", "true", "'1'"]


def numbers_of(section: type[Section], path: str, overrides: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """(path, overrides that it needs) of every key that takes a number."""
    for key, field in yaml_fields(section).items():
        types = [field.annotation, *get_args(field.annotation)]
        types += [inner for each in types for inner in get_args(each)]
        if {int, float} & {*types}:
            yield (f"{path}.{key}", *overrides)
        for inner in types:
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from numbers_of(inner, f"{path}.{key}", (*overrides, key))


KEYS = [
    key
    for name in RunConfig.model_fields
    for kind, section in variants(name).items()
    for key in numbers_of(section, name, (kind,) if kind else ())
]


def spelled(names: Sequence[str]) -> list[str]:
    """The overrides that make these kinds of sections."""
    parts = [part for name in names for part in SECTIONS.get(name, [])]
    return [each for part in parts for each in (spelled([part]) if part in SECTIONS else [part])]


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_no_number_is_too_odd_to_plan_or_to_refuse(key, capsys):
    path, *kinds = key
    for number in NUMBERS:
        start = time.thread_time()
        code = main(["plan", DEBUG, "run.simulate_devices=8", *spelled(kinds), f"{path}={number}"])
        error = capsys.readouterr().err
        assert code in (Exit.DONE, Exit.CONFIG) and ("error: " in error) == bool(code), (number, error)
        assert time.thread_time() - start < 10, number
        assert code or number not in (".nan", ".inf", "true", "'1'"), number
        assert len(error) < 2000, number


def test_keys_of_every_kind_are_tried():
    names = {path.partition(".")[0] for path, *_ in KEYS}
    assert names == {*RunConfig.model_fields} and len(KEYS) > 65
    assert {"train.guard.max_skips", "checkpoint.local.keep"} <= {path for path, *_ in KEYS}


STAGES = "parallel.pipe=2 parallel.microbatches=4"


@pytest.mark.parametrize(
    ("devices", "overrides"),
    [
        (8, "model.dropout=0.99999999999"),
        (8, "optim.warmup=2999999999"),
        (8, "precision.scale_window=1e17"),
        (8, "parallel.microbatches=1000000"),
        (8, f"{STAGES} parallel.zero=3 model.layers=65536"),
        (8, "parallel.pipe=2 parallel.model=4 train.batch=1000000 parallel.microbatches=1000000"),
        (8, f"{STAGES} parallel.schedule=interleaved parallel.chunks=2 parallel.microbatches=3 train.batch=1000000000"),
        (4096, "parallel.pipe=4096 model.layers=4096 train.batch=4096 parallel.microbatches=4096"),
        (10**9, f"parallel.pipe={10**9} model.layers={10**9}"),
        (10**17, f"train.batch={10**17}"),
        (8, f"model.layers=4096 optim.freeze={'*a*b*c*d*z;' * 90}"),
    ],
)
def test_numbers_that_no_run_has_are_refused(devices, overrides, capsys):
    start, line = time.thread_time(), [each.replace(";", " ") for each in overrides.split()]
    assert main(["plan", DEBUG, "--devices", str(devices), *line]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert line[-1].partition("=")[0] in error or "run.simulate_devices" in error
    assert time.thread_time() - start < 10


@pytest.mark.parametrize("schedule", ["interleaved", "breadth_first"])
def test_a_long_schedule_is_planned_at_once(schedule):
    """64 stages with 8 chunks each, and half of the microbatches that there may be."""
    line = "parallel.pipe=64 model.layers=512 parallel.chunks=8 parallel.microbatches=256 train.batch=256"
    start = time.thread_time()
    assert main(["plan", DEBUG, "--devices", "64", *line.split(), f"parallel.schedule={schedule}"]) == Exit.DONE
    assert time.thread_time() - start < 10
