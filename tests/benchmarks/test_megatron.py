"""Steps of Megatron-LM and DeepSpeed, each part against figures worked out by hand."""

import pytest

from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE
from spmd_lm.resolve import abstract_plan
from tests.cost_model import test_step_time as ours
from tests.cost_model.test_step_time import H100, config

ALL = "qkv scores context output up down"


@pytest.fixture
def megatron(benchmark_script):
    return benchmark_script("megatron")


def predicted(megatron, run, hardware=ours.FREE):
    profile = megatron.profiles()["megatron-2022"]._replace(software=1.0, kernel_overhead=0.0)
    return megatron.predict_step(run, abstract_plan(run, 8, "gpu", H100), hardware, profile)


def test_a_window_hides_no_more_than_it_has(megatron):
    visible = predicted(megatron, config(parallel={"data": 8, "zero": 1}), ours.HARDWARE)
    rows, times = zip(*((each.row, each.seconds) for each in visible.collectives), strict=True)
    assert [row.part for row in rows] == ["gradients", "weights"] and visible.exposed == pytest.approx(sum(times))
    profile = megatron.profiles()["megatron-2022"]._replace(beside={"gradients": "compute", "weights": "compute"})
    for window in (0.0, times[0] / 2, times[0] + times[1] / 2, 10.0):
        hidden = megatron.hidden_seconds(rows, times, {"compute": window}, profile)
        assert sum(hidden) == pytest.approx(min(sum(times), window))


@pytest.mark.parametrize(
    ("policy", "again"), [("none", ""), ("selective", "scores context"), ("residual", ALL), ("full", ALL)]
)
def test_products_of_a_layer(megatron, policy, again):
    """Scores that a mask hides are computed too."""
    step = predicted(megatron, config(parallel=ours.TENSOR, remat={"policy": policy}))
    assert step.compute == pytest.approx(ours.flops_of_tensor(1.0, again))


def test_a_pipeline_saves_what_its_backward_needs(megatron):
    step = predicted(megatron, config(parallel=ours.PIPELINE))
    assert (step.compute, step.bubble) == pytest.approx(ours.flops_of_pipeline(1.0, 3 * 8))


def test_collectives_are_what_the_papers_say(megatron):
    """arXiv:2104.04473, section 3.2: 8 b s h (t - 1) / t elements a layer and microbatch, and half as many again where
    the layer is recomputed; between stages b s h / t; gradients once."""
    run = config(parallel={"pipe": 2, "data": 2, "model": 4, "microbatches": 8}, remat={"policy": "full"})
    plan = abstract_plan(run, 16, "gpu", H100)
    rows = {(row.part, row.kind): row for row in megatron.megatron_collectives(run, plan)}
    bsh, microbatches, layers = 64 // 2 // 8 * 512 * 1024, 8, 4
    assert rows["blocks", ALL_REDUCE].bytes == 1.5 * 8 * bsh * 3 / 4 * 2 * microbatches * layers
    assert rows["messages", COLLECTIVE_PERMUTE].bytes == 2 * microbatches * bsh / 4 * 2
    assert rows["messages", ALL_GATHER].bytes == 2 * microbatches * bsh * 3 / 4 * 2
    gradients = plan.elements_per_device(gathered=True) * 4
    assert rows["gradients", ALL_REDUCE].bytes == 2 * gradients / 2
    zero3 = config(parallel={"data": 8, "zero": 3})
    plan = abstract_plan(zero3, 8, "gpu", H100)
    rows = {row.part: row for row in megatron.megatron_collectives(zero3, plan)}
    parameters = plan.elements_per_device(gathered=True)
    assert rows["weights"].bytes == 2 * parameters * 2 * 7 / 8 and rows["gradients"].bytes == parameters * 4 * 7 / 8
