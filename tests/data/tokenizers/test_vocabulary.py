"""Where a vocabulary is found, and that the copy which a run keeps of it reads text as it does."""

import json
from pathlib import Path

import pytest
from tests.data.test_subwords import TINY, byte_level, wordpiece

from spmd_lm.data.tokenizers.subwords import read
from spmd_lm.data.tokenizers.vocabulary import BESIDE, VOCABULARY_FILES, find, keep
from spmd_lm.errors import DataError

TEXT = "UNwanted running, wanted. a bc"


@pytest.fixture
def kept(tmp_path):
    """A run's directory for it, empty."""
    place = tmp_path / "run" / "tokenizer"
    place.mkdir(parents=True)
    return place


@pytest.fixture
def there(tmp_path):
    place = tmp_path / "there"
    place.mkdir()
    return place


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def assert_kept(name: Path, kept: Path, *expected: str) -> None:
    """These files and no others, which read as the vocabulary called `name` does, wherever that is by now."""
    before = read(str(name)).encode(TEXT).tolist()
    keep(str(name), kept)
    assert files(kept) == set(expected)
    name.rename(name.with_name("gone"))
    assert read(str(kept)).encode(TEXT).tolist() == before != []


def test_a_file_is_itself_and_a_directory_its_first_vocabulary(there):
    for name in reversed(VOCABULARY_FILES):
        (there / name).write_text("{}")
        assert find(str(there)) == find(str(there / name)) == there / name
    odd = there / "odd name"
    odd.write_text("")
    assert find(str(odd)) == odd


def test_a_home_is_looked_up(there, monkeypatch):
    monkeypatch.setenv("HOME", str(there))
    wordpiece(there)
    assert find("~/vocab.txt") == find("~") == there / "vocab.txt"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing", r"no such file or directory \(looked from .*\)\. Give the path of a tokenizer\.json, a vocab\.txt"),
        ("empty", r"this directory has no tokenizer\.json, vocab\.txt, vocab\.json\. Name one that has"),
    ],
)
def test_what_is_not_found_is_told_with_what_is_looked_for(tmp_path, name, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"^data\.tokenizer={tmp_path}/{name}: {what}"):
        find(str(tmp_path / name))


def test_word_pieces_by_another_name_with_what_says_how_they_are_spelled(there, kept):
    source = wordpiece(there, *TINY, "UN", do_lower_case=False).rename(there / "bert-uncased.txt")
    (there / "notes.txt").write_text("not asked for")
    assert_kept(source, kept, "vocab.txt", "tokenizer_config.json")
    assert read(str(kept)).encode("UN").tolist() == [len(TINY)]  # in lower case it would be another


def test_a_tokenizer_json_by_another_name(there, kept):
    source = there / "any.json"
    read(str(wordpiece(there))).library.save(str(source))
    assert_kept(source, kept, "tokenizer.json")  # the vocab.txt beside it is another


def test_byte_level_pieces_by_another_name_with_their_merges(there, kept):
    source = byte_level(there).rename(there / "encoder.json")
    assert_kept(source, kept, "vocab.json", "merges.txt")


def test_a_piece_called_model_makes_no_tokenizer_json(there, kept):
    source = byte_level(there, more=("model",))
    assert isinstance(json.loads(source.read_text())["model"], int)
    assert_kept(source, kept, "vocab.json", "merges.txt")


def test_a_directory_with_all_that_belongs_to_it_and_nothing_else(there, kept):
    wordpiece(there, do_lower_case=False)
    byte_level(there)
    for name in BESIDE:
        if not (there / name).exists():
            (there / name).write_text("{}")
    for name in ("config.json", "model.safetensors"):
        (there / name).write_text("{}")
    read(str(there)).library.save(str(there / "tokenizer.json"))
    assert_kept(there, kept, *VOCABULARY_FILES, *BESIDE)
