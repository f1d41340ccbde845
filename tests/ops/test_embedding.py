import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops.embedding import lookup
from tests.helpers import over_model

VOCAB, WIDTH = 64, 6
R = np.random.default_rng(0)
TABLE, TOKENS, G = R.normal(size=(VOCAB, WIDTH)), R.integers(0, VOCAB, (3, 40)), R.normal(size=(3, 40, WIDTH))


@pytest.mark.parametrize("model", [1, 2, 4, 8])
def test_lookup_and_its_gradient(model, x64):
    def f(table, tokens, g):
        out, back = jax.vjp(lambda table: lookup(table, tokens, "vocab"), table)
        return out, back(g)[0]

    split = ("vocab", None)
    out, gradient = over_model(f, model, (split, (), ()), ((), split))(TABLE, TOKENS.astype(np.int32), G)
    np.testing.assert_array_equal(out, TABLE[TOKENS])
    want = np.zeros_like(TABLE)
    np.add.at(want, TOKENS, G)
    np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-14)


def test_a_gradient_has_the_table_s_dtype():
    gradient = jax.grad(lambda table: lookup(table, jnp.zeros((1, 2), jnp.int32), "vocab").astype(jnp.float32).sum())
    assert gradient(jnp.ones((4, 2), jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_row_of_bfloat16_adds_its_gradients_up_in_float32():
    """Added one by one in bfloat16 they would stop at 256."""
    tokens, table = jnp.zeros((4, 1024), jnp.int32), jnp.zeros((3, 2), jnp.bfloat16)
    _, back = jax.vjp(lambda table: lookup(table, tokens, "vocab"), table)
    assert back(jnp.ones((4, 1024, 2), jnp.bfloat16))[0][0].tolist() == [4096, 4096]


def test_the_gradient_s_zeros_are_made_once_it_is_there():
    """Constant zeros are made early, and take memory until then.  So a NaN of `g` reaches rows that no token has."""
    tokens, table, g = jnp.zeros((1, 2), jnp.int32), jnp.zeros((3, 2)), jnp.ones((1, 2, 2))
    _, back = jax.vjp(lambda table: lookup(table, tokens, "vocab"), table)
    assert back(g)[0].tolist() == [[2, 2], [0, 0], [0, 0]]
    assert jnp.isnan(back(g.at[0, 0, 0].set(jnp.nan))[0]).all()
