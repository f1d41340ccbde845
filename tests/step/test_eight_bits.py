"""Training with the matmuls of blocks' matrices in eight bits, emulated on CPUs."""

import contextlib
import re
from collections import Counter

import jax
import numpy as np
import pytest

from spmd_lm.analysis.eight_bits import eight_bit_matmuls
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.topology import parse_topology
from spmd_lm.api import make_model
from spmd_lm.cost_model.compute_time import layer_seconds
from spmd_lm.cost_model.flops import Utilization
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.kernels import Kernels
from spmd_lm.cost_model.layer_trace import trace_layer
from spmd_lm.errors import ConfigError
from spmd_lm.planning.audit import audit_step, render
from spmd_lm.planning.eight_bits import eight_bits, least_flops, render_eight_bits
from spmd_lm.resolve import abstract_plan
from spmd_lm.step.program import Program
from tests.helpers import device_batch, make_config, program, trained
from tests.own import MIXER, write_module
from tests.planning.test_audit import BF16, compilable

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
    assert not np.isfinite(float(metrics["grad_norm"]))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.params))


def codes_in(text: str) -> set[str]:
    return set(re.findall(r"x(f8E4M3FN|f8E5M2|i8)>", text))


def test_parts_of_collective_matmuls_know_gradients():
    """Of two devices each: those forward, those of inputs' gradients, and one for each matrix's, of which those of a
    branch's last one have the gradient on the left."""
    parallel, sections = OTHERS["in parts"]
    p = program(config_of("fp8", parallel, **sections))
    text = p.train_step.lower(p.abstract_state(), p.abstract_batch()).as_text()
    pairs = Counter(re.findall(r"dot_general.*: \(tensor<[0-9x]*(f8\w+)>, tensor<[0-9x]*(f8\w+)>", text))
    value, gradient = "f8E4M3FN", "f8E5M2"
    forward, inputs = 4 * 2, 4 * 2
    assert pairs == {(value, value): forward, (gradient, value): inputs + 2, (value, gradient): 4}


def test_evaluation_multiplies_in_the_compute_dtype():
    p = program(config_of("fp8", TWO))
    params, batch = p.abstract_state().params, p.abstract_batch()
    assert codes_in(p.train_step.lower(p.abstract_state(), batch).as_text()) == {"f8E4M3FN", "f8E5M2"}
    assert not codes_in(p.forward.lower(params, batch).as_text())
    strict = config_of("fp8", TWO, precision={"emulate": False})
    assert Program(strict, jax.devices()[:2], trains=False).config == strict  # which an import writes, to be trained


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


ENTRY = """
fused (a: bf16[8,4], b: f8e4m3fn[4,2]) -> f32[8,2] {
  %a = bf16[8,4]{1,0} parameter(0)
  %code = f8e5m2[8,4]{1,0} convert(%a), metadata={op_name="jit(step)/blocks/eight_bits/convert_element_type"}
  %b = f8e4m3fn[4,2]{1,0} parameter(1)
  ROOT %dot = f32[8,2]{1,0} dot(%code, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY main (x: bf16[8,4], w: f8e4m3fn[4,2], y: LOST[4,2]) -> f32[8,2] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = f8e4m3fn[4,2]{1,0} parameter(1)
  %y = LOST[4,2]{1,0} parameter(2)
  %scores = f32[8,2]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="blocks"}
  %call = (f32[4,2]{1,0}, s8[9]{0}) custom-call(%w, %y), custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(step)/transpose(jvp(blocks))/eight_bits/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %fusion = f32[8,2]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
}
"""  # noqa: E501


def test_operands_are_read_from_the_program():
    """FLOPs of a fusion's product, and of a library's call; not those of attention.  Another dtype is told."""
    fused, call = 2 * 8 * 2 * 4, 2 * 4 * 2 * 2
    found = eight_bit_matmuls(HloModule(ENTRY.replace("LOST", "f8e5m2")), "fp8")
    assert found == (2, fused + call, {})
    found = eight_bit_matmuls(HloModule(ENTRY.replace("LOST", "bf16")), "fp8")
    assert found == (1, fused, {"f8e4m3fn x bf16": call})
    assert eight_bit_matmuls(HloModule(ENTRY.replace("LOST", "f8e5m2")), "int8").instructions == 0


