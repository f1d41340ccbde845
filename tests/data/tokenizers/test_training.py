"""Tokenizers that a run trains on its own documents."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.checkpoints.saved_run import check_vocabulary
from spmd_lm.config.data_sections import PythonStdlib, Text
from spmd_lm.config.load import data_of_run, load
from spmd_lm.data.corpus import hold_out, load_data
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer
from spmd_lm.data.tokenizers.training import train_bpe, train_wordpiece
from spmd_lm.data.tokenizers.vocabulary import vocabulary_hash
from spmd_lm.errors import ConfigError, Exit
from spmd_lm.evaluation.zero_shot import evaluate_tasks
from spmd_lm.training import loop

TEXTS = ["the cat sat on the mat. the cat ran.", "a mat, a hat, a cat: ünïcödé", "the end of the story"] * 5
BPE = SubwordTokenizer("bpe", train_bpe(300, lambda: iter(TEXTS)))
TASK = ["data.source=task", "data.task=sst2", "data.path=x", "data.validation_path=x"]
TRAIN = """
from spmd_lm.data.tokenizers.training import train_bpe, train_wordpiece
from tests.data.tokenizers.test_training import TEXTS
print(hash("x"), *(train(290, lambda: iter(TEXTS)).to_str() for train in (train_bpe, train_wordpiece)), sep="\\n")
"""


@given(text=st.text())
def test_byte_level_bpe_spells_any_text(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text and BPE.bytes_per_token[ids].sum() == len(text.encode())


def test_frequent_words_become_tokens():
    assert len(BPE.encode(" the cat")) < 4 and 256 < BPE.vocab_size <= 300 and BPE.eos_token_id == 0
    trained = SubwordTokenizer("wordpiece", train_wordpiece(120, lambda: iter(TEXTS)))
    assert trained.decode(trained.encode("The CAT")) == "the cat" and trained.bytes_per_token is None
    trained.special_tokens_and_words()


@pytest.mark.slow
def test_the_same_documents_make_the_same_file():
    """Another process gives it too, whose hash tables have another order."""
    outputs = [
        subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    ]
    assert outputs[0][0] != outputs[1][0] and outputs[0][1:] == outputs[1][1:]


def write_documents(directory, names, words):
    directory.mkdir(exist_ok=True)
    for name, is_held_out in zip(names, hold_out(names, 0.3), strict=True):
        word = words[is_held_out]
        (directory / name).write_text(f"{word} and {word} or {word}, but {word}. " * 20)


@pytest.fixture
def documents(tmp_path):
    names = [f"{number}.txt" for number in range(12)]
    write_documents(tmp_path / "text", names, ("trained", "zzyzx"))
    return tmp_path / "text"


def test_held_out_documents_train_no_token(tmp_path):
    """Documents have a letter each."""
    letters = "abcdefghij"
    for letter in letters:
        (tmp_path / f"{letter}.txt").write_text(f"{letter * 4} " * 20)
    corpus = load_data(Text(source="text", path=str(tmp_path), tokenizer="bpe", validation_fraction=0.3), 0, 300)
    held_out = {*corpus.tokenizer.decode(corpus.validation).replace("<|endoftext|>", "")}
    learned = {letter for letter in letters if any(letter * 2 in token for token in corpus.tokenizer.token_to_id)}
    assert len(learned) == 7 and not learned & held_out
    assert corpus.train.max() < corpus.tokenizer.vocab_size <= 300


def test_one_document_is_trained_on_up_to_its_validation_text(tmp_path):
    (tmp_path / "a.txt").write_text("first words here. " * 90 + "zzyzx " * 30)
    corpus = load_data(
        Text(source="text", path=str(tmp_path / "a.txt"), tokenizer="bpe", validation_fraction=0.1), 0, 300
    )
    assert not any("zzy" in token for token in corpus.tokenizer.token_to_id)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["data.tokenizer=bpe", "model.vocab=256"],
            "model.vocab=256 is too few tokens for data.tokenizer=bpe. Use model",
        ),
        (["data.source=tokens", "data.path=x", "data.tokenizer=bpe"], "which has no documents to train it on"),
        ([*TASK, "data.tokenizer=wordpiece"], "which has no documents to train it on"),
    ],
)
def test_what_cannot_be_trained_is_told(settings, said):
    with pytest.raises(ConfigError, match=said):
        load("configs/debug.yaml", ["data.source=python-stdlib", *settings])


def config(tmp_path, documents, *overrides):
    base = [f"run.dir={tmp_path / 'run'}", "data.source=text", f"data.path={documents}", "data.tokenizer=bpe"]
    base += ["data.validation_fraction=0.3", "model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
    base += ["model.vocab=290", "train.steps=2", "train.batch=8", "train.eval_every=1", "checkpoint.every=1"]
    return load("configs/debug.yaml", [*base, "parallel.model=1", "run.simulate_devices=8", *overrides])


@pytest.mark.slow
def test_a_run_keeps_what_it_trained(tmp_path, documents):
    """The run resumes with it, even if its documents would train another, and fails without it."""
    assert loop.train(config(tmp_path, documents)) is Exit.DONE
    file = tmp_path / "run/tokenizer/tokenizer.json"
    kept = file.read_text()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (last,) = (record for record in records if record["step"] == 2 and "eval_loss" in record)
    held_out = load_data(config(tmp_path, documents).data, 0, 290)
    per_token = held_out.tokenizer.bytes_per_token[held_out.validation[1:]].mean()
    assert last["eval_nats_per_byte"] == pytest.approx(last["eval_loss"] / per_token, rel=0.05)

    write_documents(documents, [f"{number}.txt" for number in range(12)], ("another", "zzyzx"))
    again = config(tmp_path, documents, "train.steps=3", "data.allow_change=true")
    assert data_of_run(again).tokenizer == str(tmp_path / "run/tokenizer")
    assert loop.train(again) is Exit.DONE and file.read_text() == kept

    other = config(tmp_path, documents, "train.steps=4", "data.tokenizer=wordpiece", "model.vocab=300")
    with pytest.raises(ConfigError, match=r"data.tokenizer=wordpiece, but .* has data.tokenizer=bpe. Use data.tok"):
        check_vocabulary(other, tmp_path / "run", {"config": again.model_dump(), "data": {"vocabulary": "x"}})
    used = {"config": {}, "data": {"vocabulary": vocabulary_hash(str(tmp_path / "run/tokenizer"))}}
    with pytest.raises(ConfigError, match=r"data.tokenizer=bpe is not the vocabulary of .*Use data.*run/tok"):
        check_vocabulary(config(tmp_path / "another", documents), tmp_path / "run", used)  # as of run.init_from
    file.unlink()
    with pytest.raises(ConfigError, match=r"the tokenizer that it trained is gone. Bring tokenizer/ back"):
        loop.train(config(tmp_path, documents, "train.steps=4"))
    with pytest.raises(ConfigError, match=r"the tokenizer that it trained is gone. Bring tokenizer/ back"):
        evaluate_tasks(config(tmp_path, documents), ["validation"])


def test_bytes_are_counted_as_bytes():
    corpus = load_data(PythonStdlib(source="python-stdlib"), 0, 256)
    assert corpus.tokenizer.bytes_per_token.tolist() == [0] + [1] * 255
