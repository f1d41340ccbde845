"""Codes of ZeRO++: exact where they must be, and as close as their blocks allow elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.parallel.codecs import BLOCK_SIZE, LARGEST_CODE, blocks_in, decode, encode

SIZES = [1, 7, 255, 256, 257, 509, 512]


def rows(size: int, dtype="float32"):
    """Rows of one magnitude each, from 1e-6 to 1e3."""
    r = np.random.default_rng(size)
    return jnp.asarray(r.normal(size=(3, 4, size)) * np.geomspace(1e-6, 1e3, 12).reshape(3, 4, 1), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_an_entry_is_off_by_half_a_step_of_its_block(size, dtype):
    x = rows(size, dtype)
    coded = encode(x)
    assert coded.codes.shape == x.shape and coded.codes.dtype == jnp.int8
    assert coded.absmax.shape == (3, 4, blocks_in(size)) and coded.absmax.dtype == jnp.bfloat16
    got, x = (np.asarray(each, np.float64) for each in (decode(coded, x.dtype), x))
    for start in range(0, size, BLOCK_SIZE):
        block = np.s_[..., start : start + BLOCK_SIZE]
        largest = np.abs(x[block]).max(-1, keepdims=True)
        # Half a step; absmax may be rounded down, by 2^-9 of it, and bfloat16 rounds results as much.
        error = largest / LARGEST_CODE / 2 + largest * 2.0**-9 * (1 + (dtype == "bfloat16"))
        assert (np.abs(got[block] - x[block]) <= error * 1.01).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_decoded_values_encode_to_the_same_codes(size, dtype):
    """So that a copy which is sent twice is rounded once."""
    coded = encode(rows(size, "float32").astype(dtype) if dtype != "float16" else rows(size, dtype) * 1e-1)
    decoded = decode(coded, jnp.dtype(dtype))
    again = encode(decoded)
    np.testing.assert_array_equal(again.absmax, coded.absmax)
    np.testing.assert_array_equal(again.codes, coded.codes)


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    x = jnp.zeros((2, 600)).at[0, 300].set(jnp.nan).at[1, 599].set(jnp.inf)
    got = np.asarray(decode(encode(x), x.dtype))
    assert not np.isfinite(got[0, 256:512]).any() and not np.isfinite(got[1, 512:]).any()
    assert (got[0, :256] == 0).all() and (got[0, 512:] == 0).all() and (got[1, :512] == 0).all()


def test_shards_have_the_codes_of_the_whole():
    x = rows(300)
    whole = encode(x)
    for i in range(4):
        shard = encode(x[:, i : i + 1])
        np.testing.assert_array_equal(shard.codes, whole.codes[:, i : i + 1])
        np.testing.assert_array_equal(shard.absmax, whole.absmax[:, i : i + 1])
