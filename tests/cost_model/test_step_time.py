"""The parts of a predicted step, each against figures worked out by hand."""

import itertools
import math

import pytest

from spmd_lm.analysis.topology import GPUS, TPUS
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import step_time
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.hardware import GIB, Products, find_hardware
from spmd_lm.cost_model.kernels import Kernels, Product
from spmd_lm.cost_model.step_time import devices_within_host, predict_step
from spmd_lm.cost_model.systems import System, find_system
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE
from spmd_lm.step.program import abstract_plan
from tests.helpers import make_config

H100 = "NVIDIA H100 80GB HBM3"
HARDWARE = find_hardware(H100)
IDEAL = HARDWARE._replace(
    peaks={"bfloat16": 1e15},
    memory=HARDWARE.memory._replace(bandwidth=1e12, share=0.5),
    products=Products(0.5, 0, 0.25, (256, 128), 100),
)


def config(**sections) -> RunConfig:
    model = {"layers": 8, "width": 1024, "heads": 16, "context": 512, "vocab": 1024, "dropout": 0.0}
    model["attention_dropout"] = 0.0
    precision = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
    return make_config(model=model, precision=precision, train={"batch": 64}, **sections)


def predicted(run, devices, system="spmd_lm"):
    system = find_system(system) if isinstance(system, str) else system
    return predict_step(run, abstract_plan(run, devices, "gpu", H100), HARDWARE, system)


def test_a_product_is_bound_by_the_peak_or_by_memory():
    kernels = Kernels(IDEAL, software=0.5, overhead=1e-6, size=2)
    square = Product(25600, 12800, 12800)  # 100 x 100 tiles on 100 cores
    assert kernels.product(square) == pytest.approx(2 * 25600 * 12800 * 12800 / (1e15 * 0.25) + 1e-6)
    thin = Product(256, 2, 128, batch=100)
    assert kernels.product(thin) == pytest.approx(2 * 100 * (256 * 2 + 2 * 128 + 256 * 128) / 0.5e12 + 1e-6)
    assert kernels.attention(1e12) == pytest.approx(1e12 / (1e15 * 0.125) + 1e-6)
    assert kernels.elementwise(1e9, 3) == pytest.approx(2e9 / 0.5e12 + 3e-6)


def test_backward_has_two_products_for_each():
    product = Product(2, 3, 5, 7)
    assert [each.flops for each in product.of_backward] == [product.flops] * 2
    assert product.elements == 7 * (6 + 15 + 10) == sum(each.elements for each in product.of_backward) / 2


def test_a_share_of_the_peak_is_lost_to_tiles_rounds_and_short_inner_dimensions():
    products = Products(limit=0.8, half_inner=100, attention=0.5, tile=(256, 128), cores=4)
    assert products.share(512, 300, 256, 1) == pytest.approx(0.8 * 0.75)  # four tiles on four cores
    assert products.share(257, 300, 256, 1) == pytest.approx(0.6 * 257 / 512)  # nearly half of two tiles is padding
    assert products.share(512, 300, 256, 5) == pytest.approx(0.6)  # 20 tiles, 5 rounds
    assert products.share(512, 300, 128, 3) == pytest.approx(0.6 * 6 / 8)  # 6 tiles, 2 rounds


def test_collectives_wait_for_their_hops():
    start, link, network = HARDWARE.links.latency
    delay = HARDWARE.links.delay
    assert delay(ALL_GATHER, 8, 1) == pytest.approx(start + 7 * link)
    assert delay(ALL_GATHER, 16, 2) == pytest.approx(start + 13 * link + 2 * network)
    assert delay(ALL_REDUCE, 2, 1) == pytest.approx(start + 2 * link)
    assert delay(ALL_REDUCE, 64, 8) == pytest.approx(start + 2 * (3 * link + 3 * network))
    assert delay(COLLECTIVE_PERMUTE, 64, 8) == start + network


@pytest.mark.parametrize(
    ("layout", "axes", "within"),
    [
        ({"model": 8, "data": 4}, ("model",), 8),
        ({"model": 8, "data": 4}, ("data",), 1),
        ({"model": 2, "data": 16}, ("data",), 4),
        ({"model": 2, "pipe": 4, "data": 2}, ("pipe",), 4),
        ({"model": 2, "pipe": 8, "data": 2}, ("pipe",), 4),
        ({"model": 16, "data": 2}, ("model",), 8),
        ({"replica": 2, "data": 4}, ("replica", "data"), 8),
        ({"replica": 4, "data": 8}, ("replica", "data"), 8),
    ],
)
def test_devices_within_a_host(layout, axes, within):
    """Of hosts of eight, as the mesh numbers devices: replica, data, pipe, model."""
    parallel = {"pipe": 1, "data": 1, "model": 1, "microbatches": 8 if layout.get("pipe", 1) > 1 else 1} | layout
    run = config(parallel=parallel)
    plan = abstract_plan(run, math.prod(layout.values()), "gpu", H100)
    assert devices_within_host(plan, axes, 8) == within


