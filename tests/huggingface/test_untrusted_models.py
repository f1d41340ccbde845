"""Models that others made: refused with a sentence, whatever is in their files, and never a way to other files."""

import json
import math
import os
from pathlib import Path

import pytest

from spmd_lm.errors import ConfigError
from spmd_lm.huggingface.directory import copy_files, make_run_config, open_directory
from spmd_lm.huggingface.transfer import import_hf
from tests.huggingface.small_models import HF_CONFIG, SMALL, make_directory, make_tensors
from tests.reliability import test_untrusted

at_once, victim = test_untrusted.at_once, test_untrusted.victim


INDEX = "model.safetensors.index.json"
OF_A_MODEL = ("config.json", "model.safetensors", INDEX, "tokenizer.json", "merges.txt", "tokenizer_config.json")


@pytest.fixture
def model(tmp_path):
    return make_directory(tmp_path / "model", make_tensors())


def not_imported(model: Path) -> str:
    with pytest.raises(ConfigError) as error:
        config = make_run_config(opened := open_directory(model), str(model.with_name("run")), None, SMALL)
        import_hf(opened, config)
    assert not model.with_name("run").exists()
    assert len(str(error.value)) < 2000
    return str(error.value)


def put(path: Path, what: str, victim: Path) -> None:
    path.unlink(missing_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    else:
        path.symlink_to({"a device": "/dev/zero", "a link": victim, "a link to itself": path}[what])


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [-1, 2**31, 10**30, True, 2.0, "2", [2, -1], [[2]], {"a": 2}, [None]])
def test_what_is_no_token_id_ends_no_text(model, name, value):
    settings = json.loads((model / "config.json").read_text()) if name == "config.json" else {}
    (model / name).write_text(json.dumps(settings | {"eos_token_id": value}))
    assert f"{model}/{name}: eos_token_id: expected a token id below " in not_imported(model)


@pytest.mark.parametrize("name", OF_A_MODEL)
@pytest.mark.parametrize("what", ["a pipe", "a device", "a directory", "a link", "a link to itself"])
def test_a_model_with_a_file_that_is_none_is_refused(tmp_path, model, victim, name, what):
    put(model / name, what, victim)
    assert not_imported(model).startswith(f"{model}/{name}: cannot be read: ")
    if name not in ("model.safetensors", INDEX):  # what an export would publish of an imported run
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            copy_files(model, [name], tmp_path)
        assert not (tmp_path / name).exists()


def test_chat_templates_are_of_the_model(tmp_path, model, victim):
    templates = model / "additional_chat_templates"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.jinja").write_text("x")
    templates.symlink_to(tmp_path / "elsewhere")
    assert f"{templates}: cannot be read: it is a link out of" in not_imported(model)
    templates.unlink()
    templates.mkdir()
    (templates / "tools.jinja").symlink_to(victim)
    assert f"{templates}/tools.jinja: cannot be read: it is a link out of" in not_imported(model)


def test_a_model_of_the_hubs_cache_is_imported(tmp_path, model):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    model.rename(repository / "blobs")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert make_run_config(open_directory(snapshot), "run", None, SMALL).model.layers == 4
    (tmp_path / "elsewhere").symlink_to(snapshot)
    open_directory(tmp_path / "elsewhere")
    (repository / "blobs").rename(tmp_path / "blobs")
    (repository / "blobs").symlink_to(tmp_path / "blobs")
    assert "config.json: cannot be read: it is a link out of" in not_imported(snapshot)


SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")


@pytest.mark.parametrize("key", SIZES)
def test_sizes_that_no_model_has_are_refused(model, key):
    for value in (10**12, 2**31 - 1, 10**400, -1, 0, True, "8", None, 1.5, math.nan):
        (model / "config.json").write_text(json.dumps(HF_CONFIG | {key: value}))
        not_imported(model)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "", "[]", "{}", '{"a": [' + "1," * 4_000_000 + "1]}"]
    + [json.dumps(HF_CONFIG | {key: "x" * 10**6}) for key in ("model_type", "activation_function")]
    + [json.dumps(HF_CONFIG | {"architectures": ["x" * 1000] * 1000})],
    ids=range(9),
)
def test_a_config_json_of_another_kind_is_refused(model, text):
    (model / "config.json").write_text(text)
    assert not_imported(model).startswith(f"{model}/config.json: ")


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "a\0.safetensors", "", "/etc/a.safetensors", "\ud800"])
def test_an_index_names_files_beside_it(model, name):
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert f"{model}/{INDEX}" in not_imported(model)


def test_a_header_longer_than_any_is_refused(model):
    (model / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    assert "model.safetensors: damaged, or not safetensors: a header of 1,152,921," in not_imported(model)
