"""Training with the matmuls of blocks' matrices in eight bits, emulated on CPUs."""

import contextlib
import re

import jax
import numpy as np
import pytest

from spmd_lm.api import make_model
from spmd_lm.errors import ConfigError
from spmd_lm.resolve import abstract_plan
from spmd_lm.step.program import Program
from tests.helpers import device_batch, make_config, program, trained
from tests.own import MIXER, write_module

SLOW = pytest.mark.slow
SIZES = {"layers": 2, "width": 32, "heads": 4, "dropout": 0.0}
FLOAT32 = {"params": "float32", "compute": "float32", "reduce": "float32"}
TWO = {"data": 2}
ZERO_3 = TWO | {"zero": 3}


def config_of(kind: str, parallel: dict, *, model: dict | None = None, precision: dict | None = None, **sections):
    precision = FLOAT32 | {"matmul": kind, "emulate": kind != "none"} | (precision or {})
    return make_config(model=SIZES | (model or {}), parallel=parallel, precision=precision, **sections)


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=SLOW)])
def test_zero_and_remat_change_rounding_alone(kind):
    """The shards of x and of gradients are the same, and so are their scales.  In float32, so that few codes differ."""
    plain = trained(config_of(kind, TWO))
    other = trained(config_of(kind, ZERO_3, remat={"policy": "full"}))
    np.testing.assert_allclose(other.losses, plain.losses, rtol=1e-4)
    np.testing.assert_allclose(other.norms, plain.norms, rtol=2e-3)


OTHERS = {
    "in parts": ({"data": 2, "model": 2, "sequence": True, "zero": 3, "collective_matmul": "on"}, {}),
    "in a pipeline, unrolled": ({"pipe": 2, "data": 2, "zero": 1, "microbatches": 2}, {"model": {"scan": False}}),
    "eight shards": ({"data": 8, "zero": 3}, {}),
}


@SLOW
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", OTHERS)
def test_scales_of_other_shards_are_other_rounding(name, kind):
    """Beside float32's losses as near as one device's are: codes of e5m2 are a quarter of themselves apart."""
    parallel, sections = OTHERS[name]
    exact = trained(config_of("none", TWO)).losses
    got = trained(config_of(kind, parallel, **sections)).losses
    assert 1e-6 < np.abs(got - exact).max() < 4e-3


@SLOW
def test_a_step_that_overflows_is_skipped():
    """float16 at a loss scale of 2^40: gradients are infinite or NaN, and so is what is made of their codes."""
    scaled = {"compute": "float16", "loss_scale": "dynamic", "initial_scale": 2.0**40}
    p = program(config_of("fp8", {}, precision=scaled))
    state = p.init()
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = p.step(state, device_batch(p, 0))
    assert not np.isfinite(float(metrics["grad_norm"])) and float(metrics["skip_reason"])
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.params))


def codes_in(text: str) -> set[str]:
    return set(re.findall(r"x(f8E4M3FN|f8E5M2|i8)>", text))


def test_evaluation_multiplies_in_the_compute_dtype():
    p = program(config_of("fp8", TWO))
    params, batch = p.abstract_state().params, p.abstract_batch()
    assert codes_in(p.train_step.lower(p.abstract_state(), batch).as_text()) == {"f8E4M3FN", "f8E5M2"}
    assert not codes_in(p.forward.lower(params, batch).as_text())
    assert Program(p.config, jax.devices()[:2], trains=False).config.precision.matmul == "none"


@pytest.mark.parametrize(
    ("matmul", "platform", "device", "problem"),
    [
        ("fp8", "cpu", "cpu", "a CPU has no such matmuls. Use precision.matmul=none, or precision.emulate=true"),
        ("fp8", "gpu", "NVIDIA H100 80GB HBM3", None),
        ("int8", "gpu", "NVIDIA H200", None),
        ("int8", "gpu", "NVIDIA A100-SXM4-80GB", None),
        (
            "fp8",
            "gpu",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-SXM4-80GB has no matmuls of float8. Use precision.matmul=",
        ),
        (
            "int8",
            "gpu",
            "Tesla V100-SXM2-32GB",
            "Tesla V100-SXM2-32GB has no matmuls of int8. Use precision.matmul=none",
        ),
        ("fp8", "gpu", "NVIDIA GeForce RTX 4090", "nothing is known of matmuls of NVIDIA GeForce RTX 4090"),
        ("int8", "tpu", "TPU v5 lite", None),
        (
            "fp8",
            "tpu",
            "TPU v5 lite",
            "TPU v5 lite has no matmuls of float8. Use precision.matmul=int8, or precision.m",
        ),
        ("fp8", "tpu", "TPU v6 lite", None),
        ("fp8", "tpu", "TPU7x", None),
        ("int8", "tpu", "TPU7x", "TPU7x has no matmuls of int8. Use precision.matmul=fp8, or precision.matmul=none"),
    ],
)
def test_devices_without_them_are_refused(matmul, platform, device, problem):
    config = config_of(matmul, {}, precision={"emulate": False})
    with pytest.raises(ConfigError) if problem else contextlib.nullcontext() as told:
        abstract_plan(config, 1, platform, device)
    if problem:
        assert str(told.value).startswith(f"precision.matmul={matmul}: {problem}")
        abstract_plan(config_of(matmul, {}), 1, platform, device)


def test_a_loop_of_one_s_own_is_refused():
    with pytest.raises(ConfigError, match="a scale is of one device's shard, and a loop of one's own has global"):
        make_model(config_of("fp8", {}))


READS = 'self.matrix("up").multiply(copy_to_region(self.norm(x), "state"))'
DIRECT = 'copy_to_region(self.norm(x), "state") @ self.up[...]'


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({READS: DIRECT}, "Mixer does not ask for its matrix 'up', which multiplies in eight bits"),
        ({"Mixer(HasMatrices)": "Mixer(nnx.Module)"}, "the module with the parameter down is no HasMatrices"),
    ],
    ids=["asks", "reads", "has none"],
)
def test_a_block_of_one_s_own_asks_for_its_matrices(tmp_path, changed, problem):
    source = MIXER
    for old, new in changed.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    config = config_of("fp8", {}, model={"module": write_module(tmp_path, "Mixer", source)})
    with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
        p = Program(config, jax.devices()[:1])
        text = p.train_step.lower(p.abstract_state(), p.abstract_batch()).as_text()
        assert codes_in(text) == {"f8E4M3FN", "f8E5M2"}
