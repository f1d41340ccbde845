"""A mixture of experts is the same run under every layout, and what the reference computes token by token."""

import jax
import numpy as np
import pytest

from spmd_lm.axes import EXPERTS
from spmd_lm.config.expert_products import GROUPED_PRODUCTS, ProductLimits
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.models import experts
from spmd_lm.ops import collectives
from spmd_lm.step import guard, optimizer
from spmd_lm.step.program import Program
from tests import reference
from tests.helpers import (
    ORIGINAL_BERT,
    Outcome,
    assert_states_close,
    canonical,
    degrees,
    device_batch,
    host_batch,
    make_config,
    program,
    train_steps,
    trained,
    trained_reference,
)

pytestmark = pytest.mark.usefixtures("x64")

MOE = {"kind": "moe", "experts": 4, "capacity": 1.0}
RUNS = {
    "expert 2 x model 2, sequence, ZeRO-3": (
        {"data": 1, "expert": 2, "model": 2, "sequence": True, "zero": 3, "microbatches": 2},
        {"group": 8, "capacity": 0.5, "shared": 24, "shared_gate": True},
    ),
}
MORE = {
    "one device": ({"data": 1}, {"capacity": 0.5}),
    "data 2 x expert 2, Switch": (
        {"data": 2, "expert": 2, "zero": 1},
        {"renormalize": False, "per_token": 1, "capacity": 1.25},
    ),
    "dropless": ({"data": 2, "expert": 2, "model": 2, "sequence": True, "zero": 1}, {"capacity": "none"}),
    "expert 4, unrolled": ({"data": 2, "expert": 4, "zero": 2}, {"per_token": 3}),
    "pipe 2 x expert 2, ZeRO-3": ({"pipe": 2, "data": 2, "expert": 2, "zero": 3, "microbatches": 2}, {}),
    "breadth first": (
        {"pipe": 2, "chunks": 2, "data": 1, "expert": 2, "zero": 3, "microbatches": 4, "schedule": "breadth_first"},
        {"shared": 24},
    ),
    "replica 2 x data 2 x expert 2": ({"replica": 2, "data": 2, "expert": 2, "zero": 3}, {}),
    "model 4": ({"data": 2, "model": 4, "zero": 1}, {"shared": 24, "shared_gate": True}),
    "rows with padding": ({"data": 1, "expert": 2, "model": 2, "sequence": True, "microbatches": 2}, {"group": 4}),
    "prefetch": ({"data": 2, "expert": 2, "zero": 3, "prefetch": "on"}, {}),
}


def config_of(parallel: dict, moe: dict, **model):
    period = [{"kind": "block", "mlp": {"kind": "dense"}}, "block"] if parallel.get("pipe", 1) > 1 else None
    model = {"layers": 8 if parallel.get("chunks") else 4 if period else 2, "mlp": MOE | moe, "period": period} | model
    return make_config(model=model, parallel=parallel | {"partitioner": "manual"})


@pytest.mark.parametrize(
    ("parallel", "moe"),
    [*RUNS.values(), *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE.values())],
    ids=[*RUNS, *MORE],
)
def test_a_layout_computes_the_reference(parallel, moe):
    form = {"scan": "expert" not in parallel or parallel["expert"] < 4}
    activation = {"activation": "swiglu"} if moe.get("shared_gate") else {}
    config = config_of(parallel, moe, **form, **activation)
    if moe == {"group": 4}:
        objective = {"objective": {"kind": "masked_lm"}, "optim": {"eps": 1e-6}}
        config = make_config(model={"layers": 2, "mlp": MOE | moe} | ORIGINAL_BERT, parallel=parallel, **objective)
    want = trained_reference(config)
    assert_same_run(trained(config), want)
    assert (sum(want.dropped) > 0) == (moe.get("capacity") != "none")


GROUPED = {
    "model 2, sequence, ZeRO-3, full remat": (
        {"data": 2, "model": 2, "sequence": True, "zero": 3, "microbatches": 2},
        {"shared": 24, "shared_gate": True},
        "full",
    ),
    "pipe 2, ZeRO-2": ({"pipe": 2, "data": 2, "zero": 2, "microbatches": 2}, {"group": 8, "per_token": 3}, "none"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "moe", "remat"), GROUPED.values(), ids=GROUPED)
