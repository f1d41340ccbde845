"""Imports and exports that cannot succeed fail by name, before anything is left behind."""

import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmd_lm.cli import main
from spmd_lm.errors import ConfigError, Exit, UserError
from spmd_lm.huggingface.directory import make_run_config, open_directory
from spmd_lm.huggingface.transfer import export_hf, match_tensors, read_params
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.step.program import Program
from tests import processes
from tests.huggingface.small_models import (
    GPT2,
    HF_CONFIG,
    SMALL,
    import_directory,
    make_directory,
    make_tensors,
)


def errors(capsys, line: list[str], code: int = Exit.CONFIG) -> list[str]:
    assert main(line) == code
    out, err = capsys.readouterr()
    assert out == ""
    return [each.removeprefix("error: ") for each in err.splitlines()]


def refused(capsys, directory: Path, *overrides: str) -> list[str]:
    """The error messages of an import that leaves nothing behind and changes nothing."""
    parent = directory.parent
    before = sorted(str(path) for path in parent.rglob("*"))
    error = errors(capsys, ["import", str(directory), str(parent / "deep" / "run"), *SMALL, *overrides])
    assert sorted(str(path) for path in parent.rglob("*")) == before
    return error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=64", "model.width=64: "),
        ("objective.kind=masked_lm", "objective.kind=masked_lm"),
        ("run.dir=elsewhere", "run.dir=elsewhere: the run is created in "),
        ("model.heds=2", "unknown key 'heds'"),
        ("parallel.model=3", "is not divisible by parallel.model=3"),
    ],
)
def test_overrides_cannot_change_the_model(directory, capsys, override, message):
    assert message in "\n".join(refused(capsys, directory, override))


def tensors_with(name: str, value) -> dict[str, np.ndarray]:
    tensors = make_tensors()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    return tensors


ONE = np.zeros((1,), np.float32)
WRONG = {
    "missing": (tensors_with("transformer.h.2.ln_1.bias", None), ["1 missing: transformer.h.2.ln_1.bias"]),
    "extra": (tensors_with("transformer.h.9.ln_1.bias", ONE), ["1 unexpected: transformer.h.9.ln_1.bias"]),
    "misshapen": (
        tensors_with("transformer.ln_f.bias", ONE),
        ["1 of another shape: transformer.ln_f.bias is [1], not [32]"],
    ),
    "vocabulary": (
        tensors_with("transformer.wte.weight", np.zeros((48, 32), np.float32)),
        ["1 of another shape: transformer.wte.weight is [48, 32], not [64, 32]"],
    ),
    "all": (
        {name: x for name, x in make_tensors().items() if ".ln_" not in name}
        | {"other": ONE, "transformer.wpe.weight": ONE},
        [
            "18 missing: transformer.h.0.ln_1.weight, ",
            " and 10 more",
            "1 unexpected: other",
            "1 of another",
        ],
    ),
}


@pytest.mark.parametrize(("tensors", "messages"), WRONG.values(), ids=WRONG)
def test_mismatched_tensors_are_named(tmp_path, capsys, tensors, messages):
    error = "\n".join(refused(capsys, make_directory(tmp_path / "model", tensors)))
    assert all(message in error for message in messages), error


def test_nan_weights_are_refused(tmp_path, capsys):
    tensors = make_tensors()
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = np.nan
    line = ["import", str(make_directory(tmp_path / "model", tensors)), str(tmp_path / "run"), *SMALL]
    (error,) = errors(capsys, line, Exit.NON_FINITE)
    assert "transformer.h.1.mlp.c_fc.weight has values that are not finite in float32" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_directory_without_a_model_is_refused(tmp_path, capsys):
    (empty := tmp_path / "empty").mkdir()
    assert "not a model: no config.json in it" in refused(capsys, empty)[0]
    assert "no such directory" in refused(capsys, tmp_path / "absent")[0]
    (empty / "config.json").write_text("[1, 2]")
    assert "expected an object, got [1, 2]" in refused(capsys, empty)[0]
    (empty / "config.json").write_text(json.dumps(HF_CONFIG | {"architectures": ["MambaForCausalLM"]}))
    first, second = refused(capsys, empty)
    assert (
        "MambaForCausalLM is not supported. The nearest is LlamaForCausalLM. Supported: GPT2LMHeadModel, Bert" in first
    )
    assert "has no weights: no model.safetensors" in second


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pickle"])
def test_pickles_are_never_opened(directory, capsys, name):
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    (error,) = refused(capsys, directory)
    assert (
        f"only as pickles ({name}). Loading a pickle runs the code in it" in error
        and "safe_serialization=True" in error
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vocab.json", json.dumps({"a": 0, "b": 64})),
        ("vocab.txt", "\n".join(f"t{i}" for i in range(65)) + "\n"),
        ("added_tokens.json", json.dumps({"<eos>": 64})),
        ("tokenizer.json", json.dumps({"model": {"vocab": {"a": 64}}})),
        ("tokenizer.json", json.dumps({"model": {"vocab": [["a", 0.5]] * 65}})),
        ("tokenizer.json", json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 64, "content": "</s>"}]})),
    ],
)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused(directory, capsys, name, text):
    (directory / name).write_text(text)
    (error,) = refused(capsys, directory)
    assert f"{name} has ids up to 64, more than vocab_size=64 of config.json" in error