def test_audit_counts_three_matmuls_of_each_matrix_and_tells_of_other_dtypes():
    """A CPU's compiler makes float32 of codes: that is emulation, and a failure where it was not asked for."""
    config = config_of("fp8", TWO)
    step = audit_step(config, parse_topology("cpu:2"))
    m, found = config.model, step.report["eight_bits"]
    matrices = m.layers * m.width * (4 * m.width + 2 * m.mlp_dim)
    assert found["expected_flops"] == 3 * 2 * matrices * config.train.batch * m.context / 2
    assert found["others"] == {"f32 x f32": found["expected_flops"]}
    assert step.report["ok"] and not found["instructions"]
    assert "the compiler made f32 x f32 of" in render(step.report)
    strict = config.model_copy(update={"precision": config.precision.model_copy(update={"emulate": False})})
    told = eight_bits(strict, step.program.plan, step.module, None)
    assert not told["ok"] and "these devices do not multiply in fp8" in "\n".join(render_eight_bits(told))


def test_frozen_matrices_multiply_twice():
    config = config_of("int8", {}, optim={"freeze": "blocks.*.mlp.up"})
    plan, m = program(config).plan, config.model
    matmuls = 3 * (4 * m.width + 2 * m.mlp_dim) - m.mlp_dim
    assert least_flops(config, plan) == 2 * m.layers * m.width * matmuls * config.train.batch * m.context
    config = config_of("int8", {}, optim={"freeze": "embedding.* blocks.*"})
    forward = 2 * m.layers * m.width * (4 * m.width + 2 * m.mlp_dim) * config.train.batch * m.context
    assert least_flops(config, program(config).plan) == forward


def test_the_cost_model_takes_their_peak_and_mfu_that_of_the_compute_dtype():
    h100, v5e = find_hardware("NVIDIA H100 80GB HBM3"), find_hardware("TPU v5 lite")
    assert h100.rate("float8", "bfloat16") == 1979 / 989 and v5e.rate("int8", "bfloat16") == 393 / 197
    assert v5e.rate("float8", "bfloat16") == h100.rate("", "bfloat16") == 1
    bf16, fp8 = (config_of(kind, TWO, model={"width": 512}, precision=BF16) for kind in ("none", "fp8"))
    seconds = [
        layer_seconds(each, program(each).plan, Kernels(h100, "bfloat16", 1.0, 0.0)).forward for each in (bf16, fp8)
    ]
    assert 0.5 < seconds[1] / seconds[0] < 0.7  # attention's products are as they were
    used = [Utilization.of(each, program(each).plan, jax.devices()[0]) for each in (bf16, fp8)]
    assert used[0].model_flops == used[1].model_flops
    assert used[1].peak.source == f"{used[0].peak.source}, though blocks' matrices multiply in fp8"


def test_gradients_of_matrices_are_no_activations():
    """Their unscaled products neither: they do not grow with the rows."""
    narrow, wide = (trace_layer(config_of("fp8", {}, model={"mlp_width": n}, precision=BF16), None) for n in (64, 128))
    added = wide.backward.peak - narrow.backward.peak
    assert 0 < added <= 64 * make_config().model.context * 12  # bytes of features of a row, not of 32 x 64 weights


@SLOW
@pytest.mark.parametrize(
    ("name", "kind", "dtypes"),
    [
        ("h100:1x2", "fp8", {"f8e4m3fn", "f8e5m2"}),
        ("7x:1x1x1", "fp8", {"f8e4m3fn", "f8e5m2"}),
        ("v5e:1x1", "int8", {"s8"}),
    ],
)
def test_compilers_keep_eight_bits(name, kind, dtypes):
    """Three matmuls of each of six matrices, in a loop over layers or unrolled, and none of blocks' in bfloat16."""
    target = compilable(name)
    layout = {"data": 1, "model": target.size}
    sizes = {"width": 256, "context": 128, "vocab": 512, "attention": "chunked"}
    config = config_of(kind, layout, model=sizes, precision=BF16 | {"emulate": False})
    step = audit_step(config, target)
    assert step.report["ok"], render(step.report)
    found = step.report["eight_bits"]
    assert found["instructions"] in (18, 36) and not found["others"]
    assert found["flops"] == pytest.approx(found["expected_flops"], rel=1e-3)
