import jax
import numpy as np
import pytest

from spmd_lm.training.bench import random_batch
from tests.helpers import FLOAT32, ORIGINAL_BERT, TASKS, make_config, program

RUNS = {
    "causal": {},
    "masked": {"model": ORIGINAL_BERT, "objective": {"kind": "masked_lm"}},
    **{name: {"model": ORIGINAL_BERT} | sections for name, sections in TASKS.items()},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_random_batch_fits_the_step(name):
    """Shapes and dtypes are the step's; weights are 1."""
    p = program(make_config(parallel={"data": 2, "model": 2, "microbatches": 2}, precision=FLOAT32, **RUNS[name]))
    batch, wanted = random_batch(p), p.abstract_batch()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    assert all((np.asarray(w) == 1).all() for w in (batch.loss_weights, batch.label_weights) if w is not None)
    assert np.unique(batch.sample_ids).size == 16 and 0 <= np.asarray(batch.tokens).min() < p.config.model.vocab
