"""What the compiled step sends: Megatron's all-reduces over model, and every gradient once over data.

The CPU's compiler leaves the input gradients of q, k and v to be summed one by one, so that a layer's backward pass
sends four activations where two would do; counts are judged elsewhere."""

import pytest

from tests.helpers import program, run_of, shard_elements
from tests.hlo import collectives

RUNS = {1: run_of("data4-model2"), 4: run_of("data4-model2", 4, remat="selective")}
DATA = frozenset({frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})})
MODEL = frozenset({frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5}), frozenset({6, 7})})


@pytest.fixture(params=RUNS, ids="{} microbatches".format)
def run(request, x64):
    return RUNS[request.param]


def sent(config):
    found = collectives(program(config).compiled.as_text())
    assert {c.kind for c in found} == {"all-reduce"}
    assert {c.groups for c in found} == {DATA, MODEL}
    return found


def test_gradients_cross_data_once_however_many_microbatches(run):
    over_data = [c for c in sent(run) if c.groups == DATA]
    own = shard_elements(program(run).abstract_state().params)
    assert sum(c.elements for c in over_data) == own + 2  # the loss, and the weight it is a mean over
    assert not any(c.looped for c in over_data)


def test_neither_weights_nor_logits_cross_model(run):
    over_model = sum(c.elements for c in sent(run) if c.groups == MODEL)
    tokens = run.train.batch * run.model.context // run.parallel.microbatches // run.parallel.data
    layer = 2 + 4  # activations: after attention and MLP; the gradients of q's, k's, v's and the MLP's inputs
    ends = 1 + 1  # the embedding; the gradient of the head's input
    per_token = 3  # of the loss: maximum, normaliser, the target's logit
    norm = 1  # of the gradients
    assert over_model == tokens * ((layer + ends) * run.model.width + per_token) + norm
