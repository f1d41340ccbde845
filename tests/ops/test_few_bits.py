"""Codes of few bits are bitsandbytes', to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops.few_bits import NF4, CodedMatrix, dynamic_codebook, encode

DRAWS = {
    "normal": lambda r, shape: r.normal(size=shape),
    "random": lambda r, shape: r.uniform(-3, 3, shape),
    "zero": lambda r, shape: np.zeros(shape),
    "subnormal": lambda r, shape: r.normal(size=shape) * 2e-7,  # of float16
    "outliers": lambda r, shape: r.standard_cauchy(shape),
}


@pytest.fixture(scope="module")
def functional():
    pytest.importorskip("torch", reason="the extra `hf` is not installed")
    return pytest.importorskip("bitsandbytes.functional", reason="the extra `hf` is not installed")


def both(functional, draw: str, dtype: str, shape: tuple[int, int], kind: str, transposed: bool):
    """(theirs, their state, ours, our matrix as torch has it: [outputs, inputs]) of a matrix in this dtype."""
    import torch

    w = torch.tensor(DRAWS[draw](np.random.default_rng(3), shape)).to(getattr(torch, dtype))
    theirs, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=kind != "nf4")
    values = w.float().numpy()
    ours = jax.jit(encode, static_argnums=(0, 2))(kind, jnp.asarray(values if transposed else values.T), transposed)
    decoded = np.asarray(CodedMatrix(ours, kind, "mlp", transposed).entries)
    back = torch.tensor(decoded if transposed else np.ascontiguousarray(decoded.T)).to(w.dtype).float().numpy()
    return theirs, state, {key: np.asarray(x) for key, x in ours.items()}, back


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("draw", DRAWS)
def test_nf4_is_that_of_bitsandbytes(functional, draw, dtype, transposed):
    theirs, state, ours, decoded = both(functional, draw, dtype, (48, 192), "nf4", transposed)
    assert np.array_equal(state.code.numpy(), NF4)
    codes, absmax = (ours[key] if transposed else ours[key].T for key in ("codes", "absmax"))
    assert np.array_equal(codes.reshape(-1), theirs.numpy().reshape(-1))
    assert np.array_equal(absmax.reshape(-1), state.absmax.numpy())
    assert np.array_equal(decoded, functional.dequantize_4bit(theirs, state).float().numpy())


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("draw", DRAWS)
def test_scales_of_scales_are_within_one_code(functional, draw, transposed):
    theirs, state, ours, decoded = both(functional, draw, "float32", (70, 320), "nf4-double", transposed)
    assert np.array_equal(functional.create_dynamic_map(signed=True).numpy(), dynamic_codebook())
    codes, scales = (ours[key] if transposed else ours[key].T for key in ("codes", "absmax"))
    assert np.array_equal(codes.reshape(-1), theirs.numpy().reshape(-1))
    if draw != "zero":
        differ = np.abs(scales.reshape(-1).astype(int) - state.absmax.numpy().astype(int))
        assert differ.max() <= 1 and (differ == 0).mean() > 0.98
    want = functional.dequantize_4bit(theirs, state).float().numpy()
    assert np.abs(decoded - want).max() <= 0.02 * np.abs(want).max()


def test_eight_bits_are_the_nearest():
    w = np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)
    w[:, 3] = 0
    for transposed, axis in ((False, 0), (True, 1)):
        matrix = CodedMatrix(encode("int8", jnp.asarray(w), transposed), "int8", "mlp", transposed)
        step = np.abs(w).max(axis, keepdims=True) / 127
        assert np.all(np.abs(np.asarray(matrix.entries) - w) <= step / 2 * (1 + 1e-5))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_values_of_nf4_are_kept(on_gpu, request):
    if on_gpu:
        request.getfixturevalue("as_on_a_gpu")
    w = np.tile(NF4, (3, 4)).T
    assert np.array_equal(CodedMatrix(encode("nf4", jnp.asarray(w), False), "nf4", "mlp", False).entries, w)


@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nf4", "nf4-double"))]
)
def test_a_product_saves_what_is_stored_alone(kind):
    """The gradient is that of the decoded matrix."""
    r = np.random.default_rng(1)
    for transposed, shape in ((False, (64, 24)), (True, (24, 64))):
        matrix = CodedMatrix(encode(kind, jnp.asarray(r.normal(size=shape)), transposed), kind, "mlp", transposed)
        w = matrix.entries.T if transposed else matrix.entries
        x, g = jnp.asarray(r.normal(size=(2, 5, 64)), jnp.float32), jnp.asarray(r.normal(size=(2, 5, 24)), jnp.float32)
        y, vjp = jax.vjp(lambda x, matrix=matrix, t=transposed: matrix.multiply(x, transpose=t), x)
        np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(vjp(g)[0], g @ w.T, rtol=1e-5, atol=1e-5)
        stored = {id(leaf) for leaf in jax.tree.leaves(matrix)}
        assert {id(leaf) for leaf in jax.tree.leaves(vjp)} <= stored
