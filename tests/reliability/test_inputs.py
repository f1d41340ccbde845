"""What is read is data: it neither runs, nor hangs, nor fills the memory, nor loses a part in silence."""

import ast
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest

from spmd_lm.cli import main
from spmd_lm.config.load import load
from spmd_lm.config.schema import MOST, RunConfig, Section, variants, yaml_fields
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
        start = time.monotonic()
        code = main(["plan", DEBUG, "run.simulate_devices=8", *spelled(kinds), f"{path}={number}"])
        error = capsys.readouterr().err
        assert code in (Exit.DONE, Exit.CONFIG) and bool(error) == bool(code), (number, error)
        assert time.monotonic() - start < 10, number
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
    start, line = time.monotonic(), [each.replace(";", " ") for each in overrides.split()]
    assert main(["plan", DEBUG, "--devices", str(devices), *line]) == Exit.CONFIG
    error = capsys.readouterr().err
    assert line[-1].partition("=")[0] in error or "run.simulate_devices" in error
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("schedule", ["interleaved", "breadth_first"])
def test_a_long_schedule_is_planned_at_once(schedule):
    """64 stages with 8 chunks each, and half of the microbatches that there may be."""
    line = "parallel.pipe=64 model.layers=512 parallel.chunks=8 parallel.microbatches=256 train.batch=256"
    start = time.monotonic()
    assert main(["plan", DEBUG, "--devices", "64", *line.split(), f"parallel.schedule={schedule}"]) == Exit.DONE
    assert time.monotonic() - start < 10
