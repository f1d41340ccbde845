"""A BERT learns from real text on a mesh: hidden bytes, far beyond the commonest one, and which of two pieces came
first."""

import math

import jax
import numpy as np
import pytest

from spmd_lm.config.schema import RunConfig
from spmd_lm.data.loader import training, validation
from spmd_lm.data.rows import HeldOut, Rows
from spmd_lm.data.sources import load
from spmd_lm.train.evaluate import validation_figures
from spmd_lm.train.program import Program
from tests.published import published

# Plays: who speaks, verses that break off and blank lines show the order of pieces as short as 61 bytes.
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
    "objective": {"kind": "masked_lm", "max_span": 1, "short": 0.0},
    "parallel": {"data": 4, "model": 2},
    "precision": {"compute": "float32"},
    "optim": {"lr": 2e-3, "min_lr": 1e-4, "warmup": 100, "decay": "linear"},
    "train": {"steps": 800, "batch": 64, "eval_batches": 16},
}


def hidden(rows: Rows, batches: int) -> np.ndarray:
    """How often each token is hidden, and so to be predicted, in the first of these batches [V]."""
    read = (rows.rows(step, 0, rows.batch_size) for step in range(batches))
    return sum(np.bincount(b.targets.ravel(), b.weights.ravel(), TREE["model"]["vocab"]) for b in read)


def swapped(held_out: HeldOut) -> tuple[float, float]:
    """Rows of two pieces, and how many of them have the later one first."""
    read = [held_out.rows(step, 0, held_out.batch_size) for step in range(len(held_out))]
    return sum(b.label_weights.sum() for b in read), sum((b.label_weights * b.labels).sum() for b in read)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_hidden_words_and_the_order_of_pieces_are_learned(norm):
    text = published("tinyshakespeare.txt")
    model = TREE["model"] | {"norm": norm}
    config = RunConfig.model_validate(TREE | {"model": model, "data": {"source": "text", "path": str(text)}})
    corpus = load(config.data, config.train.seed, config.model.vocab)
    loader, held_out = training(config, corpus), validation(config, corpus)
    program = Program(config, jax.devices()[:8])
    assert (program.plan.sizes["data"], program.plan.sizes["model"]) == (4, 2)

    state, losses = program.init(), []
    for step in range(config.train.steps):
        state, figures = program.step(state, loader.batch(step, program.batch_shardings))
        losses.append(float(figures["masked_lm_loss"]))
    figures, _ = validation_figures(program, state.params, held_out)

    # Who knows how often each byte is hidden in training, and nothing of a row, names the commonest of them, a space.
    seen, asked = hidden(loader, 50), hidden(held_out, len(held_out))
    baseline = asked[seen.argmax()] / asked.sum()
    entropy = -(asked @ np.log((seen + 1) / (seen + 1).sum())) / asked.sum()
    rows, backwards = swapped(held_out)
    chance, error = max(backwards, rows - backwards) / rows, 0.5 / math.sqrt(rows)
    told = f"{norm}: {figures}, against {baseline:.4f}, {entropy:.4f} nat and {chance:.4f} of {rows:.0f} rows"
    print(told)  # pytest -rP shows it
    assert np.mean(losses[-50:]) < np.mean(losses[:50]) - 0.5, told
    assert figures["eval_masked_lm_loss"] < entropy - 0.3, told
    assert figures["eval_masked_lm_accuracy"] > 1.5 * baseline, told
    assert figures["eval_sentence_order_accuracy"] > chance + 3 * error, told
