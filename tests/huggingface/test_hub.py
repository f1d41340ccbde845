"""A model of the hub is imported as its directory would be, or refused with a sentence; nothing else asks a network."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd_lm.checkpoints.restored import restore_run
from spmd_lm.cli import main
from spmd_lm.config.load import load_run
from spmd_lm.errors import Exit
from spmd_lm.files import require_inside
from spmd_lm.huggingface import hub as product
from spmd_lm.huggingface.hub import download
from tests.huggingface.hub_server import COMMIT, MODEL, serve
from tests.huggingface.small_models import SMALL, import_directory, make_directory, make_tensors

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
from huggingface_hub import constants

FILES = {
    "vocab.json": json.dumps({f"t{i}": i for i in range(64)}),
    "merges.txt": "#version: 0.2\n",
    "tokenizer_config.json": '{"model_max_length": 16}',
    "generation_config.json": '{"eos_token_id": 3}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}
NOT_READ = {"README.md": "# Tiny", "pytorch_model.bin": "a pickle", "modeling.py": "raise SystemExit", "a/b.json": "{}"}
NOT_READ |= {".gitattributes": "", "consolidated.safetensors": "the same again", "onnx/model.safetensors": "other"}
REFERENCE = f"hf://{MODEL}"


@pytest.fixture
def source(tmp_path) -> Path:
    """A directory as the hub has it, and more than import reads."""
    directory = make_directory(tmp_path / "source", make_tensors())
    for name, text in (FILES | NOT_READ).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def hub(source, tmp_path, monkeypatch):
    with serve(source) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(product, "TIMEOUT", 1)
        wait = time.sleep  # the library waits between attempts
        monkeypatch.setattr(time, "sleep", lambda seconds: wait(min(seconds, 0.01)))
        yield server


def refused(capsys, tmp_path, reference=REFERENCE) -> str:
    """The error of an import that leaves no run."""
    assert main(["import", reference, str(tmp_path / "deep" / "run"), *SMALL]) == Exit.CONFIG
    out, err = capsys.readouterr()
    (error,) = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and not (tmp_path / "deep").exists()
    return error


def test_a_model_of_the_hub_is_imported_as_its_directory_is(hub, source, tmp_path, capsys):
    assert main(["import", f"{REFERENCE}@main", str(tmp_path / "run"), *SMALL, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    for name in NOT_READ:
        (source / name).unlink()
    theirs = import_directory(source, tmp_path / "directory")
    ours = load_run(tmp_path / "run")
    for a, b in zip(*(jax.tree.leaves(restore_run(config)[1]) for config in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b)
    here, there = ((tmp_path / name / "config.yaml").read_text() for name in ("run", "directory"))
    assert here == there.replace(str(tmp_path / "directory"), str(tmp_path / "run"))
    for name in ("config.json", *FILES):
        assert (tmp_path / "run" / "tokenizer" / name).read_bytes() == (source / name).read_bytes()

    read = ["config.json", "model.safetensors", *FILES]
    hashes = {name: hashlib.sha256((source / name).read_bytes()).hexdigest() for name in read}
    record = {"reference": f"{REFERENCE}@main", "commit": COMMIT, "sha256": hashes}
    assert json.loads((tmp_path / "run" / "source.json").read_text()) == result["source"] == record
    assert {*result["unread"]} == NOT_READ.keys() - {".gitattributes"}
    fetched = {asked.partition(f"/{COMMIT}/")[2] for asked in hub.asked if asked.startswith(f"GET /{MODEL}/resolve/")}
    assert fetched == {*read}
    assert not (tmp_path / "directory" / "source.json").exists()


def test_the_variables_of_the_hub_are_read_and_what_is_cached_needs_no_network(hub, tmp_path):
    def run(**variables: str) -> subprocess.CompletedProcess:
        program = f"from spmd_lm.huggingface.hub import download; print(download({REFERENCE!r}).directory)"
        environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")} | variables
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    tokens = []
    hub.answer = lambda asked: tokens.append(asked)
    assert "HF_HUB_OFFLINE is set, and the cache does not have it" in run(HF_HUB_OFFLINE="1").stderr
    assert tokens == []
    done = run(HF_TOKEN="secret")
    assert (done.stdout.strip(), done.stderr) == (str(tmp_path / f"home/hub/models--org--tiny/snapshots/{COMMIT}"), "")
    assert "Bearer secret" in hub.authorizations
    tokens.clear()
    assert run(HF_HUB_OFFLINE="1").stdout == done.stdout and tokens == []


def test_without_the_scheme_the_library_is_not_loaded(source, tmp_path):
    program = (
        "import sys; from spmd_lm.cli import main; code = main(sys.argv[1:]); "
        "print(*{'huggingface_hub', 'httpx2', 'requests'} & sys.modules.keys()); sys.exit(code)"
    )
    (source / "config.json").write_text("{}")
    line = [sys.executable, "-c", program, "import", str(source), str(tmp_path / "run")]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (Exit.CONFIG, "\n")


def test_a_missing_library_is_named(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed. Run pip install 'spmd-lm[hub]'" in refused(capsys, tmp_path)
    assert hub.asked == []


MALFORMED = ["", "tiny", "org/tiny/more", "org/tiny@", "org/../tiny", "org/tiny@../../x", "org/tiny@a//b", "/org/tiny"]
MALFORMED += ["org/ti ny", "org/tiny@a b", "org/tiny\n", "org/" + "x" * 97, "-org/tiny", "org/tiny?x", "örg/tiny"]


@pytest.mark.parametrize("rest", MALFORMED)
def test_a_malformed_reference_is_refused(hub, tmp_path, capsys, rest):
    error = refused(capsys, tmp_path, f"hf://{rest}")
    assert "expected hf://ORG/NAME or hf://ORG/NAME@REVISION. Correct it." in error
    assert hub.asked == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hf://org/none", "no such model, or a private one. Correct the name, or set HF_TOKEN."),
        ("hf://org/a--b", "cannot be downloaded: Cannot have -- or .. in repo_id"),
        (f"{REFERENCE}@v9", "no such revision. Name a branch, a tag or a commit of it."),
        (f"{REFERENCE}@{'9' * 40}", "no such revision. Name a branch, a tag or a commit of it."),
    ],
)
def test_what_the_hub_does_not_have_is_refused(hub, tmp_path, capsys, reference, message):
    assert f"{reference}: {message}" in refused(capsys, tmp_path, reference)


@pytest.mark.parametrize(
    ("asked", "answer", "message"),
    [
        ("/", (401, {}), "access is refused: "),
        ("/", (403, {}), "access is refused: "),
        ("/", (403, {"X-Error-Code": "GatedRepo"}), "access is restricted. Accept its terms on its page"),
        ("resolve", (403, {"X-Error-Code": "GatedRepo"}), "access is restricted. Accept its terms on its page"),
        ("resolve", (403, {}), "access is refused: "),
        ("resolve", (401, {}), "access is refused: "),
        ("/", (503, {}), "the hub cannot be reached: "),
        ("tree", (500, {}), "the hub cannot be reached: "),
        ("resolve", (503, {}), "the hub cannot be reached: "),
        ("/", (200, {}), "cannot be downloaded: "),
        ("resolve", (200, {}), "cannot be downloaded: "),
        ("model.safetensors", (404, {"X-Error-Code": "EntryNotFound"}), "cannot be downloaded: 404 "),
    ],
)
def test_what_the_hub_refuses_is_told(hub, tmp_path, capsys, asked, answer, message):
    hub.answer = lambda each: answer if asked in each else None
    assert f"{REFERENCE}: {message}" in refused(capsys, tmp_path)


def test_a_hub_that_is_down_or_silent_is_told_and_the_cache_still_serves(hub, tmp_path, capsys, monkeypatch):
    def silent(asked: str) -> None:
        while hub.answer is silent:
            time.sleep(0.01)

    hub.answer = silent
    error = refused(capsys, tmp_path)
    assert f"{REFERENCE}: the hub cannot be reached: " in error and "Check the network and HF_ENDPOINT" in error
    hub.answer = lambda asked: None
    first = download(REFERENCE)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert download(REFERENCE) == first
        error = refused(capsys, tmp_path, f"{REFERENCE}@refs/pr/1")  # never resolved
    assert "the hub cannot be reached: [Errno 111] Connection refused. Check the network" in error


def test_offline_an_incomplete_cache_is_refused(hub, tmp_path, capsys, monkeypatch):
    download(REFERENCE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download(f"{REFERENCE}@{COMMIT}").record["commit"] == COMMIT
    for name in ("chat_template.jinja", "model.safetensors"):
        next((tmp_path / "cache").rglob(name)).unlink()
        assert "HF_HUB_OFFLINE is set, and the cache does not have it. Unset it" in refused(capsys, tmp_path)


def test_a_model_that_has_no_safetensors_is_refused(hub, tmp_path, capsys):
    hub.files = {name: content for name, content in hub.files.items() if not name.endswith(".safetensors")}
    assert f"{REFERENCE} has its weights only as pickles (pytorch_model.bin)" in refused(capsys, tmp_path)
    assert not any("model" in path.name for path in (tmp_path / "cache").rglob("*.*"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_the_hubs_is_refused(hub, tmp_path, capsys, name):
    right = hub.files[name]
    hub.files[name] = right[:-1] + bytes([right[-1] ^ 1])
    error = refused(capsys, tmp_path)
    assert f"{REFERENCE}: {name}: its hash is " in error and f"but the hub has {hub.hashes[name]}" in error
    assert f"Delete {tmp_path / 'cache'}" in error
    hub.files[name] = right
    Path(error.split("Delete ")[1].split(" and ")[0]).unlink()
    assert download(REFERENCE).directory.is_dir()


def test_a_cache_of_copies_is_refused(hub, tmp_path, capsys, monkeypatch):
    path = download(REFERENCE).directory / "config.json"
    shutil.copy(path, tmp_path / "copy")
    path.unlink()
    shutil.move(tmp_path / "copy", path)
    assert "config.json: the cache has a copy, which does not tell the hash" in refused(capsys, tmp_path)


def test_a_download_that_is_cut_off_leaves_nothing(hub, tmp_path, capsys):
    hub.cut = 2000
    assert f"{REFERENCE}: the hub cannot be reached: peer closed connection" in refused(capsys, tmp_path)
    assert not list((tmp_path / "cache").rglob("model.safetensors"))
    hub.cut = 10**9
    assert (download(REFERENCE).directory / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_the_files_that_an_index_lists_are_downloaded(tmp_path, hub):
    parts = make_directory(tmp_path / "parts", make_tensors(), most=64_000)
    hub.files |= {path.name: path.read_bytes() for path in parts.iterdir()}
    index = json.loads(hub.files["model.safetensors.index.json"])
    listed = {*index["weight_map"].values()}
    index["weight_map"] |= {"a": "pytorch_model.bin", "b": "../x.safetensors", "c": "onnx/model.safetensors"}
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.hash_files()
    read = {name for name in download(REFERENCE).record["sha256"] if name.endswith((".safetensors", ".bin"))}
    assert read == listed and len(listed) > 2


def test_what_models_of_the_cache_share_is_inside_it(tmp_path):
    """Files that the hub stores by chunks lie once for all models, below blobs/ of the cache itself."""
    snapshot, name = tmp_path / "models--org--tiny/snapshots/0123", "ab" * 32
    for directory in (snapshot, snapshot.parents[1] / "blobs", tmp_path / "blobs/ab", tmp_path / "blobs/cd"):
        directory.mkdir(parents=True)
    link = snapshot / "model.safetensors"
    link.symlink_to("../../blobs/etag")
    for target, inside in ((f"ab/{name}", True), (f"cd/{name}", False), ("ab/x", False), (f"ab/{name}.refs", False)):
        (tmp_path / "blobs" / target).write_text("x")
        (etag := snapshot.parents[1] / "blobs" / "etag").unlink(missing_ok=True)
        etag.symlink_to(f"../../blobs/{target}")
        if inside:
            require_inside(link)
        else:
            with pytest.raises(OSError, match="it is a link out of"):
                require_inside(link)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").symlink_to(f"../blobs/ab/{name}")
    with pytest.raises(OSError, match="it is a link out of"):
        require_inside(tmp_path / "plain" / "model.safetensors")
