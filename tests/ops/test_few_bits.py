"""Codes of few bits are bitsandbytes', to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops.few_bits import LARGEST_CODE, NF4, CodedMatrix, Coding, dynamic_codebook, encode

DRAWS = {
    "normal": lambda r, shape: r.normal(size=shape),
    "random": lambda r, shape: r.uniform(-3, 3, shape),
    "zero": lambda r, shape: np.zeros(shape),
    "subnormal": lambda r, shape: r.normal(size=shape) * 2e-7,  # of float16
    "outliers": lambda r, shape: r.standard_cauchy(shape),
}


NF4_64, NF4_DOUBLE = Coding("nf4", 64), Coding("nf4", 64, double=True)


def coded(coding: Coding, w: np.ndarray, transposed: bool) -> CodedMatrix:
    return CodedMatrix(encode(coding, jnp.asarray(w), transposed), coding, "mlp", transposed)


@pytest.fixture(scope="module")
def functional():
    pytest.importorskip("torch", reason="the extra `hf` is not installed")
    return pytest.importorskip("bitsandbytes.functional", reason="the extra `hf` is not installed")


def both(functional, draw: str, dtype: str, shape: tuple[int, int], coding: Coding, transposed: bool):
    """(theirs, their state, ours, our matrix as torch has it: [outputs, inputs]) of a matrix in this dtype."""
    import torch

    w = torch.tensor(DRAWS[draw](np.random.default_rng(3), shape)).to(getattr(torch, dtype))
    theirs, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=coding.double)
    values = w.float().numpy()
    ours = jax.jit(encode, static_argnums=(0, 2))(coding, jnp.asarray(values if transposed else values.T), transposed)
    decoded = np.asarray(CodedMatrix(ours, coding, "mlp", transposed).entries)
    back = torch.tensor(decoded if transposed else np.ascontiguousarray(decoded.T)).to(w.dtype).float().numpy()
    return theirs, state, {key: np.asarray(x) for key, x in ours.items()}, back


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("draw", DRAWS)
def test_nf4_is_that_of_bitsandbytes(functional, draw, dtype, transposed):
    theirs, state, ours, decoded = both(functional, draw, dtype, (48, 192), NF4_64, transposed)
    assert np.array_equal(state.code.numpy(), NF4)
    codes, absmax = (ours[key] if transposed else ours[key].T for key in ("codes", "absmax"))
    assert np.array_equal(codes.reshape(-1), theirs.numpy().reshape(-1))
    assert np.array_equal(absmax.reshape(-1), state.absmax.numpy())
    assert np.array_equal(decoded, functional.dequantize_4bit(theirs, state).float().numpy())


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("draw", DRAWS)
def test_scales_of_scales_are_within_one_code(functional, draw, transposed):
    theirs, state, ours, decoded = both(functional, draw, "float32", (70, 320), NF4_DOUBLE, transposed)
    assert np.array_equal(functional.create_dynamic_map(signed=True).numpy(), dynamic_codebook())
    codes, scales = (ours[key] if transposed else ours[key].T for key in ("codes", "absmax"))
    assert np.array_equal(codes.reshape(-1), theirs.numpy().reshape(-1))
    if draw != "zero":
        differ = np.abs(scales.reshape(-1).astype(int) - state.absmax.numpy().astype(int))
        assert differ.max() <= 1 and (differ == 0).mean() > 0.98
    want = functional.dequantize_4bit(theirs, state).float().numpy()
    assert np.abs(decoded - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("bits", LARGEST_CODE)
@pytest.mark.parametrize("group", [None, 4, 20])
def test_integers_are_the_nearest(bits, group, transposed):
    w = np.random.default_rng(0).normal(size=(40, 24)).astype(np.float32)
    w[:, 3] = w[:20, 5] = 0
    matrix = coded(Coding(bits, group), w.T if transposed else w, transposed)
    entries, codes, scales = (x.T if transposed else x for x in (matrix.entries, matrix.codes, matrix.scales))
    largest = np.abs(w.reshape(-1, group or 40, 24)).max(1)
    assert np.array_equal(scales, largest)
    step = np.repeat(largest, group or 40, 0) / LARGEST_CODE[bits]
    assert np.all(np.abs(np.asarray(entries) - w) <= step / 2 * (1 + 1e-5))
    np.testing.assert_allclose(entries, codes * step, rtol=1e-6)
    assert np.abs(codes).max() == LARGEST_CODE[bits]
    assert matrix.stored["codes"].size == 40 * 24 // (1 if bits == "int8" else 2)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_values_of_nf4_are_kept(on_gpu, request):
    if on_gpu:
        request.getfixturevalue("as_on_a_gpu")
    w = np.tile(NF4, (3, 4)).T
    assert np.array_equal(coded(NF4_64, w, False).entries, w)


@pytest.mark.parametrize(
    "coding",
    [
        Coding("int4", 16),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Coding("int8"), NF4_64, NF4_DOUBLE)),
    ],
    ids=lambda coding: coding.name,
)
def test_a_product_saves_what_is_stored_alone(coding):
    """The gradient is that of the decoded matrix."""
    r = np.random.default_rng(1)
    for transposed, shape in ((False, (64, 24)), (True, (24, 64))):
        matrix = coded(coding, r.normal(size=shape), transposed)
        w = matrix.entries.T if transposed else matrix.entries
        x, g = jnp.asarray(r.normal(size=(2, 5, 64)), jnp.float32), jnp.asarray(r.normal(size=(2, 5, 24)), jnp.float32)
        y, vjp = jax.vjp(lambda x, matrix=matrix, t=transposed: matrix.multiply(x, transpose=t), x)
        np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(vjp(g)[0], g @ w.T, rtol=1e-5, atol=1e-5)
        stored = {id(leaf) for leaf in jax.tree.leaves(matrix)}
        assert {id(leaf) for leaf in jax.tree.leaves(vjp)} <= stored
