"""Figures of what experts receive, and when a run says that some receive nothing."""

import numpy as np
import pytest

from spmd_lm.training.expert_load import CollapseWatch, load_figures

EVEN, COLLAPSED = [1.0, 1.2, 0.8, 1.0], [0.0, 3.9, 0.05, 0.05]


def test_load_is_in_even_shares_of_layers_with_experts():
    tokens = np.array([[0, 0, 0, 0], [10, 30, 0, 0], [10, 10, 10, 10]], np.float32)
    figures = load_figures({"expert_tokens": tokens, "dropped_tokens": np.float32(20), "loss": np.float32(1)})
    assert figures == {"expert_load": [[1, 3, 0, 0], [1, 1, 1, 1]], "largest_load": 3, "dropped_share": 0.25}
    assert load_figures({"loss": np.float32(1)}) == load_figures({"expert_tokens": 0 * tokens}) == {}


@pytest.mark.parametrize("layers", [[COLLAPSED], [EVEN, COLLAPSED]])
def test_a_collapse_that_lasts_is_found_once(layers):
    watch = CollapseWatch(warmup=100)
    found = [watch.problem(step, layers) for step in range(10, 400, 10)]
    assert [i for i, each in enumerate(found) if each] == [12]
    where = f"layer {len(layers)} of those with experts, 3 of 4 experts receive less than 0.1 of an even share"
    assert found[12].startswith(f"step 130: in {where} of the tokens. Raise model.mlp.balance_loss")


def test_a_spell_is_not_found():
    watch = CollapseWatch(warmup=0)
    assert not any(watch.problem(step, [COLLAPSED if step % 3 else EVEN]) for step in range(1, 30))
