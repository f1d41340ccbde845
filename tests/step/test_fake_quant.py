"""Quantization during training: matrices rounded before each product, alike under every layout."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from spmd_lm.checkpoints.init_from import PretrainedRun
from spmd_lm.checkpoints.new_run import write_new_run
from spmd_lm.config.overlap import collective_matmul_branches
from spmd_lm.errors import ConfigError, LayoutError
from spmd_lm.generation.generate import Generator
from spmd_lm.generation.sampling import Sampling
from spmd_lm.huggingface.transfer import export_hf
from spmd_lm.ops.few_bits import FakeQuant, FakeQuantMatrix
from spmd_lm.parallel.trees import leaves_by_path
from spmd_lm.planning.audit import audit_step, render
from spmd_lm.step.program import Program
from tests import reference
from tests.helpers import (
    ORIGINAL_BERT,
    assert_same_run,
    canonical,
    device_batch,
    host_batch,
    make_config,
    program,
    trained,
    trained_reference,
)
from tests.own import MIXER, write_module
from tests.planning.test_audit import BF16, compilable

SLOW = pytest.mark.slow
BLOCKS = {"width": 64, "mlp_width": 256, "head_width": 64, "layers": 2}  # of 64 inputs, whole on each of four devices
LLAMA = {"positions": "rotary", "norm_type": "rms", "activation": "swiglu", "use_bias": False, "kv_heads": 2}
FULL = {"remat": {"policy": "full"}}
BERT = {"model": ORIGINAL_BERT, "objective": {"kind": "masked_lm"}, "optim": {"eps": 1e-6}}
RUNS = {
    "int4, model 4, sequence, ZeRO-3": (
        {"data": 2, "model": 4, "sequence": True, "zero": 3, "microbatches": 2, "prefetch": "on"},
        {"model": LLAMA | {"dropout": 0.1}},
    ),
}
MORE = {
    "int8, full remat, unrolled": ({"data": 2, "model": 2, "zero": 1}, FULL | {"model": {"scan": False}}),
    "int4, interleaved": (
        {"pipe": 2, "data": 2, "zero": 3, "microbatches": 4, "schedule": "interleaved", "chunks": 2},
        {"model": {"layers": 4, "scan": False}},
    ),
    "int4, hybrid and a ring": (
        {"replica": 2, "data": 2, "zero": 3, "context": 2},
        {"model": {"attention": "chunked"}},
    ),
    "int8, BERT, ZeRO-3": ({"data": 4, "model": 2, "zero": 3}, BERT),
}


def config_of(kind: str, parallel: dict, *, model: dict | None = None, precision: dict | None = None, **sections):
    precision = {"fake_quant": kind} | (precision or {})
    return make_config(model=BLOCKS | (model or {}), parallel=parallel, precision=precision, **sections)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=SLOW) for name in MORE)])
def test_a_layout_computes_the_reference(name):
    parallel, sections = (RUNS | MORE)[name]
    config = config_of(name[:4], parallel, **sections)
    assert_same_run(trained(config), trained_reference(config))


@pytest.mark.parametrize(("kind", "most"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("transposed", [False, True])
def test_entries_are_the_nearest_codes_and_gradients_pass(kind, most, transposed):
    w = np.random.default_rng(0).normal(size=(3, 128, 192)).astype(np.float32)
    w[1, :64] = w[1, :, :64] = 0
    view = FakeQuant(kind, transposed)
    got, gradient = jax.vjp(jax.jit(view), jnp.asarray(w))
    rows, near = (x if transposed else x.swapaxes(1, 2) for x in (w, np.asarray(got)))
    steps = np.repeat(np.abs(rows.reshape(3, len(rows[0]), -1, 64)).max(-1) / most, 64, -1)
    assert np.all(np.abs(near - rows) <= steps * (0.5 + 1e-5))
    codes = near / np.where(steps == 0, 1, steps)
    assert np.abs(codes - np.round(codes)).max() < 1e-4
    assert np.abs(codes).max() == pytest.approx(most, rel=1e-5)
    assert np.array_equal(gradient(jnp.asarray(2 * w))[0], 2 * w)
    np.testing.assert_allclose(view(got), got, rtol=1e-6)  # rounded already


def test_backward_saves_the_matrix_alone():
    """Not the rounded one, which gathers of ZeRO-3 would not replace."""
    w, x = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((2, 3, 64), jnp.bfloat16)
    _, vjp = jax.vjp(lambda x, w: FakeQuantMatrix(w, FakeQuant("int4", False)).multiply(x), x, w)
    saved = [leaf for leaf in jax.tree.leaves(vjp) if leaf.shape == w.shape]
    assert len(saved) == 1 and saved[0] is w


@SLOW
@pytest.mark.parametrize("name", ["cpu:4", "v5p:2x2x1", "h100:1x4"])
def test_no_compiler_leaves_rounding_out(name):
    """Each matrix is rounded forward and again backward, and what the step sends is what it was."""
    target = compilable(name)
    layout = {"data": 2, "model": 2, "sequence": True, "zero": 3}
    config = config_of("int4", layout, model={"attention": "chunked", "dropout": 0.0}, precision=BF16)
    step = audit_step(config, target)
    assert step.report["ok"], render(step.report)
    assert step.program.compiled.as_text().count("round-nearest-even(") >= 2 * 6


def test_shards_that_cut_groups_are_told():
    with pytest.raises(LayoutError, match=r"precision.fake_quant=int4: parallel.model=8 would cut groups of 64 inputs"):
        program(config_of("int4", {"model": 8, "data": 1}, model={"heads": 8}))


def test_inputs_that_are_no_groups_are_told():
    with pytest.raises(ConfigError, match=r"precision.fake_quant=int8: .* has 96 inputs, which groups of 64 do not"):
        program(config_of("int8", {}, model={"mlp_width": 96}))


MIXER_OF_64 = MIXER.replace("24", "64").replace("    rules =", '    row_parallel = ("down",)\n    rules =')
READS = 'self.matrix("up").multiply(copy_to_region(self.norm(x), "state"))'
DIRECT = 'copy_to_region(self.norm(x), "state") @ self.up[...]'
IN_A_CHECKPOINT = f"context.checkpoint(lambda x: {READS})(x)"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({READS: IN_A_CHECKPOINT}, None),
        ({READS: DIRECT}, "Mixer does not ask for its matrix 'up', which is rounded"),
        ({'    row_parallel = ("down",)\n': ""}, "a rounded matrix is multiplied transposed. List it in row_parallel"),
        ({"Mixer(HasMatrices)": "Mixer(nnx.Module)"}, "the module with the parameter up is no HasMatrices"),
    ],
    ids=["asks", "asks in a checkpoint", "reads", "is transposed", "has none"],
)
def test_a_block_of_one_s_own_asks_for_its_matrices(tmp_path, changed, problem):
    source = MIXER_OF_64
    for old, new in changed.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    config = config_of("int4", {}, model={"module": write_module(tmp_path, "Mixer", source)})
    with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
        p = Program(config, jax.devices()[:1])
        jax.eval_shape(p.forward, p.abstract_state().params, p.abstract_batch())


@SLOW
def test_files_have_the_matrices_of_a_step(tmp_path):
    """In bfloat16: they are rounded after the cast, to which near ties are sensitive."""
    config = config_of("int4", {"data": 8}, model=LLAMA, precision={"params": "float32", "compute": "bfloat16"})
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path / "run")})})
    p = program(config)
    params = p.canonical(p.init()).params
    write_new_run(p, params, tmp_path / "run")
    export_hf(config, tmp_path / "files", "float32", 10**9)
    with safe_open(tmp_path / "files" / "model.safetensors", "np") as files:
        for name, transposed in (("up", False), ("down", True)):
            w = np.asarray(leaves_by_path(params)[f"blocks.mlp.{name}"][1]).astype(jnp.bfloat16)
            want = np.asarray(FakeQuant("int4", transposed)(jnp.asarray(w)), np.float32)
            written = files.get_tensor(f"model.layers.1.mlp.{name}_proj.weight")
            assert np.array_equal(written, want if transposed else want.T)
            assert not np.array_equal(want, w)
    unrounded = config_of("none", {"data": 8}, model=LLAMA)
    origin = PretrainedRun(program(unrounded), tmp_path / "run").describe()
    assert origin.endswith("trained with precision.fake_quant=int4 and used with none")


@SLOW
@pytest.mark.usefixtures("x64")
def test_logits_and_generated_tokens_are_of_rounded_matrices():
    config = config_of("int4", {"data": 1, "model": 2}, model=LLAMA)
    p, host = program(config), host_batch(config, 0)
    params = jax.tree.map(lambda x: 8 * x, p.init().params)
    weights = reference.rounded(jax.tree.map(lambda x: 8 * np.float64(x), canonical(p, p.init()).params), config)
    wanted = np.asarray(reference.logits(weights, config.model, host.tokens))
    logits = np.asarray(p.forward(params, device_batch(p, 0))["tokens"])[..., : config.model.vocab]
    np.testing.assert_allclose(logits.reshape(wanted.shape), wanted, rtol=0, atol=1e-11)
    prompt = host.tokens[0, :5]
    (text,) = Generator(p, 1, Sampling(tokens=3, greedy=True)).generate(params, [prompt])
    row = np.pad(text, (0, config.model.context - len(text)))[None]
    likeliest = np.asarray(reference.logits(weights, config.model, row))[0].argmax(-1)
    assert text[5:].tolist() == likeliest[4 : len(text) - 1].tolist()


def test_products_do_not_run_in_parts():
    config = config_of("int4", {"model": 2, "sequence": True}, model={"context": 4096})
    assert not collective_matmul_branches(config, "gpu", "NVIDIA H100 80GB HBM3", 10**6)
