"""The parts of a predicted step, each against figures worked out by hand."""

import dataclasses
import math

import jax
import pytest

from spmd_lm.analysis.compiled_flops import compiled_flops
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.topology import GPUS, TPUS
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.cost_model.hardware import GIB, Latency, Links, Products, find_hardware
from spmd_lm.cost_model.kernels import Kernels, Product
from spmd_lm.cost_model.step_time import OURS, SIMULATED, predict_step
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE
from spmd_lm.parallel.groups import offloaded_parameters
from spmd_lm.parallel.mesh import devices_within_domain
from spmd_lm.resolve import abstract_plan
from spmd_lm.step.program import Program
from tests.helpers import make_config

H100 = "NVIDIA H100 80GB HBM3"
HARDWARE = find_hardware(H100)
IDEAL = dataclasses.replace(
    HARDWARE,
    peaks={"bfloat16": 1e15},
    memory=HARDWARE.memory._replace(bandwidth=1e12, share=0.5),
    products=Products(0.5, 0, 0.25, (256, 128), 100),
)


def config(**sections) -> RunConfig:
    model = {"layers": 8, "width": 1024, "heads": 16, "context": 512, "vocab": 1024, "dropout": 0.0}
    model |= {"attention_dropout": 0.0} | sections.pop("model", {})
    precision = {"params": "float32", "compute": "bfloat16", "reduce": "float32"}
    return make_config(model=model, precision=precision, train={"batch": 64}, **sections)


def predicted(run, devices, hardware=HARDWARE, software=OURS):
    return predict_step(run, abstract_plan(run, devices, "gpu", H100), hardware, software)


def test_a_product_is_bound_by_the_peak_or_by_memory():
    kernels = Kernels(IDEAL, "bfloat16", software=0.5, overhead=1e-6)
    square = Product(25600, 12800, 12800)  # 100 x 100 tiles on 100 cores
    assert kernels.product(square) == pytest.approx(2 * 25600 * 12800 * 12800 / (1e15 * 0.25) + 1e-6)
    thin = Product(256, 2, 128, batch=100)
    assert kernels.product(thin) == pytest.approx(2 * 100 * (256 * 2 + 2 * 128 + 256 * 128) / 0.5e12 + 1e-6)
    assert kernels.attention(1e12) == pytest.approx(1e12 / (1e15 * 0.125) + 1e-6)
    assert kernels.traffic(1e9) == pytest.approx(1e9 / 0.5e12)


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
    assert delay(ALL_GATHER, 4, 4) == pytest.approx(start + 3 * network)  # one device in each domain
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
    assert devices_within_domain(plan.mesh, axes, 8) == within


def test_compute_hides_no_more_than_it_has():
    run = config(parallel={"data": 8, "zero": 3, "prefetch": "on"})
    for slower in (1, 2, 10):
        links = HARDWARE.links._replace(link=HARDWARE.links.link / slower)
        step = predicted(run, 8, dataclasses.replace(HARDWARE, links=links))
        hidden = sum(each.seconds - each.exposed_seconds for each in step.collectives)
        beside = sum(each.seconds for each in step.collectives if each.row.part in ("gradients", "weights"))
        assert hidden == pytest.approx(min(beside, step.compute))


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
    step = predict_step(run, plan, HARDWARE, OURS)
    assert step.seconds == pytest.approx(sum(step.parts.values())) and min(step.compute, step.bubble) > 0
    assert [each.row for each in step.collectives] == expected_collectives(run, plan)
    assert {each.link for each in step.collectives} == {"link"}
    within_stage = sum(each.seconds for each in step.collectives if each.row.part in ("blocks", "messages"))
    head = predicted(run.model_copy(update={"parallel": run.parallel.model_copy(update={"pipe": 1, "data": 4})}), 8)
    assert step.bubble > within_stage / 8 and step.compute < 2 * head.compute


def test_what_runs_again_takes_time():
    runs = (config(remat={"policy": policy}, parallel={"data": 8}) for policy in ("none", "selective", "full"))
    none, selective, full = (predicted(run, 8).compute for run in runs)
    assert none <= selective <= full and 0.2 < (full - none) / none < 0.4  # a forward pass of all layers


FREE = dataclasses.replace(  # where only products take time, a second for each FLOP
    HARDWARE,
    peaks={"bfloat16": 1.0},
    memory=HARDWARE.memory._replace(bandwidth=math.inf),
    products=Products(1.0, 0, 1.0, (1, 1), 1),
    links=HARDWARE.links._replace(link=math.inf, network=math.inf, latency=Latency(0.0, 0.0, 0.0)),
)
NO_LOSS = {"share": 1.0, "kernel_overhead": 0.0}
TENSOR, PIPELINE = {"data": 2, "model": 4}, {"pipe": 4, "data": 2, "microbatches": 8}


