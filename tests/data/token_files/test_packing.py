"""A packed row is its documents, each in a row of its own."""

import dataclasses

import jax
import numpy as np
import pytest

from spmd_lm.batch import Batch
from spmd_lm.data.loader import pack
from tests.helpers import LAYOUTS, make_config, program

CONTEXT, ROWS = 16, 8
STARTS = np.array([0, 3, 4, 24, 40, 47, 62, 71, 200])  # of documents: one token, a row's end, several rows


def packed_batch(rng: np.random.Generator) -> Batch:
    ids = rng.integers(0, 61, 200)
    offset = np.arange(ROWS) * 11  # windows that begin anywhere in a document
    rows = ids[offset[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    ones = np.ones((ROWS, CONTEXT), np.float32)
    plain = Batch(rows[:, :-1], rows[:, 1:], ones, np.zeros_like(rows[:, 1:]), None, np.arange(ROWS, dtype=np.int32))
    return pack(plain, STARTS, offset)


def apart(batch: Batch) -> list[Batch]:
    """Batches of one document a row, padded: the k-th holds the k-th document of each row."""
    batches = []
    for k in range(1, int(batch.segments.max()) + 1):
        of_document = batch.segments == k
        order = np.argsort(~of_document, axis=1, kind="stable")  # its tokens first, then the others as padding
        tokens, targets, weights = (
            np.take_along_axis(field, order, axis=1) for field in (batch.tokens, batch.targets, batch.loss_weights)
        )
        kept = np.sort(of_document, axis=1)[:, ::-1]
        positions = np.broadcast_to(np.arange(CONTEXT, dtype=np.int32), tokens.shape)
        segments = np.ones_like(tokens)
        batches.append(Batch(tokens, targets, weights * kept, positions, segments, batch.sample_ids))
    return batches


@pytest.mark.parametrize("layout", ["one", "data2-model4-sequence-zero1"])
def test_packed_losses_equal_separate_documents(x64, layout):
    data = {"source": "tokens", "path": "never opened", "pack": True}
    model = {"dropout": 0.0, "attention_dropout": 0.0}
    laid_out = program(make_config(data=data, model=model, parallel=LAYOUTS[layout], train={"batch": ROWS}))
    params, batch = laid_out.init().params, packed_batch(np.random.default_rng(0))

    def loss(batch: Batch) -> np.ndarray:
        fields = {name: field[None] for name, field in vars(batch).items() if field is not None}
        placed = jax.device_put(dataclasses.replace(laid_out.abstract_batch(), **fields), laid_out.batch_shardings)
        return np.array(laid_out.evaluate(params, placed)["causal_lm"])  # loss, correct, weight

    separate = apart(batch)
    assert len(separate) >= 3
    np.testing.assert_allclose(loss(batch), sum(map(loss, separate)), rtol=1e-12)
    mixed = dataclasses.replace(batch, segments=np.ones_like(batch.segments))
    assert abs(loss(mixed)[0] - loss(batch)[0]) > 1e-3