def test_a_model_with_a_tokenizer_does_not_read_bytes(tmp_path, capsys):
    hf_config = HF_CONFIG | {"vocab_size": 264}
    directory = make_directory(tmp_path / "model", make_tensors(hf_config), hf_config)
    (directory / "vocab.txt").write_text("[UNK]\nx\n")
    (error,) = refused(capsys, directory, "data.tokenizer=bytes")
    assert f"Use data.tokenizer={tmp_path / 'deep' / 'run'}/tokenizer" in error


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": []}', "\xff"])
def test_a_damaged_tokenizer_is_refused(directory, capsys, text):
    (directory / "tokenizer.json").write_text(text, "latin-1")
    (error,) = refused(capsys, directory)
    assert "tokenizer.json: " in error


def test_existing_runs_and_directories_are_not_overwritten(directory, tmp_path, capsys):
    run, taken = tmp_path / "run", tmp_path / "taken"
    config = import_directory(directory, run)
    taken.mkdir()
    (taken / "notes").write_text("kept")
    for line in (["import", str(directory), str(run)], ["export", str(run), str(taken)]):
        (error,) = errors(capsys, line)
        assert "Nothing is overwritten" in error
    (error,) = errors(capsys, ["import", str(directory), str(directory / "config.json")])
    assert "exists and is not a directory" in error
    taken.joinpath("notes").unlink()
    export_hf(config, taken, "float32", 10**9)  # empty: it may be filled
    assert (taken / "model.safetensors").exists()
    (tmp_path / "locked").mkdir(mode=0o500)
    if os.geteuid():
        (error,) = errors(capsys, ["import", str(directory), str(tmp_path / "locked" / "run"), *SMALL])
        assert "Permission denied. " in error and " was not created: " in error