def test_layers_wait_for_copies_to_their_host_that_they_do_not_hide():
    full, offload = (config(remat={"policy": policy}) for policy in ("full", "offload"))
    alone = predicted(full, 1)
    slow, fast, unknown = (
        predicted(offload, 1, dataclasses.replace(HARDWARE, host=rate)) for rate in (1e6, 1e18, None)
    )
    assert fast.seconds == unknown.seconds == alone.seconds and fast.host == 0
    copies = 2 * 8 * 64 * 512 * 1024 * 2 / 1e6  # there and back, of 8 layers
    assert slow.exposed == alone.exposed and slow.seconds == pytest.approx(alone.seconds + slow.host)
    assert copies - alone.compute < slow.host < copies


def test_updates_of_what_is_offloaded_wait_for_its_copies():
    """In and out at once, where devices update it; where the host does, gradients out, then weights in."""
    hardware = dataclasses.replace(HARDWARE, host=1e6)
    plain, device, host, disk = (
        config(optim={"offload": offload, "offload_update": place})
        for offload, place in (("none", "device"), ("host", "device"), ("host", "host"), ("disk", "device"))
    )
    matrices = sum(each.elements for each in offloaded_parameters(abstract_plan(plain, 1, "gpu", H100)))
    alone, on_device, on_host = (predicted(each, 1, hardware) for each in (plain, device, host))
    assert alone.host == 0
    assert on_device.host == pytest.approx(12 * matrices / 1e6)
    assert on_host.host == pytest.approx((4 + 2) * matrices / 1e6)
    assert on_device.seconds == pytest.approx(alone.seconds + on_device.host)
    assert predicted(disk, 1, hardware) == on_device  # a disk's own time is not modelled


def flops_of(run, software=OURS):
    """FLOPs of one device's products in a step: (all, the bubble's)."""
    step = predicted(run, 8, FREE, software._replace(**NO_LOSS))
    return step.compute, step.bubble


def flops_of_tensor(visible, again):
    """By hand, of a step under TENSOR: backward takes twice as much as forward, and runs some products again.

    visible: share of the scores that is computed."""
    tokens, layers, h, s = 64 // 2 * 512, 8, 1024, 512
    of = {"qkv": 6 * h * h, "output": 2 * h * h, "up": 8 * h * h, "down": 8 * h * h}
    of |= {"scores": visible * 2 * s * h, "context": visible * 2 * s * h}
    return tokens / 4 * (layers * (3 * sum(of.values()) + sum(of[name] for name in again.split())) + 6 * h * 1024)


def flops_of_pipeline(visible, passes, heads=8):
    """By hand, of a step under PIPELINE, of which each stage waits (p - 1) / m.  passes: of two layers, forward."""
    tokens, h, s = 64 // 2 // 8 * 512, 1024, 512
    in_layers = passes * 2 * tokens * (24 * h * h + visible * 4 * s * h)
    return in_layers + heads * tokens * 6 * h * 1024, in_layers * 3 / 8


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("none", ""),
        ("selective", "scores"),
        ("residual", "qkv scores context up"),
        ("full", "qkv scores context output up"),
    ],
)
def test_products_of_a_layer(policy, again):
    """Of hidden scores a compiled program computes half."""
    run = config(model={"attention": "xla"}, parallel=TENSOR, remat={"policy": policy})
    assert flops_of(run)[0] == pytest.approx(flops_of_tensor(0.75, again))


def test_kernels_of_a_layer_and_what_they_move():
    """Forward four products, attention, two norms, three biases, the activation and the sum after the MLP; backward
    four gradients of weights, six of inputs, attention, the activation and two norms.  Hardware may say what a kernel
    takes besides its work: nothing, too."""

    def of_layer(overhead, bandwidth):
        memory = HARDWARE.memory._replace(bandwidth=bandwidth, share=1.0)
        hardware = dataclasses.replace(FREE, peaks={"bfloat16": math.inf}, memory=memory, kernel_overhead=overhead)
        runs = (config(model={"layers": n}, remat={"policy": "none"}, parallel={"data": 8}) for n in (1, 2))
        one, two = (predicted(run, 8, hardware, OURS._replace(kernel_overhead=1.0)).compute for run in runs)
        return two - one

    assert of_layer(None, math.inf) == 12 + 14
    h, tokens = 1024, 64 // 8 * 512
    products = (16 + 16 + 18) * tokens * h + 3 * 12 * h * h  # forward, gradients of weights, and of inputs
    forward = (1 + 1) + 3 * (1 + 1) + (2 + 2) + (4 + 4) + (2 + 1)  # streams read and written
    backward = (8 + 4) + (3 + 1) + (5 + 1)
    of_norms = 2 * 2 * 4 * tokens  # means and deviations, in float32
    assert of_layer(0.0, 1.0) == 2 * (products + (forward + backward) * tokens * h) + of_norms


