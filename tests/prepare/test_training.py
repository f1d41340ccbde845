"""Raw text to a model: a run on what `prepare` made."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from spmd_lm.cli import main
from spmd_lm.config.load import load
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.tokenizers.tokenizer import SubwordTokenizer, keep_vocabulary, open_tokenizer
from spmd_lm.data.tokenizers.training import train_bpe
from spmd_lm.errors import ConfigError, DataError, Exit
from tests import processes
from tests.prepare.corpora import id_arrays, make, sentence, write_lines

SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "model.vocab=300", "train.batch=8"]
RUN = [*SMALL, "data.source=tokens", "parallel.model=1", "parallel.data=-1", "train.steps=2", "train.eval_every=1"]


@pytest.fixture
def prepared(tmp_path):
    lines = [{"text": sentence(seed, 60)} for seed in range(40)]
    sources, out = write_lines(tmp_path / "a.jsonl", lines), tmp_path / "out"
    make(out, sources, tokenizer={"train": "bpe", "vocab_size": 300}, split={"validation": 0.3}, shard_tokens=3000)
    return out, [line["text"] for line in lines]


def test_a_run_reads_what_was_prepared(prepared):
    out, texts = prepared
    config = load("configs/debug.yaml", [*RUN, f"data.path={out}"])
    assert config.data.tokenizer == str(out / "tokenizer")
    data = load_data(config.data, 0, 300)
    tokenizer, (corpus,) = data.tokenizer, data.corpora
    assert len(corpus.train.shards) > 1 and corpus.validation.size
    read = tokenizer.decode(corpus.train.read(np.zeros(1, np.int64), corpus.train.size)[0])
    documents = read.split("<|endoftext|>")[:-1]
    assert set(documents) < set(texts) and len(documents) == corpus.train.document_starts().size - 1
    loader = make_loader(config, data, "validation")
    assert loader.target_bytes > 0 and loader.rows(0, 0, 8).tokens.max() < 300


def test_another_tokenizer_than_its_own_is_refused(prepared):
    config = load("configs/debug.yaml", [*RUN, f"data.path={prepared[0]}", "data.tokenizer=bytes"])
    with pytest.raises(ConfigError, match="is not the one that made the token ids"):
        load_data(config.data, 0, 300)


@pytest.mark.slow
def test_a_model_is_trained_evaluated_and_writes(prepared, tmp_path):
    """The run has a copy of its tokenizer, and needs no data set afterwards."""
    out, run = prepared[0], tmp_path / "run"
    processes.run("train", "configs/debug.yaml", "--devices", "2", f"run.dir={run}", f"data.path={out}", *RUN)
    evaluated = json.loads(processes.run("eval", run, "--json", "-"))
    assert evaluated["eval_nats_per_byte"] < evaluated["eval_loss"]
    out.rename(tmp_path / "moved")
    assert processes.run("generate", run, "--prompt", "w1 w2", "--tokens", "5").startswith("w1 w2")


def test_without_a_validation_split_it_is_empty(tmp_path):
    out = tmp_path / "out"
    make(out, write_lines(tmp_path / "a.jsonl", [{"text": sentence(1, 400)}]), tokenizer="bytes")
    config = load("configs/debug.yaml", [*RUN, f"data.path={out}", "train.eval_every=0"])
    (corpus,) = load_data(config.data, 0, 300).corpora
    assert corpus.train.size and not corpus.validation.size


def test_a_sentencepiece_model_tokenizes(tmp_path):
    from tests.data.tokenizers.test_sentencepiece import model

    (tmp_path / "tokenizer.model").write_bytes(model())
    out, lines = tmp_path / "out", [{"text": "the cat sat on the mat"}, {"text": "a hat and a cat"}]
    make(out, write_lines(tmp_path / "a.jsonl", lines), tokenizer=str(tmp_path / "tokenizer.model"))
    tokenizer = open_tokenizer(str(out / "tokenizer"))
    assert [tokenizer.decode(ids[:-1]) for ids in id_arrays(out)] == [line["text"] for line in lines]


def test_another_vocabulary_at_the_same_path_is_another_data_set(tmp_path):
    vocabulary, source = tmp_path / "vocab", write_lines(tmp_path / "a.jsonl", [{"text": "a b"}])
    keep_vocabulary(SubwordTokenizer("bpe", train_bpe(270, lambda: iter(["a b c"]))), "bpe", vocabulary)
    make(tmp_path / "out", source, tokenizer=str(vocabulary))
    keep_vocabulary(SubwordTokenizer("bpe", train_bpe(270, lambda: iter(["x yz yz"]))), "bpe", vocabulary)
    with pytest.raises(ConfigError, match="a data set of another vocabulary"):
        make(tmp_path / "out", source, tokenizer=str(vocabulary))


def test_leaks_without_texts_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="expected files or titles"):
        make(tmp_path / "out", "x.jsonl", steps={"leaks": {"ngram": 8}})


def test_a_data_set_has_its_own_tokenizer_whatever_the_base_trains_on_documents(prepared, tmp_path):
    """The base may be a file's, and the tokenizer another model's."""
    out, overrides = prepared[0], [*RUN, f"data.path={prepared[0]}"]
    assert load("configs/quickstart.yaml", overrides).data.tokenizer == str(out / "tokenizer")
    (tmp_path / "mine.yaml").write_text(f"base: {Path('configs/quickstart.yaml').resolve()}\n")
    config = load(tmp_path / "mine.yaml", overrides)
    assert config.data.tokenizer == str(out / "tokenizer") and load_data(config.data, 0, 300).corpora
    assert load("configs/quickstart.yaml", [*overrides, "data.tokenizer=other"]).data.tokenizer == "other"


def test_corpora_of_a_blend_that_have_other_vocabularies_are_told_apart(prepared, tmp_path):
    out, bytes_out = prepared[0], tmp_path / "bytes"
    make(bytes_out, write_lines(tmp_path / "b.jsonl", [{"text": sentence(1, 400)}]))
    for first, second, tokenizer in ((out, bytes_out, out / "tokenizer"), (bytes_out, out, "bytes")):
        blend = f"data.blend=[{{path: {first}, weight: 1}}, {{path: {second}, weight: 1}}]"
        config = load("configs/quickstart.yaml", [*RUN, blend])
        with pytest.raises(ConfigError) as told:
            load_data(config.data, 0, 300)
        assert str(told.value) == (
            f"data.blend: {second} has another vocabulary than {first}, and corpora of one blend share theirs. "
            f"Prepare {second} again, with tokenizer={tokenizer}."
        )


def test_too_short_a_validation_split_is_made_longer_where_it_is_prepared(prepared):
    config = load("configs/debug.yaml", [*RUN, f"data.path={prepared[0]}", "model.context=4000"])
    with pytest.raises(DataError, match=r"Raise split\.validation where .* set train\.eval_every=0, or lower model"):
        make_loader(config, load_data(config.data, 0, 300), "validation")


def test_a_recipe_is_no_configuration_of_a_run(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text("sources: [a.txt]\nout: b\nsteps: {min_tokens: 3}\n")
    assert main(["plan", str(tmp_path / "r.yaml"), "model.layers=2"]) == Exit.CONFIG
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"is a recipe of `spmd-lm prepare`. Run `spmd-lm prepare {tmp_path}" in told
