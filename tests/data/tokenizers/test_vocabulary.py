"""Search for a vocabulary; the copy that a run keeps of it encodes text the same way."""

import json
from pathlib import Path

import pytest

from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer
from spmd_lm.data.tokenizers.vocabulary import COMPANION_FILES, VOCABULARY_FILES, copy_vocabulary, find_vocabulary
from spmd_lm.errors import DataError
from tests.data.tokenizers.test_subwords import TINY, byte_level, wordpiece

TEXT = "UNwanted running, wanted. a bc"


@pytest.fixture
def destination(tmp_path):
    """A run's directory for its copy, empty."""
    place = tmp_path / "run" / "tokenizer"
    place.mkdir(parents=True)
    return place


@pytest.fixture
def source_dir(tmp_path):
    place = tmp_path / "source"
    place.mkdir()
    return place


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def assert_copied(name: Path, destination: Path, *expected: str) -> None:
    """The copy has these files and no others, and encodes as `name` did, even after that has been moved."""
    before = SubwordTokenizer(str(name)).encode(TEXT).tolist()
    copy_vocabulary(str(name), destination)
    assert files(destination) == set(expected)
    name.rename(name.with_name("gone"))
    assert SubwordTokenizer(str(destination)).encode(TEXT).tolist() == before != []


def test_a_file_is_found_as_itself_and_a_directory_by_its_first_vocabulary(source_dir):
    for name in reversed(VOCABULARY_FILES):
        (source_dir / name).write_text("{}")
        assert find_vocabulary(str(source_dir)) == find_vocabulary(str(source_dir / name)) == source_dir / name
    odd = source_dir / "odd name"
    odd.write_text("")
    assert find_vocabulary(str(odd)) == odd


def test_a_home_directory_is_expanded(source_dir, monkeypatch):
    monkeypatch.setenv("HOME", str(source_dir))
    wordpiece(source_dir)
    assert find_vocabulary("~/vocab.txt") == find_vocabulary("~") == source_dir / "vocab.txt"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (
            "nothing",
            r"no such file or directory \(working directory .*\)\. Give the path of a tokenizer\.json, a vocab\.txt",
        ),
        ("empty", r"this directory has no tokenizer\.json, vocab\.txt, vocab\.json, tokenizer\.model\. Name one"),
    ],
)
def test_a_missing_vocabulary_is_an_error_with_the_expected_names(tmp_path, name, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"^data\.tokenizer={tmp_path}/{name}: {what}"):
        find_vocabulary(str(tmp_path / name))


def test_copy_of_a_wordpiece_vocabulary_with_another_name_and_its_config(source_dir, destination):
    source = wordpiece(source_dir, *TINY, "UN", do_lower_case=False).rename(source_dir / "bert-uncased.txt")
    (source_dir / "notes.txt").write_text("not asked for")
    assert_copied(source, destination, "vocab.txt", "tokenizer_config.json")
    assert SubwordTokenizer(str(destination)).encode("UN").tolist() == [len(TINY)]  # in lower case it would be another


def test_copy_of_a_tokenizer_json_with_another_name(source_dir, destination):
    source = source_dir / "any.json"
    SubwordTokenizer(str(wordpiece(source_dir))).backend.save(str(source))
    assert_copied(source, destination, "tokenizer.json")  # the vocab.txt beside it is another


def test_copy_of_a_byte_level_vocabulary_with_another_name_and_its_merges(source_dir, destination):
    source = byte_level(source_dir).rename(source_dir / "encoder.json")
    assert_copied(source, destination, "vocab.json", "merges.txt")


def test_a_token_called_model_does_not_make_a_tokenizer_json(source_dir, destination):
    source = byte_level(source_dir, more=("model",))
    assert isinstance(json.loads(source.read_text())["model"], int)
    assert_copied(source, destination, "vocab.json", "merges.txt")


def test_copy_of_a_directory_has_all_its_vocabulary_files_and_nothing_else(source_dir, destination):
    wordpiece(source_dir, do_lower_case=False)
    byte_level(source_dir)
    for name in ("tokenizer.model", *COMPANION_FILES):
        if not (source_dir / name).exists():
            (source_dir / name).write_text("{}")
    for name in ("config.json", "model.safetensors"):
        (source_dir / name).write_text("{}")
    SubwordTokenizer(str(source_dir)).backend.save(str(source_dir / "tokenizer.json"))
    assert_copied(source_dir, destination, *VOCABULARY_FILES, *COMPANION_FILES)