def test_export_needs_a_checkpoint_and_an_architecture(directory, tmp_path, capsys):
    config = import_directory(directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (error, *_) = errors(capsys, ["export", str(tmp_path / "run"), str(tmp_path / "back")], Exit.CHECKPOINT)
    assert "holds no checkpoint" in error
    (error,) = errors(capsys, ["export", str(tmp_path / "run"), str(tmp_path / "back"), "model.use_bias=false"])
    assert "nearest is gpt2, except for model.use_bias=False" in error
    assert not (tmp_path / "back").exists() and config.run.directory.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["import"], "spmd-lm import: no DIR given: name a Hugging Face directory"),
        (["import", "somewhere"], "spmd-lm import: no RUN_DIR given: name a run's directory"),
        (["import", "somewhere", "train.steps=3"], "no RUN_DIR given"),
        (["export", "somewhere"], "spmd-lm export: no DIR given"),
        (["export", "somewhere", "else", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["export", "somewhere", "else", "--shard", "5"], "expected a size as 5GB, 500MB or 64KB, got '5'"),
        (["export", "somewhere", "else"], "somewhere: no such file or run"),
        (["import", "somewhere", "run"], "somewhere: no such directory"),
    ],
)
def test_bad_command_lines_name_what_is_wrong(capsys, line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (error,) = errors(capsys, line)
    assert message in error


def test_errors_come_without_importing_jax(directory):
    (directory / "config.json").write_text("{}")
    program = (
        "import sys; from spmd_lm.cli import main; code = main(sys.argv[1:]); "
        "print(*{'jax', 'flax', 'orbax', 'torch'} & sys.modules.keys()); sys.exit(code)"
    )
    line = [sys.executable, "-c", program, "import", str(directory), str(directory.parent / "run")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (Exit.CONFIG, "\n") and "model_type=null is not supported" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_import_leaves_nothing_behind(directory, tmp_path, number):
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from spmd_lm.checkpoints import new_run\n"
        "from spmd_lm.cli import main\n"
        "def save(*_): os.kill(os.getpid(), int(sys.argv[1])); time.sleep(60)\n"
        "new_run.Checkpointer.save = save\n"
        "sys.exit(main(sys.argv[2:]))"
    )
    line = [sys.executable, "-c", program, str(int(number)), "import", str(directory), str(tmp_path / "a" / "run")]
    done = processes.finish([*line, *SMALL])
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# --- damaged files ----------------------------------------------------------------------------------------------------


def header(entries: dict) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(start: int, end: int, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


BAD_FILES = {
    "empty": b"",
    "a header beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "no JSON": struct.pack("<Q", 8) + b"not json",
    "bytes that are not there": header({"a": entry(0, 8)}) + b"\0" * 4,
    "bytes of no tensor": header({"a": entry(0, 8)}) + b"\0" * 16,
    "overlapping": header({"a": entry(0, 8), "b": entry(4, 12)}) + b"\0" * 12,
    "a hole": header({"a": entry(0, 8), "b": entry(12, 20)}) + b"\0" * 20,
    "another shape": header({"a": entry(0, 8, (3,))}) + b"\0" * 8,
    "a negative shape": header({"a": entry(0, 8, (-2,))}) + b"\0" * 8,
    "no such type": header({"a": entry(0, 8, dtype="F31")}) + b"\0" * 8,
    "a huge shape": header({"a": entry(0, 8, (2**62, 2**62))}) + b"\0" * 8,
}


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES)
def test_a_header_that_contradicts_its_file_is_refused(directory, capsys, data):
    (directory / "model.safetensors").write_bytes(data)
    (error,) = refused(capsys, directory)
    assert "model.safetensors: damaged, or not safetensors: " in error


def test_integer_weights_are_refused(tmp_path, capsys):
    directory = make_directory(tmp_path / "model", make_tensors())
    file = directory / "model.safetensors"
    (length,) = struct.unpack("<Q", (data := file.read_bytes())[:8])
    entries = json.loads(data[8 : 8 + length])
    entries["transformer.ln_f.bias"]["dtype"] = "I32"
    file.write_bytes(header(entries) + data[8 + length :])
    (error,) = refused(capsys, directory)
    assert "1 of a dtype other than F64, F32, F16, BF16: transformer.ln_f.bias I32" in error


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "index.json: not JSON"),
        ("{}", "weight_map: expected a file name for each tensor"),
        ('{"weight_map": {}}', "weight_map: expected a file name"),
        ('{"weight_map": {"a": 3}}', "weight_map: expected a file name"),
        ('{"weight_map": {"a": "model-00009.safetensors"}}', "index.json lists model-00009.safetensors, not found"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "expected .safetensors files in the same directory"),
        ('{"weight_map": {"a": "model.bin"}}', "expected .safetensors files in the same directory"),
        ('{"weight_map": {"a": "model.safetensors"}}', "without a, which model.safetensors.index.json lists"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(directory, capsys, index, message):
    (directory / "model.safetensors.index.json").write_text(index)
    (error,) = refused(capsys, directory)
    assert message in error


def test_several_files_need_an_index_that_agrees_with_them(tmp_path, capsys):
    directory = make_directory(tmp_path / "model", make_tensors(), most=64_000)
    index = directory / "model.safetensors.index.json"
    index_text = index.read_text()
    index.unlink()
    assert "and no model.safetensors.index.json that lists the model's" in refused(capsys, directory)[0]
    index.write_text(index_text)
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    assert any("also in another file" in error or "index.json lists" in error for error in refused(capsys, directory))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The program of HF_CONFIG's model, compiled once, and its parameters' shapes."""
    path = make_directory(tmp_path_factory.mktemp("whole") / "model", make_tensors())
    program = Program(make_run_config(open_directory(path), "run", None, SMALL))
    return program, {path: leaf.shape for path, leaf in leaves_by_path(program.plan.shapes).items()}


def test_a_damaged_file_is_read_or_refused(directory, expected):
    """The header changed at random places, or the file cut short: never a traceback, never part of a model."""
    program, shapes = expected
    file, r = directory / "model.safetensors", np.random.default_rng(11)
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    outcomes = {"refused": 0, "read": 0}
    for _ in range(150):
        data = bytearray(whole)
        for at in r.integers(0, 8 + length, r.integers(1, 4)):
            data[at] = r.integers(0, 256) if r.random() < 0.5 else ord(r.choice(list('0123456789[]{},:"')))
        if r.random() < 0.2:
            data = data[: r.integers(0, len(data))]
        file.write_bytes(data)
        try:
            model_dir = open_directory(directory)
            names = match_tensors(model_dir, shapes)
            read_params(model_dir, names, program.abstract_canonical().params)
            outcomes["read"] += 1
        except UserError as error:
            assert str(directory) in str(error)
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100, outcomes


@pytest.mark.parametrize(
    "text", ["[" * 10**5, '{"n_embd": ' + "1" * 5000 + "}", "\ufeff{}", "", "{'a': 1}", '"x"', "\0"]
)
def test_a_config_that_is_not_json_is_refused(directory, capsys, text):
    (directory / "config.json").write_text(text, "utf-8")
    (error,) = refused(capsys, directory)
    assert error.startswith(f"{directory / 'config.json'}: ")


ODD_VALUES = [None, True, -1, 0, 0.5, 3, 10**30, 1e308, math.inf, math.nan, "", "x", [], [1], {}, {"a": 1}]


@pytest.mark.parametrize("key", ["architectures", "model_type", *GPT2, "n_inner", "resid_pdrop", "layer_norm_epsilon"])
def test_any_value_of_any_key_is_read_or_refused(directory, expected, key):
    _, shapes = expected
    for value in ODD_VALUES:
        (directory / "config.json").write_text(json.dumps(HF_CONFIG | {key: value}))
        try:
            model_dir = open_directory(directory)
            config = make_run_config(model_dir, "run", None, SMALL)
        except ConfigError:
            continue
        try:
            Program(config)
            match_tensors(model_dir, {**shapes})
        except ConfigError:
            pass
