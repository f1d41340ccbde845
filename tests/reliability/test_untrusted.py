"""Files that others put where a run reads or writes: none is followed out of its directory, none hangs a command, and
none ends it without a sentence."""

import json
import math
import os
import shutil
import time
from pathlib import Path

import pytest

from spmd_lm import files
from spmd_lm.checkpoints import saved_run
from spmd_lm.checkpoints.saved_run import check_vocabulary, restore_run
from spmd_lm.cli import VERBS, main
from spmd_lm.config.load import TOKENIZER_DIR
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.text_files import read_documents
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer
from spmd_lm.data.tokenizers.vocabulary import copy_vocabulary
from spmd_lm.errors import ConfigError, DataError, Exit, UserError
from spmd_lm.huggingface.directory import copy_files, make_run_config, open_directory
from spmd_lm.huggingface.transfer import import_hf
from spmd_lm.reports.runs import write_report
from spmd_lm.runtime.directories import is_locked, lock_directory, was_killed
from spmd_lm.training import loop
from tests.data.tokenizers.test_subwords import TINY, byte_level, wordpiece
from tests.huggingface.small_models import HF_CONFIG, SMALL, make_directory, make_tensors
from tests.training import test_loop
from tests.training.test_loop import FakeProgram, make_config

fake = test_loop.fake  # no step is compiled


@pytest.fixture(autouse=True)
def at_once():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 10


