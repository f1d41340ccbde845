"""Recipes are checked whole: all errors are reported at once, before anything is read."""

from pathlib import Path

import pytest

from spmd_lm.errors import ConfigError, DataError
from spmd_lm.prepare.recipe import read_recipe
from tests.prepare.corpora import make, step, texts

CONFIGS = Path(__file__).parents[2] / "configs/prepare"
WRONG = """
sources: [a.txt, {path: b, txet: c}, {}]
tokenizer: {train: bep, vocab_sizes: 300}
steps: {near_duplicates: {jacard: 0.7}, min_tokens: x, language: foo, utf8: repare}
split: {validation: 0.7, test: 0.5}
shard_tokens: 0
stpes: 1
"""
PROBLEMS = """
sources[1].txet: unknown key. Did you mean text?
sources[2]: expected one of path and dataset, got {}.
out: missing. Set it in the file, or as out=... on the command line.
tokenizer.train: expected bpe or wordpiece, got 'bep'. Did you mean bpe?
tokenizer.vocab_size: missing. Set it in the file, or as tokenizer.vocab_size=... on the command line.
tokenizer.vocab_sizes: unknown key. Did you mean vocab_size?
steps.utf8: expected repair or refuse, got 'repare'. Did you mean repair?
steps.language: expected module:function, got 'foo'.
steps.near_duplicates.jacard: unknown key. Did you mean jaccard?
steps.min_tokens: expected a whole number, got 'x'.
split: expected validation and test to leave a part for training, got {'validation': 0.7, 'test': 0.5}.
shard_tokens: must be at least 1, got 0.
workers: must be at least 0, got -1.
stpes: unknown key. Did you mean steps?
"""


def test_every_problem_is_told_with_its_key_and_what_to_do(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(WRONG)
    with pytest.raises(ConfigError) as raised:
        read_recipe(path, ["workers=-1"])
    assert [problem.removeprefix(f"{path}: ") for problem in raised.value.problems] == PROBLEMS.strip().splitlines()


@pytest.mark.parametrize("override", ["workers", "a..b=1", "steps.min_tokens=[1"])
def test_an_override_that_is_none_is_told(override, tmp_path):
    (tmp_path / "r.yaml").write_text("sources: [a]\nout: b\n")
    with pytest.raises(ConfigError, match="command line: "):
        read_recipe(tmp_path / "r.yaml", [override])


def test_overrides_change_one_key_of_a_mapping(tmp_path):
    (tmp_path / "r.yaml").write_text("sources: [a]\nout: b\nsteps: {near_duplicates: true, min_tokens: 3}\n")
    config = read_recipe(tmp_path / "r.yaml", ["steps.min_tokens=4", "tokenizer.train=bpe", "tokenizer.vocab_size=300"])
    assert config.steps.near_duplicates.jaccard == 0.7 and config.steps.min_tokens == 4
    assert config.tokenizer.vocab_size == 300


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_files_are_valid(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_recipe(path).sources
    assert read_recipe(Path("prepare") / path.stem) == read_recipe(path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"tokenizer": "missing.json"}, r"^tokenizer=missing\.json: no such file"),
        ({"steps": {"language": "no.such:thing"}}, r"steps\.language=no\.such:thing: cannot be imported"),
        ({"steps": {"leaks": {"titles": "missing"}}}, r"steps\.leaks\.titles=missing: cannot be read"),
        ({"steps": {"leaks": {"files": ["missing"]}}}, r"steps\.leaks\.files\[0\]=missing: no such file"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_written(keys, problem, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises((ConfigError, DataError), match=problem):
        make(tmp_path / "out", tmp_path / "a.txt", **keys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_a_language_hook_says_what_goes_on(tmp_path, monkeypatch):
    (tmp_path / "hooks.py").write_text("def check(text): return 1 / (len(text) - 5) > 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = {"path": str(tmp_path / "a.txt"), "per": "line"}
    (tmp_path / "a.txt").write_text("two\nletters\n")
    report = make(tmp_path / "out", [source], steps={"language": "hooks:check"})
    assert texts(tmp_path / "out") == ["letters"] and step(report, "language")["reasons"] == {"refused": 1}
    (tmp_path / "a.txt").write_text("letters\nfives\n")
    with pytest.raises(DataError, match=r"a\.txt:2: steps\.language=hooks:check raised ZeroDivisionError"):
        make(tmp_path / "new", [source], steps={"language": "hooks:check"})


def test_a_run_s_configuration_is_no_recipe(tmp_path):
    for name in ("configs/quickstart.yaml", "configs/gpt2/124m.yaml"):
        with pytest.raises(
            ConfigError, match=rf"^{name}: this is a configuration of a run.* Run `spmd-lm train {name}`"
        ):
            read_recipe(Path(name))


def test_a_tokenizer_to_train_and_that_of_a_data_set_are_told_how_to_write(tmp_path):
    (tmp_path / "r.yaml").write_text("sources: [a]\nout: b\n")
    with pytest.raises(ConfigError, match=r"tokenizer: expected {train: bpe, vocab_size: 32000}, .* got 'bpe'"):
        read_recipe(tmp_path / "r.yaml", ["tokenizer=bpe"])
    source = tmp_path / "a.txt"
    source.write_text("text")
    make(tmp_path / "first", source, tokenizer={"train": "bpe", "vocab_size": 300})
    with pytest.raises(DataError, match=rf"tokenizer={tmp_path}/first: .* Did you mean {tmp_path}/first/tokenizer\?"):
        make(tmp_path / "second", source, tokenizer=str(tmp_path / "first"))
    make(tmp_path / "second", source, tokenizer=str(tmp_path / "first/tokenizer"))
