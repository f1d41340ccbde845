"""A BERT learns from real text on a mesh: masked bytes, far better than by frequency, and the order of two segments."""

import json
import math

import numpy as np
import pytest

from spmd_lm.config.load import dump
from spmd_lm.config.schema import RunConfig
from spmd_lm.data.corpus import load_data, make_loader
from spmd_lm.data.loader import Loader
from tests import processes
from tests.published import published

# Plays: who speaks, verses that break off and blank lines show the order of segments as short as 61 bytes.
TREE = {
    "model": {
        "kind": "bert",
        "layers": 2,
        "width": 64,
        "heads": 4,
        "context": 64,
        "vocab": 260,
        "token_types": 2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation": "gelu",
        "scan": False,
    },
    "objective": {"kind": "masked_lm", "max_span": 1, "short_seq_prob": 0.0},
    "parallel": {"data": 4, "model": 2},
    "precision": {"compute": "float32"},
    "optim": {"lr": 2e-3, "min_lr": 1e-4, "warmup": 100, "decay": "linear"},
    "train": {"steps": 800, "batch": 64, "log_every": 1, "eval_every": 800, "eval_batches": 16},
}


def masked_counts(rows: Loader, batches: int) -> np.ndarray:
    """Number of times that each token is masked, and so predicted, in the first batches [vocab]."""
    read = (rows.rows(step, 0, rows.batch_size) for step in range(batches))
    return sum(np.bincount(b.targets.ravel(), b.loss_weights.ravel(), TREE["model"]["vocab"]) for b in read)


def swapped_counts(held_out: Loader) -> tuple[float, float]:
    """Rows of two segments, and how many of them have the later one first."""
    read = [held_out.rows(step, 0, held_out.batch_size) for step in range(len(held_out))]
    return sum(b.label_weights.sum() for b in read), sum((b.label_weights * b.labels).sum() for b in read)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_masked_bytes_and_sentence_order_are_learned(norm, tmp_path):
    sections = {"model": TREE["model"] | {"norm": norm}, "run": {"dir": str(tmp_path / "run"), "simulate_devices": 8}}
    data = {"source": "text", "path": str(published("tinyshakespeare.txt"))}
    config = RunConfig.model_validate(TREE | sections | {"data": data})
    (tmp_path / "bert.yaml").write_text(dump(config))
    assert "data 4 x model 2" in processes.run("train", tmp_path / "bert.yaml")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["masked_lm_loss"] for record in records]
    metrics = {name: value for name, value in records[-1].items() if name.startswith("eval_")}

    corpus = load_data(config.data, config.train.seed, config.model.vocab)
    loader, held_out = make_loader(config, corpus, "training"), make_loader(config, corpus, "validation")

    # The baseline knows how often each byte is masked in training, and predicts the commonest of them, a space.
    seen, asked = masked_counts(loader, 50), masked_counts(held_out, len(held_out))
    baseline = asked[seen.argmax()] / asked.sum()
    entropy = -(asked @ np.log((seen + 1) / (seen + 1).sum())) / asked.sum()
    rows, backwards = swapped_counts(held_out)
    chance, error = max(backwards, rows - backwards) / rows, 0.5 / math.sqrt(rows)
    summary = f"{norm}: {metrics}, against {baseline:.4f}, {entropy:.4f} nat and {chance:.4f} of {rows:.0f} rows"
    print(summary)  # pytest -rP shows it
    assert np.mean(losses[-50:]) < np.mean(losses[:50]) - 0.5, summary
    assert metrics["eval_masked_lm_loss"] < entropy - 0.3, summary
    assert metrics["eval_masked_lm_accuracy"] > 1.5 * baseline, summary
    assert metrics["eval_sentence_order_accuracy"] > chance + 3 * error, summary