@pytest.fixture
def victim(tmp_path):
    """A file that nobody may write to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


# --- what a run writes ------------------------------------------------------------------------------------------------


def test_a_run_writes_through_no_link(tmp_path, victim):
    run = tmp_path / "run"
    (run / TOKENIZER_DIR).mkdir(parents=True)
    written = ["status.json", "config.yaml", "metrics.jsonl", "loss.png", "tracker_id"]
    for name in written:
        (run / f"{name}.tmp").symlink_to(victim)
    for name in ("loss.png", "samples.txt"):
        (run / name).symlink_to(victim)
    assert loop.train(make_config(run)) is Exit.DONE
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG") and not (run / "loss.png").is_symlink()
    write_report([run], None)
    (run / "report.html").unlink()
    for name in ("report.html", "report.html.tmp"):
        (run / name).symlink_to(victim)
    write_report([run], None)
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_a_link_that_became_the_log_is_not_followed(tmp_path, victim):
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="it is a link, and may lead anywhere"):
        files.open_regular(tmp_path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND)


def test_a_lock_that_is_a_link_or_a_pipe_is_refused(tmp_path, victim):
    (tmp_path / ".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=r"cannot be written: it is a link, .*: remove it"):
        loop.train(make_config(tmp_path))
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    assert not is_locked(tmp_path) and not was_killed(tmp_path)
    with pytest.raises(ConfigError, match="it is not a regular file"), lock_directory(tmp_path, print, True):
        pass


@pytest.mark.parametrize("name", ["status.json", "config.yaml", "metrics.jsonl"])
def test_a_directory_in_the_way_is_told(tmp_path, name):
    (tmp_path / f"{name}.tmp").mkdir()
    with pytest.raises(UserError, match=rf"{name}: cannot be written: Is a directory"):
        loop.train(make_config(tmp_path))


def test_a_run_and_its_checkpoints_may_be_elsewhere(tmp_path):
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "checkpoints").symlink_to(tmp_path / "other")
    assert loop.train(make_config(tmp_path / "run")) is Exit.DONE
    assert (tmp_path / "other" / "12").is_dir() and (tmp_path / "disk" / "status.json").exists()


def test_the_copy_of_a_vocabulary_is_written_through_no_link(tmp_path, victim):
    (tmp_path / "copy").mkdir()
    for name in ("vocab.txt", "vocab.txt.tmp", ".vocab.txt"):
        (tmp_path / "copy" / name).symlink_to(victim)
    copy_vocabulary(str(wordpiece(tmp_path)), tmp_path / "copy")
    assert "[MASK]" in (tmp_path / "copy" / "vocab.txt").read_text()


# --- vocabularies -----------------------------------------------------------------------------------------------------


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


# --- directories of Hugging Face --------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("name", OF_A_MODEL)
@pytest.mark.parametrize("what", ["a pipe", "a device", "a directory", "a link", "a link to itself"])
def test_a_model_with_a_file_that_is_none_is_refused(tmp_path, model, victim, name, what):
    put(model / name, what, victim)
    assert not_imported(model).startswith(f"{model}/{name}: cannot be read: ")
    if name not in ("model.safetensors", INDEX):  # what an export would publish of an imported run
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            copy_files([model / name], tmp_path)
        assert not (tmp_path / name).exists()


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


# --- inputs that never end --------------------------------------------------------------------------------------------


@pytest.fixture
def loops(tmp_path):
    """A directory with one text, and links that lead back, to a pipe and to nowhere."""
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    (tmp_path / "texts" / "inner" / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    for name, target in {"x": ".", "y": "..", "b.txt": "b.txt", "c.txt": "/dev/zero", "d.txt": "../pipe"}.items():
        (tmp_path / "texts" / name).symlink_to(target)
    return tmp_path / "texts"


@pytest.mark.parametrize("pattern", ["", "*/*.txt", "**/*.txt", "**", "**/" * 50 + "a.*", "in*/**/*"])
def test_directories_that_contain_themselves_are_read_once(loops, pattern):
    assert [document.text for document in read_documents([str(loops / pattern)])] == [b"text"]


def test_data_that_never_ends_is_refused(loops):
    for name in ("../pipe", "c.txt", "b.txt", "d.txt", "x" * 300, "a\0b", "**/*.md", "/dev/zero"):
        with pytest.raises(DataError, match=r"^(data.validation_path=|.*: cannot be read: )"):
            read_documents([os.path.join(loops, name)], "data.validation_path", (".jsonl",))


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"supervise"}))
def test_names_that_no_file_has_are_told(verb, capsys):
    for name in ("x" * 300, "a\0b"):
        names = {"STEP": "1", "ACTION": "ls"}
        assert main([verb, *(names.get(each, name) for each in VERBS[verb].positionals)]) == Exit.CONFIG
        assert "no file can have this name" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, to be copied."""
    directory = tmp_path_factory.mktemp("runs") / "trained"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", FakeProgram)
        patch.setattr(loop, "plan_report", test_loop.PLAN_REPORT)
        loop.train(make_config(directory))
    return directory


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("config.yaml", ["eval", "RUN"], Exit.CONFIG),
        ("config.yaml", ["replay", "RUN", "12"], Exit.CONFIG),
        ("status.json", ["report", "RUN"], Exit.CHECKPOINT),
        ("metrics.jsonl", ["report", "RUN"], Exit.CHECKPOINT),
        ("config.yaml", ["report", "RUN"], Exit.DONE),
        ("samples.txt", ["report", "RUN"], Exit.DONE),
        ("checkpoints/12/record.json", ["ckpt", "verify", "RUN"], Exit.CHECKPOINT),
    ],
)
def test_a_run_with_a_pipe_for_a_file_is_told(tmp_path, trained, capsys, name, line, code):
    run = shutil.copytree(trained, tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert main([str(run) if word == "RUN" else word for word in line]) == code
    if code:
        assert name in capsys.readouterr().err


def test_training_is_refused_by_a_pipe_for_a_file(tmp_path, trained):
    for name in ("status.json", "metrics.jsonl"):
        run = shutil.copytree(trained, tmp_path / name.partition(".")[0])
        (run / name).unlink()
        os.mkfifo(run / name)
        with pytest.raises(UserError, match=f"{name}: "):
            loop.train(make_config(run, train__steps=14))


# --- vocabularies of a run --------------------------------------------------------------------------------------------


def text_run(tmp_path, vocabulary: Path, **changes):
    (tmp_path / "corpus.txt").write_text("wanted a want. " * 200)
    data = {"source": "text", "path": str(tmp_path / "corpus.txt"), "tokenizer": str(vocabulary)}
    made = make_config(tmp_path / "run", **changes).model_dump(by_alias=True) | {"data": data}
    return RunConfig.model_validate(made)


def vocabulary(directory: Path, *pieces: str) -> Path:
    directory.mkdir()
    return wordpiece(directory, *pieces)


def test_a_vocabulary_without_an_end_finishes_its_run(tmp_path, monkeypatch, capsys):
    prompts = []
    monkeypatch.setattr(loop, "generate_text", lambda *arguments: prompts.extend(arguments[2]) or ["The end"])
    config = text_run(tmp_path, vocabulary(tmp_path / "of", "[UNK]", "wanted", "a", "want", "."))
    FakeProgram.at = {1: lambda: prompts.append("after the line") or 1}
    assert loop.train(config) is Exit.DONE
    assert (
        "samples.txt leaves out the prompt '': this run's tokenizer has no token to start a" in capsys.readouterr().out
    )
    assert prompts == ["after the line", "The ", "def "]
    assert (tmp_path / "run" / "samples.txt").read_text() == "The end\n"


def test_prompts_with_tokens_that_the_model_lacks_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "generate_text", lambda *arguments: arguments[2])
    config = text_run(tmp_path, "bytes")
    (tmp_path / "corpus.txt").write_bytes(bytes([9, 10]) * 500)  # both below model.vocab, 16
    assert loop.train(config) is Exit.DONE
    said = capsys.readouterr().out
    assert "leaves out the prompt 'The ': token 104 is not below model.vocab=16" in said and "prompt '':" not in said
    assert (tmp_path / "run" / "samples.txt").read_text() == "\n"


