"""From raw text to a model: a run on what `prepare` made."""

import json

import numpy as np
import pytest

from spmd_lm.config.load import load
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.errors import ConfigError
from tests import processes
from tests.prepare.corpora import make, sentence, write_lines

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
    """Without the data set too: the run has a copy of its tokenizer."""
    out, run = prepared[0], tmp_path / "run"
    processes.run("train", "configs/debug.yaml", "--devices", "2", f"run.dir={run}", f"data.path={out}", *RUN)
    evaluated = json.loads(processes.run("eval", run, "--json", "-"))
    assert evaluated["eval_nats_per_byte"] < evaluated["eval_loss"]
    out.rename(tmp_path / "moved")
    assert processes.run("generate", run, "--prompt", "w1 w2", "--tokens", "5").startswith("w1 w2")
