"""An address of something elsewhere is refused wherever a path may stand: keys and options are found, not listed."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from spmd_lm import api
from spmd_lm.addresses import elsewhere, is_bucket
from spmd_lm.cli import VERBS, main, make_parser
from spmd_lm.config.data_sections import BlendPart, Text, Tokens
from spmd_lm.config.load import load
from spmd_lm.config.schema import Run
from spmd_lm.config.section import Section
from spmd_lm.data.token_files.dataset import open_dataset
from spmd_lm.data.tokenizers.tokenizer import ByteTokenizer
from spmd_lm.errors import ConfigError, DataError, Exit
from spmd_lm.prepare import schema as _  # noqa: F401 (sections of its own)
from spmd_lm.sweeps.sweep_file import read_sweep

DEBUG = str(Path(__file__).parents[2] / "configs" / "debug.yaml")
SCHEMES = st.from_regex(r"(?a)[a-zA-Z][a-zA-Z0-9+.-]{0,12}", fullmatch=True)
ADDRESSES = ["s3://bucket/run", "az://container/run", "hdfs://host:9000/run", "file:///run", "GS://b", "hf://ORG/NAME"]


def sections(of: type = Section):
    for section in of.__subclasses__():
        if section.__module__.startswith("spmd_lm."):
            yield section
            yield from sections(section)


TEXT_KEYS = {
    (section, field.alias or name): field.annotation
    for section in sections()
    for name, field in section.model_fields.items()
    if "Literal" not in str(field.annotation) and "str" in str(field.annotation)
}


def test_the_keys_that_are_known_to_be_paths_are_among_them():
    names = {f"{section.__name__}.{key}" for section, key in TEXT_KEYS}
    assert {"Run.dir", "Run.init_from", "Text.path", "BlendPart.path", "LocalCheckpoint.dir"} <= names
    assert {"Preparation.out", "Source.path", "Leaks.files", "Task.validation_path", "Tokens.tokenizer"} <= names


@settings(max_examples=40)
@given(scheme=SCHEMES, data=st.data())
def test_every_scheme_is_refused_in_every_key(scheme, data):
    section, key = data.draw(st.sampled_from([*TEXT_KEYS]))
    address = f"{scheme}:/{data.draw(st.sampled_from(['/', '']))}bucket/run"
    if is_bucket(address) and key in section.in_buckets:
        return  # below
    for value in (address, ["here", address]) if "list" in str(TEXT_KEYS[section, key]) else (address,):
        with pytest.raises(ValidationError) as refused:
            section.model_validate({key: value})
        wrong = [error for error in refused.value.errors() if key in error["loc"]]
        assert wrong, (section, key, value)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_holds_a_run_but_not_under_every_key(scheme):
    for key in ("bucket/run", "my-bucket.x/runs/a b/é@4"):
        assert Run(dir=f"{scheme}://{key}").bucket_address == f"{scheme}://{key}"
    for key in (
        "",
        "bucket",
        "bucket/",
        "bucket/a/",
        "bucket/a//b",
        "bucket/a/../b",
        "Bucket/a",
        "b/a",
        "bucket/" + "é" * 128,
    ):
        with pytest.raises(ValidationError, match=r"bucket's name"):
            Run(dir=f"{scheme}://{key}")


@pytest.mark.parametrize("address", ["s3://bucket/tokens", "gs://bucket/a/key with spaces"])
def test_token_ids_may_be_in_a_bucket_and_no_other_data(address):
    assert Tokens(source="tokens", path=address).path == address
    assert BlendPart(path=address, weight=1.0).path == address
    for section, values in ((Text, {"source": "text"}), (Tokens, {"source": "tokens"})):
        key = "path" if section is Text else "tokenizer"
        with pytest.raises(ValidationError, match="copy it to this machine, or mount it there"):
            section.model_validate(values | {key: address})


@pytest.mark.parametrize(
    "address", ["s3://bucket", "gs://", "s3://B/tokens", "s3://bucket/../tokens", "gs://bucket/a/"]
)
def test_an_address_that_no_bucket_has_is_refused(address):
    for make in (lambda: Tokens(source="tokens", path=address), lambda: BlendPart(path=address, weight=1.0)):
        with pytest.raises(ValidationError, match=r"no bucket's name|after the bucket's name write a key"):
            make()
    with pytest.raises(ConfigError, match=r"no bucket's name|after the bucket's name write a key"):
        load(DEBUG, ["data.source=tokens", f"data.path={address}"])


OPTIONS = [
    (verb, action.dest, (action.option_strings or [None])[0])
    for verb in VERBS
    for action in make_parser(verb)._actions
    if action.nargs != 0 and action.dest not in ("overrides", "ACTION", "STEP") and not action.choices
    if action.metavar not in ("TEXT", "N", "X", "P", "T", "SIZE", "N:M")
]


def test_the_options_that_are_known_to_be_paths_are_among_them():
    found = {(verb, option or dest) for verb, dest, option in OPTIONS}
    assert {
        ("train", "CONFIG"),
        ("train", "--json"),
        ("audit", "--hlo"),
        ("report", "--out"),
        ("eval", "--task"),
    } <= found
    assert {
        ("import", "DIR"),
        ("export", "DIR"),
        ("ckpt", "RUN"),
        ("bench", "--calibrate"),
        ("sweep", "SWEEP"),
    } <= found


@pytest.mark.parametrize(("verb", "dest", "option"), OPTIONS)
def test_every_address_is_refused_in_every_argument(verb, dest, option, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address in ADDRESSES:
        if (verb, dest, address[:2]) == ("import", "DIR", "hf"):
            continue  # what tests/huggingface/test_hub.py imports
        if dest in VERBS[verb].runs_to_read and is_bucket(address):
            continue  # what tests/buckets reads
        value = f"lambada={address}" if dest == "task" else address
        known = {"ACTION": "ls", "STEP": "3"}
        line = [value if name == dest else known.get(name, "here") for name in VERBS[verb].positionals]
        assert main([verb, *line, *([f"{option}={value}"] if option else [])]) == Exit.CONFIG
        (error,) = capsys.readouterr().err.splitlines()
        assert address in error and f"{address.partition('/')[0]}//" in error, error
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", [each for each in ADDRESSES if not is_bucket(each)])
def test_files_and_functions_refuse_them_too(address, tmp_path):
    (tmp_path / "run.yaml").write_text(f"base: {address}\n")
    (tmp_path / "sweep.yaml").write_text(f"config: {address}\ngrid: {{optim.lr: [1, 2]}}\n")
    calls = [
        lambda: load(tmp_path / "run.yaml"),
        lambda: read_sweep(tmp_path / "sweep.yaml"),
        lambda: load(DEBUG, [f"run.init_from={address}"]),
        lambda: load(DEBUG, ["data.source=tokens", f"data.blend=[{{path: '{address}', weight: 1}}]"]),
        lambda: load(DEBUG, [f"checkpoint.local={{dir: '{address}', every: 3}}"]),
        lambda: api.load_config(address),
        lambda: api.evaluate(address),
    ]
    for call in calls[:-2] if is_bucket(address) else calls:
        with pytest.raises(ConfigError, match=r"is not supported here|is not read") as refused:
            call()
        assert len(refused.value.problems) == 1, inspect.getsource(call)


@pytest.mark.parametrize(
    "path", ["runs/a", "/a:b/c", "a:b", "v5p:4x4x4", "./s3://x", "1:/2", ":/", "é:/", "a b:/c", ""]
)
def test_what_may_be_a_path_is_left_alone(path):
    assert elsewhere(path) == ""


@pytest.mark.parametrize(
    "key", ["run.init_from", "data.path", "data.tokenizer", "optim.freeze", "run.compilation_cache"]
)
@pytest.mark.parametrize("text", ["\udcff", "a\ud800b", "*\udfff", "#\0", '"a\\0b"', '"\\ud834"'])
def test_text_that_is_none_is_refused_in_every_key(key, text):
    with pytest.raises(ConfigError, match=r"expected text (in UTF-8|without NUL)|not YAML|as a unicode string"):
        load(
            DEBUG,
            ["data.source=text", "data.path=here", f"{key}={text}"]
            if key != "data.path"
            else ["data.source=text", f"{key}={text}"],
        )


@pytest.mark.parametrize("path", ["/", ".", "..", "/..", "~"])
def test_a_directory_without_a_name_of_its_own_is_no_data_set(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"spmd-lm prepare"):
        open_dataset(Tokens(source="tokens", path=path), ByteTokenizer(), 256)


@given(st.text(st.sampled_from(["a", "\udcff", "\ud800", "\udc00", "\0", "é"])))
def test_half_a_pair_in_a_prompt_is_bytes_like_any_other(text):
    ids = ByteTokenizer().encode(text)
    assert ids.size >= len(text) and ByteTokenizer().decode(ids)[:0] == ""
    assert ByteTokenizer().encode("a\udcff").tolist() == [*b"a\xff"]
