"""Matmuls in eight bits, forward and backward, beside a reference in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spmd_lm.ops.dense import dense
from spmd_lm.ops.eight_bits import EightBits, saturating_cast

FORMATS = {"fp8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2), "int8": (np.int8, np.int8)}
DTYPES = {"fp8": ("f8E4M3FN", "f8E5M2"), "int8": ("i8", "i8")}


def encoded(x, kind, dim, gradient=False):
    """What codes of x stand for, in float64."""
    dtype = FORMATS[kind][gradient]
    most = 127 if kind == "int8" else float(ml_dtypes.finfo(dtype).max)
    scale = np.abs(x).max(dim if kind == "int8" else None, keepdims=True) / np.float32(most)
    codes = x.astype(np.float32) / np.where(scale == 0, 1, scale)
    codes = np.round(codes) if kind == "int8" else codes
    return codes.astype(dtype).astype(np.float64) * scale


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [(rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for shape in shapes]


def vjp_of(kind, transpose=False, view=None):
    return jax.jit(
        lambda x, w, g: (lambda y, vjp: (y, *vjp(g)))(
            *jax.vjp(lambda x, w: dense(x, w, transpose, view, EightBits(kind)), x, w)
        )
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("transpose", [False, True])
def test_three_products_are_of_codes_and_scales(kind, transpose):
    """float32 sums of 8 to 24 products: rounding, beside codes of a few digits."""
    x, w, g = arrays((2, 8, 24), (16, 24) if transpose else (24, 16), (2, 8, 16))
    y, d_x, d_w = vjp_of(kind, transpose)(x, w, g)
    inner, outer = (1, 0) if transpose else (0, 1)
    matrix = w.T if transpose else w
    w_y, w_x = (encoded(w, kind, dim) for dim in (inner, outer))
    w_y, w_x = (each.T if transpose else each for each in (w_y, w_x))
    rows, of_rows = (each.reshape(16, -1) for each in (x, g))
    wanted = encoded(rows, kind, 0).T @ encoded(of_rows, kind, 0, True)
    for got, want, exact in (
        (y, encoded(x, kind, 2) @ w_y, x @ matrix),
        (d_x, encoded(g, kind, 2, True) @ w_x.T, g @ matrix.T),
        (d_w.T if transpose else d_w, wanted, rows.T @ of_rows),
    ):
        size = np.abs(exact).max()
        assert np.abs(got - want).max() < 2e-6 * size
        assert 1e-3 * size < np.abs(got - exact).max() < 0.2 * size  # in few bits indeed


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("transpose", [False, True])
def test_the_program_multiplies_codes(kind, transpose):
    x, w, g = arrays((2, 8, 24), (16, 24) if transpose else (24, 16), (2, 8, 16))
    text = vjp_of(kind, transpose).lower(*(each.astype(jnp.bfloat16) for each in (x, w, g))).as_text()
    operands = [line.rpartition(": (")[2] for line in text.splitlines() if "dot_general" in line]
    value, gradient = (f"x{dtype}>" for dtype in DTYPES[kind])
    left, right = ([part.split(",")[i].partition(" -> ")[0] for part in operands] for i in (0, 1))
    assert len(operands) == 3
    d_w = [value, gradient] if not transpose else [gradient, value]
    for i, (a, b) in enumerate([[value, value], [gradient, value], d_w]):
        assert a in left[i] and b in right[i]


def test_casts_saturate():
    """jnp's cast to e4m3 makes NaN of 500, and to e5m2 infinity of 1e5."""
    x = jnp.array([-1e9, -500, 449, 464, 1e9])
    e4m3 = saturating_cast(x, jnp.float8_e4m3fn, 448)
    assert e4m3.astype(jnp.float32).tolist() == [-448, -448, 448, 448, 448]
    assert saturating_cast(x, jnp.float8_e5m2, 57344).astype(jnp.float32).tolist() == [-57344, -512, 448, 448, 57344]
    assert saturating_cast(x, jnp.int8, 127).tolist() == [-127, -127, 127, 127, 127]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_zeros_and_the_smallest_numbers_have_a_product(kind, dtype):
    run = vjp_of(kind)
    for x in (0.0, jnp.finfo(dtype).smallest_normal, jnp.finfo(dtype).smallest_subnormal):
        x, w, g = (jnp.full(shape, value, dtype) for shape, value in (((1, 8, 8), x), ((8, 8), 1), ((1, 8, 8), x)))
        for result in run(x, w, g):
            assert result.dtype == dtype and jnp.isfinite(result).all() and not (jnp.abs(result) > 1e-3).any()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(kind, value):
    """A loss scale looks at the gradients of matrices, and at those of what is below."""
    x, w, g = arrays((2, 8, 24), (24, 16), (2, 8, 16))
    run = vjp_of(kind)
    g[1, 3, 5] = value
    y, d_x, d_w = run(x, w, g)
    assert jnp.isfinite(y).all() and not jnp.isfinite(d_x[1, 3]).any() and not jnp.isfinite(d_w[:, 5]).any()
    g[1, 3, 5], x[0, 0, 0] = 0, value
    y, d_x, d_w = run(x, w, g)
    assert not jnp.isfinite(y[0, 0]).any() and jnp.isfinite(d_x).all() and not jnp.isfinite(d_w[0]).any()


def test_int32_holds_sums():
    """Of 2^18 products of the largest codes, which would be 127^2 each."""
    x = jnp.ones((1, 1, 2**18))
    assert float(jax.jit(lambda x: dense(x, jnp.ones((2**18, 1)), eight_bits=EightBits("int8")))(x)[0, 0, 0]) == 2**18


@pytest.mark.parametrize("kind", FORMATS)
def test_columns_and_what_backward_saves(kind):
    """A view has codes and scales of its own; x and the stored matrix are saved as they are."""
    x, w = arrays((2, 8, 24), (24, 16))

    def first(w):
        return w[:, :4]

    got, vjp = jax.vjp(lambda x, w: dense(x, w, False, first, EightBits(kind)), x, w)
    np.testing.assert_array_equal(got, dense(x, first(w), False, None, EightBits(kind)))
    assert {leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.ndim} == {x.shape, w.shape}
    d_x, d_w = vjp(got)
    assert d_x.shape == x.shape and not d_w[:, 4:].any() and d_w[:, :4].all()