def test_a_window_hides_no_more_than_it_has():
    run = config(parallel={"data": 64, "zero": 1})
    visible = predicted(run, 64)
    gradients, weights = (
        sum(each.seconds for each in visible.collectives if each.row.part == part) for part in ("gradients", "weights")
    )
    assert visible.exposed == pytest.approx(sum(each.seconds for each in visible.collectives))
    times = list(visible.collectives)
    hidden_by = ["compute" if each.row.part in ("gradients", "weights") else None for each in times]
    for window in (0.0, gradients / 2, gradients + weights / 2, 10.0):
        exposed = step_time._expose(times, hidden_by, {"compute": window}, 0.5)
        left = sum(each.exposed_seconds for each in exposed if each.row.part in ("gradients", "weights"))
        assert left == pytest.approx(max(0.0, gradients + weights - window))


def test_ours_hides_what_the_plan_says():
    def exposed(part, **parallel):
        step = predicted(config(parallel={"microbatches": 8} | parallel), 16)
        of_part = [each for each in step.collectives if each.row.part == part]
        assert of_part
        return sum(each.exposed_seconds for each in of_part) / sum(each.seconds for each in of_part)

    assert exposed("weights", data=8, model=2, zero=3, prefetch="off") == 1
    assert exposed("weights", data=8, model=2, zero=3, prefetch="on") < 1
    assert exposed("messages", data=4, pipe=4) < 1 == exposed("messages", data=4, pipe=4, schedule="breadth_first")
    assert exposed("blocks", data=8, model=2) == 1 > exposed("blocks", data=8, model=2, collective_matmul="on")


def test_a_step_is_the_sum_of_its_parts_and_sends_what_theory_has():
    run = config(parallel={"pipe": 2, "data": 2, "model": 2, "microbatches": 8, "zero": 1, "sequence": True})
    plan = abstract_plan(run, 8, "gpu", H100)
    step = predict_step(run, plan, HARDWARE, find_system("spmd_lm"))
    assert step.seconds == pytest.approx(sum(step.parts.values())) and min(step.compute, step.bubble) > 0
    assert [each.row for each in step.collectives] == expected_collectives(run, plan)
    assert {each.link for each in step.collectives} == {"link"}
    within_stage = sum(each.seconds for each in step.collectives if each.row.part in ("blocks", "messages"))
    head = predicted(run.model_copy(update={"parallel": run.parallel.model_copy(update={"pipe": 1, "data": 4})}), 8)
    assert step.bubble > within_stage / 8 and step.compute < 2 * head.compute


def test_what_runs_again_takes_time():
    policies = ("none", "selective", "full")
    of_policy = [predicted(config(remat={"policy": policy}, parallel={"data": 8}), 8).compute for policy in policies]
    assert of_policy == sorted(of_policy) and of_policy[2] < 1.4 * of_policy[0]
    layer = of_policy[2] - of_policy[0]  # a forward pass of all layers
    assert 0.2 < layer / of_policy[0] < 0.4


def test_our_pipelines_run_a_chunk_again_and_megatron_s_do_not():
    run = config(parallel={"pipe": 4, "data": 2, "microbatches": 8})
    saving = find_system("spmd_lm")._replace(saves_for_backward=True)
    ours, theirs = (predicted(run, 8, system).compute for system in ("spmd_lm", saving))
    assert 1.1 * theirs < ours < 1.4 * theirs


def test_the_optimizer_reads_and_writes_its_state():
    run = config(parallel={"data": 8})
    plan = abstract_plan(run, 8, "gpu", H100)
    elements = sum(math.prod(leaf.shape) for leaf in leaves(plan.padded_shapes))
    memory = HARDWARE.memory
    seconds = elements * (2 * 3 * 4 + 2 * 4 + 2) / (memory.bandwidth * memory.share)
    assert predicted(run, 8).optimizer == pytest.approx(seconds)
    sharded = predicted(config(parallel={"data": 8, "zero": 3}), 8).optimizer
    assert sharded == pytest.approx(seconds / 8, rel=0.02)  # vectors are replicated


def leaves(tree):
    return itertools.chain.from_iterable(map(leaves, tree.values())) if isinstance(tree, dict) else [tree]


def test_the_table_and_the_compilers_agree_on_hardware():
    for gpu in GPUS.values():
        hardware = find_hardware(gpu.name)
        assert hardware.memory.size == pytest.approx(gpu.memory, rel=1e-4) and hardware.products.cores == gpu.cores
    kinds = {"v4": "TPU v4", "v5p": "TPU v5", "v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "7x": "TPU7x"}
    assert kinds.keys() == TPUS.keys()
    sizes = {kind: find_hardware(name).memory.size / GIB for kind, name in kinds.items()}
    assert sizes == {"v4": 32, "v5p": 95, "v5e": 16, "v6e": 32, "7x": 96}


def test_every_system_can_run():
    run = config(parallel={"data": 8})
    for name in ("spmd_lm", "megatron-2019", "megatron-2021", "megatron-2022", "megatron-core", "deepspeed-zero3"):
        assert isinstance(find_system(name), System) and predicted(run, 8, name).seconds > 0
