import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmd_lm.models.layers import add_bias
from spmd_lm.ops.dense import dense
from spmd_lm.ops.norm import layer_norm
from tests import reference
from tests.helpers import assert_close

R = np.random.default_rng(0)


@pytest.mark.parametrize("back", [False, True])
def test_dense_and_its_gradients(back, x64):
    w, bias = R.normal(size=(6, 10)), R.normal(size=6 if back else 10)
    x, g = R.normal(size=(2, 3, 10 if back else 6)), R.normal(size=(2, 3, 6 if back else 10))

    def ours(x, w, bias):
        return add_bias(dense(x, w, transpose=back), nnx.Param(bias))

    def plain(x, w, bias):
        return jnp.einsum("bti,oi->bto" if back else "bti,io->bto", x, w) + bias

    got, want = ((y, *back(g)) for y, back in (jax.vjp(f, x, w, bias) for f in (ours, plain)))
    assert_close([*map(np.asarray, got)], [*map(np.asarray, want)], 1e-14)


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_and_its_gradients(bias, x64):
    x, g = 5 * R.normal(size=(3, 32)) + 2, R.normal(size=(3, 32))
    p = {"scale": R.normal(size=32)} | ({"bias": R.normal(size=32)} if bias else {})
    got, want = (
        (y, back(g))
        for y, back in (
            jax.vjp(f, x, p)
            for f in (lambda x, p: layer_norm(x, p["scale"], p.get("bias")), lambda x, p: reference.norm(x, p))
        )
    )
    assert_close(*(jax.tree.map(np.asarray, pair) for pair in (got, want)), 1e-13)


def test_layer_norm_of_bfloat16_takes_its_statistics_in_float32():
    x = (R.normal(size=(4, 4096)) + 8).astype(jnp.bfloat16)  # a bfloat16 sum of these is off by percents
    got, want = layer_norm(x, jnp.ones(4096, jnp.bfloat16), None), reference.norm(x.astype(np.float32), {"scale": 1})
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-3)


def test_a_bias_of_bfloat16_adds_its_gradients_up_in_float32():
    """Added one by one in bfloat16 they would stop at 256."""
    bias = jnp.zeros(2, jnp.bfloat16)
    _, back = jax.vjp(lambda b: add_bias(jnp.zeros((4, 1024, 2), jnp.bfloat16), nnx.Param(b)), bias)
    assert back(jnp.ones((4, 1024, 2), jnp.bfloat16))[0].tolist() == [4096, 4096]


@pytest.mark.parametrize("offset", [0, 1e4])
def test_a_gpu_takes_moments_in_one_pass(offset, as_on_a_gpu, x64):
    """Merged moments keep what sums of squares would lose where a mean is far from zero."""
    x, scale = R.normal(size=(4, 7, 96)) + offset, np.ones(96)
    got, want = layer_norm(jnp.asarray(x), jnp.asarray(scale), None), reference.norm(x, {"scale": scale})
    assert as_on_a_gpu
    assert_close(np.asarray(got), want, 1e-11)


def test_a_gpu_reads_a_row_once_and_others_keep_their_passes():
    step = jax.jit(jax.grad(lambda x: layer_norm(x, jnp.ones(32), None).sum()))
    gpu, cpu = (step.trace(jnp.ones((4, 32))).lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "cpu"))
    assert "optimization_barrier" in gpu and "optimization_barrier" not in cpu
    assert gpu.count("stablehlo.reduce") < cpu.count("stablehlo.reduce")