def test_a_pipeline_runs_its_chunks_again():
    """Stages but the last run forward ahead of backward's pass.  Simulated ones leave the processor to the head."""
    run = config(model={"attention": "xla"}, parallel=PIPELINE)
    passes = 3 * 8 + 8 - 8 / 4
    assert flops_of(run) == pytest.approx(flops_of_pipeline(0.75, passes))
    assert flops_of(run, SIMULATED) == pytest.approx((flops_of_pipeline(0.75, passes, heads=8 / 4)[0], 0))


def test_idle_stages_that_run_leave_no_bubble():
    idle, working = (config(parallel=PIPELINE | {"run_idle_stages": runs}) for runs in (False, True))
    compute, bubble = flops_of(working)
    assert bubble == 0 and compute > flops_of(idle)[0]


@pytest.mark.parametrize("policy", ["full", *(pytest.param(p, marks=pytest.mark.slow) for p in ("none", "selective"))])
def test_compiled_steps_multiply_as_much(policy):
    """On a CPU, whose program has every product in its text."""
    model = {"layers": 3, "width": 64, "heads": 4, "context": 128, "vocab": 256, "attention": "xla"}
    precision = dict.fromkeys(("params", "compute", "reduce"), "float32")
    run = make_config(
        model=model | {"dropout": 0.0, "attention_dropout": 0.0},
        precision=precision,
        remat={"policy": policy},
        train={"batch": 8},
        parallel={"data": 1},
    )
    program = Program(run, jax.devices()[:1])
    free = dataclasses.replace(FREE, peaks={"float32": 1.0})
    expected = predict_step(run, program.plan, free, OURS._replace(**NO_LOSS)).compute
    assert compiled_flops(HloModule(program.compiled.as_text())) == pytest.approx(expected, rel=0.02)


def test_products_run_at_the_rate_of_their_dtype():
    for dtype, slower in (("float16", 1.0), ("float32", 2.0)):
        kernels = (Kernels(HARDWARE, each, 1.0, 0.0) for each in (dtype, "bfloat16"))
        other, half = (each.product(Product(2**14, 2**14, 2**14)) for each in kernels)
        assert other == pytest.approx(slower * half)


def test_the_optimizer_reads_and_writes_its_state():
    run = config(parallel={"data": 8})
    plan = abstract_plan(run, 8, "gpu", H100)
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.padded_shapes))
    memory = HARDWARE.memory
    seconds = elements * (2 * 3 * 4 + 2 * 4 + 2) / (memory.bandwidth * memory.share)
    assert predicted(run, 8).optimizer == pytest.approx(seconds)
    sharded = predicted(config(parallel={"data": 8, "zero": 3}), 8).optimizer
    assert sharded == pytest.approx(seconds / 8, rel=0.02)  # vectors are replicated


def test_the_table_and_the_compilers_agree_on_hardware():
    for gpu in GPUS.values():
        hardware = find_hardware(gpu.name)
        assert hardware.memory.size == pytest.approx(gpu.memory, rel=1e-4) and hardware.products.cores == gpu.cores
        assert hardware.on_chip == {"shared": gpu.shared >> 10, "l2": gpu.l2 >> 20}
    kinds = {"v4": "TPU v4", "v5p": "TPU v5", "v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "7x": "TPU7x"}
    assert kinds.keys() == TPUS.keys()
    sizes = {kind: find_hardware(name).memory.size / GIB for kind, name in kinds.items()}
    assert sizes == {"v4": 32, "v5p": 95, "v5e": 16, "v6e": 32, "7x": 96}


@pytest.mark.parametrize(
    ("closes_at", "network", "devices", "domains", "seconds"),
    [
        (0, None, 4, 1, 3 / 4),  # behind a switch, at 1 byte per second: what goes to others
        (4, None, 2, 1, 1 / 2),  # between neighbours
        (9, None, 4, 1, 4 / 4),  # a line: two devices send each of two others a quarter, over one link
        (4, None, 4, 1, 4 / 8),  # a ring: half of that
        (4, None, 8, 1, 8 / 8),
        (0, 0.5, 16, 2, 8 / 16 / 0.5),  # each device sends half to the other host, over its own adapter
        (0, 0.5, 4, 4, 3 / 4 / 0.5),
    ],
)
def test_an_all_to_all_takes_as_long_as_its_fullest_link(closes_at, network, devices, domains, seconds):
    """Of a buffer of one byte."""
    links = Links(1.0, closes_at, network, Latency(0.0, 0.0, 0.0))
    sent = (devices - 1) / devices
    assert sent / links.bandwidth(ALL_TO_ALL, devices, domains) == pytest.approx(seconds)