def test_a_layout_with_grouped_products_computes_the_reference(parallel, moe, remat, monkeypatch):
    """With a product that has float64; evaluation has it too."""
    monkeypatch.setitem(GROUPED_PRODUCTS, "traced", ProductLimits("cpu", ("float64",)))
    activation = {"activation": "swiglu"} if moe.get("shared_gate") else {}
    config = config_of(parallel, moe | {"capacity": "none"}, **activation)
    config = config.model_copy(update={"remat": config.remat.model_copy(update={"policy": remat})})
    p = program(config)
    assert set(p.model.expert_products) == ({"traced"} if "pipe" not in parallel else {"buffers", "traced"})
    assert "ragged_dot" in str(jax.make_jaxpr(p.forward)(p.init().params, device_batch(p, 0)))
    assert_same_run(trained(config), trained_reference(config))


def assert_same_run(got: Outcome, want: Outcome) -> None:
    assert got.losses == pytest.approx(want.losses, rel=1e-12)
    assert got.dropped.tolist() == want.dropped.tolist()
    assert got.norms == pytest.approx(want.norms, rel=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


@pytest.mark.slow
def test_evaluation_and_generation_drop_nothing():
    """Whatever the capacity of the training step."""
    config = config_of({"data": 1, "expert": 2, "model": 2, "zero": 1}, {"capacity": 0.5, "shared": 24})
    p, host = program(config), host_batch(config, 0)
    params, c = jax.tree.map(lambda x: 8 * x, p.init().params), config.model
    weights = jax.tree.map(lambda x: 8 * np.float64(x), canonical(p, p.init()).params)
    wanted = np.asarray(reference.logits(weights, c, host.tokens))
    logits = np.asarray(p.forward(params, device_batch(p, 0))["tokens"])[..., : c.vocab]
    np.testing.assert_allclose(logits.reshape(wanted.shape), wanted, rtol=0, atol=1e-11)
    (loss, _, weight), *_ = p.evaluate(params, device_batch(p, 0)).values()
    nll = np.asarray(-jax.nn.log_softmax(wanted))
    of_targets = np.take_along_axis(nll, host.targets[..., None], -1)[..., 0]
    assert float(loss / weight) == pytest.approx(np.average(of_targets, weights=host.loss_weights), rel=1e-12)
    prompts = [host.tokens[0, :5], host.tokens[1, :3]]
    texts = Generator(p, 2, Sampling(tokens=2, greedy=True)).generate(params, prompts)
    rows = np.stack([np.pad(text, (0, c.context - len(text))) for text in texts])
    likeliest = np.asarray(reference.logits(weights, c, rows)).argmax(-1)
    for text, prompt, following in zip(texts, prompts, likeliest, strict=True):
        assert text[len(prompt) :].tolist() == following[len(prompt) - 1 : len(text) - 1].tolist()


# ---- faults that mixtures of experts are known for; each is told


def router_reads_the_region(patch):
    logits = experts.router_logits
    patch.setattr(experts, "router_logits", lambda x, w: logits(collectives.copy_to_region(x, "mlp"), w))


def gates_are_not_summed(patch):
    def copy(x, name):
        return x if x.shape[-1] == MOE["experts"] else collectives.copy_to_region(x, name)

    patch.setattr(experts, "copy_to_region", copy)


def groups_are_a_device_s(patch):
    make = experts.make_routes

    def of_all(chosen, number, group, capacity):
        routes = make(chosen, number, len(chosen), capacity * len(chosen) // group)
        return routes._replace(counts=make(chosen, number, group, capacity).counts)

    patch.setattr(experts, "make_routes", of_all)


def losses_are_counted_per_shard(patch):
    patch.setattr(experts, "sum_of_shares", lambda x, name: collectives.psum(x, "mlp"))


def experts_are_left_out_of_the_norm(patch):
    def norm(plan, grads):
        names = optimizer.subset_of(plan.sharded_names, grads)
        without = jax.tree.map(lambda g, n: g * (EXPERTS not in n), grads, names)
        return optimizer.global_norm(plan, without)

    patch.setattr(guard, "global_norm", norm)


def biases_decay(patch):
    def mask(names):
        is_names = optimizer.is_dim_names
        return jax.tree.map(lambda n: len([each for each in n if each != "layers"]) > 1, names, is_leaf=is_names)

    patch.setattr(optimizer, "decay_mask", mask)


FAULTS = [
    router_reads_the_region,
    gates_are_not_summed,
    groups_are_a_device_s,
    losses_are_counted_per_shard,
    experts_are_left_out_of_the_norm,
    biases_decay,
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_told(fault, monkeypatch):
    config = config_of({"data": 1, "expert": 2, "model": 2, "zero": 1}, {})
    want = trained_reference(config)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same_run(train_steps(Program(config, jax.devices()[: degrees(config).devices])), want)
