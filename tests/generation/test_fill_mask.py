"""Predictions of hidden tokens: the probabilities that evaluation computes its loss from, under every layout."""

import functools
import math

import jax
import numpy as np
import pytest

import spmd_lm
from spmd_lm.batch import Batch
from spmd_lm.errors import ConfigError, DataError
from spmd_lm.generation.fill_mask import fill_mask, fill_mask_run
from tests.helpers import make_config, program, run_of

BERT = {
    "model": {"kind": "bert", "vocab": 260, "token_types": 2, "dropout": 0.0},
    "objective": {"kind": "masked_lm"},
    "data": {"source": "python-stdlib"},
}
TEXT = "ab[MASK]d [MASK]"
CLS, SEP, MASK, PAD = range(256, 260)


@functools.cache
def predictions(layout: str) -> list[dict[str, float]]:
    """Probabilities of the ASCII tokens for each hidden token of TEXT, in the order they come in."""
    found = fill_mask(program(run_of(layout, **BERT)), params(layout), TEXT, 260)
    return [{token: probability for token, probability in each if token.isascii()} for each in found]


def params(layout: str):
    """Parameters that spread probabilities: a fresh model's are all but equal."""
    return jax.tree.map(lambda leaf: leaf * 8, program(run_of(layout, **BERT)).init().params)


def test_probabilities_are_those_of_the_evaluation(x64):
    p = program(run_of("one", **BERT))
    context = p.config.model.context
    row = np.full(context, PAD)
    row[:9] = [CLS, *b"ab", MASK, *b"d ", MASK, SEP, PAD]
    at, token = 3, "c"

    def rows(values) -> np.ndarray:
        return np.broadcast_to(np.asarray(values), (1, p.config.train.batch, context))

    columns = np.arange(context)
    batch = Batch(
        tokens=rows(row.astype(np.int32)),
        targets=rows(np.full(context, ord(token), np.int32)),
        loss_weights=rows((columns == at).astype(np.float32)),
        positions=rows(columns.astype(np.int32)),
        segments=rows((columns < 8).astype(np.int32)),
        sample_ids=np.arange(p.config.train.batch, dtype=np.int32)[None],
        token_type_ids=rows(np.zeros(context, np.int32)),
        labels=np.zeros((1, p.config.train.batch), np.int32),
        label_weights=np.ones((1, p.config.train.batch), np.float32),
    )
    loss, _, weight = p.evaluate(params("one"), jax.device_put(batch, p.batch_shardings))["masked_lm"]
    assert predictions("one")[0][token] == pytest.approx(math.exp(-loss / weight), rel=1e-9)


def test_tokens_are_in_order_of_their_probability(x64):
    for each in predictions("one"):
        chances = list(each.values())
        assert chances == sorted(chances, reverse=True) and 1 / 260 < chances[0] < sum(chances) < 1
    first, second = predictions("one")
    assert first != second  # each hidden token has its own


@pytest.mark.parametrize("layout", ["data2-model4-sequence-zero1"])
@pytest.mark.slow
def test_every_layout_predicts_the_same(layout, x64):
    for got, want in zip(predictions(layout), predictions("one"), strict=True):
        assert got == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "top", "error", "match"),
    [
        ("nothing", 5, DataError, "hides nothing. Write \\[MASK\\]"),
        ("much too long [MASK]", 5, DataError, "has 17 tokens with"),
        ("[MASK]", 0, ConfigError, "top=0: ask for 1 to 260"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(text, top, error, match, x64):
    with pytest.raises(error, match=match):
        fill_mask(program(run_of("one", **BERT)), None, text, top)


def test_a_run_that_did_not_learn_it_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.kind=causal_lm has not learned"):
        fill_mask_run(make_config(), "[MASK]", 5)


def test_a_batch_is_what_a_step_trains_on():
    config = make_config(parallel={"data": 4, "microbatches": 2})
    first, second = (spmd_lm.read_batch(config, step) for step in (1, 2))
    assert first.tokens.shape == first.targets.shape == (config.train.batch, config.model.context)
    assert (first.tokens[:, 1:] == first.targets[:, :-1]).all() and (first.tokens != second.tokens).any()
    with pytest.raises(ConfigError, match="step=0: a run's steps are counted from 1"):
        spmd_lm.read_batch(config, 0)


def test_ids_without_a_token_are_never_predicted(x64):
    """The vocabulary is padded to 320."""
    padded = BERT | {"model": BERT["model"] | {"vocab": 320}}
    p = program(make_config(**padded))
    for each in fill_mask(p, jax.tree.map(lambda leaf: leaf * 8, p.init().params), TEXT, 260):
        assert sum(prediction.probability for prediction in each) == pytest.approx(1)
    with pytest.raises(ConfigError, match="ask for 1 to 260 tokens"):
        fill_mask(p, p.init().params, TEXT, 261)
