import math

import jax
import numpy as np
import pytest

from spmd_lm.config.overlap import BRANCHES
from spmd_lm.errors import LayoutError
from spmd_lm.resolve import abstract_plan, make_model
from spmd_lm.step.program import Program
from tests import reference
from tests.helpers import FLOAT32, assert_equal, canonical, device_batch, host_batch, make_config, program, run_of


def described(tree):
    return jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype), x.sharding), tree)


def test_the_first_state_is_born_as_described(x64):
    p = program(run_of("model8", 1, "unrolled", "full"))
    state = p.init()
    assert described(state) == described(p.abstract_state())
    assert int(state.step) == 0 and state.params["embedding"]["tokens"].shape == (64, 32)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.opt_state))


def test_canonical_and_from_canonical_are_inverse_bit_for_bit(x64):
    p = program(run_of("model8", 1, "unrolled", "full"))
    state = p.init()
    bare = p.canonical(state)
    assert described(bare) == described(p.abstract_canonical())
    assert bare.params["embedding"]["tokens"].shape == (61, 32)
    assert_equal(bare, canonical(p, state))
    again = p.from_canonical(bare)
    assert described(again) == described(state)
    assert_equal(again, state)


def test_forward_gives_all_devices_the_reference_s_logits(x64):
    p = program(run_of("data4-model2", 2))
    got = p.forward(p.init().params, device_batch(p, 0))["tokens"]
    assert got.is_fully_replicated
    first = canonical(p, p.init()).params
    want = reference.predictions(first, p.config, host_batch(p.config, 0))["causal_lm"]
    without_padding = np.asarray(got)[..., : p.config.model.vocab].reshape(want.shape)
    np.testing.assert_allclose(without_padding, want, rtol=0, atol=1e-13)


def test_a_program_takes_all_devices_and_no_fewer():
    p = Program(make_config(parallel={"data": -1, "model": 2}, precision=FLOAT32))
    assert p.plan.layout.devices == p.plan.mesh.size == jax.device_count() == 8
    with pytest.raises(LayoutError, match="every device must be used"):
        Program(make_config(parallel={"data": 2, "model": 2}, precision=FLOAT32))


def test_a_plan_can_be_made_for_devices_that_are_not_there():
    config = make_config(parallel={"data": 128, "model": 4}, train={"batch": 256}, precision=FLOAT32)
    plan = abstract_plan(config, 512, "tpu", "")
    assert (plan.layout.devices, plan.platform) == (512, "tpu")


@pytest.mark.parametrize(
    ("kind", "parallel", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", {}, True),
        ("NVIDIA H100 PCIe", {}, False),
        ("NVIDIA H100 80GB HBM3", {"microbatches": 2}, False),
        ("NVIDIA H100 80GB HBM3", {"replica": 2}, False),
        ("NVIDIA H100 80GB HBM3", {"data": 8}, False),
        ("NVIDIA H100 80GB HBM3", {"pipe": 2, "run_idle_stages": True}, False),
        ("NVIDIA H100 80GB HBM3", {"model_across_hosts": True}, False),
    ],
)
def test_products_are_in_parts_on_devices_where_a_part_is_large(kind, parallel, expected):
    """2,048 tokens of each microbatch: 16 of 512 on 4 shards, a half of them a part."""
    layout = {"data": 4, "model": 2, "sequence": True} | parallel
    config = make_config(model={"context": 1024}, parallel=layout, train={"batch": 16}, precision=FLOAT32)
    devices = math.prod(layout.get(axis, 1) for axis in ("pipe", "replica", "data", "model"))
    assert abstract_plan(config, devices, "gpu", kind).collective_matmul == (BRANCHES if expected else ())


def test_the_kernel_is_that_of_the_platform():
    splash = {"context": 128, "attention_dropout": 0.0}
    config = make_config(model=splash, precision=FLOAT32)
    kernels = [make_model(config, platform).kernels for platform in ("cpu", "tpu")]
    assert kernels == [("xla",), ("splash",)]


def test_a_float64_run_is_in_float64():
    """jax has it only where it is switched on; left off, it would compute in float32 without a word."""
    assert not jax.config.jax_enable_x64
    p = Program(make_config(), jax.devices()[:1])
    assert p.init().params["head"]["norm"]["scale"].dtype == np.float64


def test_on_a_tpu_the_mlp_s_products_alone_are_in_parts():
    config = make_config(parallel={"data": 4, "model": 2, "collective_matmul": "on"}, precision=FLOAT32)
    assert abstract_plan(config, 8, "tpu", "TPU v5").collective_matmul == ("mlp",)


@pytest.mark.slow
def test_programs_with_attention_wait_in_their_first_execution_alone(monkeypatch):
    p, waits, wait = Program(make_config(precision=FLOAT32), jax.devices()[:1]), [], jax.block_until_ready
    state, batch = p.init(), device_batch(p, 0)
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waits.append(tree) or wait(tree))
    for expected in (2, 2):
        assert p.score(state.params, batch) and len(waits) == expected
    for expected in (4, 4):
        assert p.evaluate(state.params, batch) and len(waits) == expected
    for expected in (6, 6):
        state, _ = p.step(state, batch)
        assert len(waits) == expected