def test_a_checkpoint_is_used_with_its_own_vocabulary_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "sample", lambda run: "")
    monkeypatch.setattr(saved_run, "Program", FakeProgram)
    own, same = (vocabulary(tmp_path / name) for name in ("own", "same"))
    other = vocabulary(tmp_path / "other", *reversed(TINY))
    config = text_run(tmp_path, own)
    assert loop.train(config) is Exit.DONE
    file = str(tmp_path / "run" / "config.yaml")
    for line in (["eval", file], ["generate", file], ["export", file, str(tmp_path / "out")]):
        assert main([*line, f"data.tokenizer={other}"]) == Exit.CONFIG
        assert f"data.tokenizer={other} is not the vocabulary of {tmp_path}/run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for found in (own, same):
        assert restore_run(text_run(tmp_path, found))[2] == 12
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    with pytest.raises(ConfigError, match=f"Use data.tokenizer={own}, or another run"):
        restore_run(text_run(tmp_path, other))
    own.write_text("\n".join(reversed(TINY)))
    with pytest.raises(ConfigError, match="is not the vocabulary"):
        restore_run(config)


def test_a_checkpoint_of_a_version_that_kept_no_hash(tmp_path):
    own, other = vocabulary(tmp_path / "own"), vocabulary(tmp_path / "other", *reversed(TINY))
    run, meta = tmp_path / "run", {"data": {}, "config": {"data": {"tokenizer": "bytes"}}}
    with pytest.raises(ConfigError, match=r"Use data\.tokenizer=bytes"):
        check_vocabulary(text_run(tmp_path, own), run, meta)
    (run / TOKENIZER_DIR).mkdir(parents=True)
    copy_vocabulary(str(own), run / TOKENIZER_DIR)
    meta["config"]["data"]["tokenizer"] = str(own)
    check_vocabulary(text_run(tmp_path, own), run, meta)
    with pytest.raises(ConfigError, match=f"Use data.tokenizer={run}/tokenizer"):
        check_vocabulary(text_run(tmp_path, other), run, meta)
