"""Codes of ZeRO++: exact where they must be, and as close as their blocks allow elsewhere."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.parallel.codecs import BLOCK_SIZE, Codec

SIZES = [1, 7, 255, 256, 257, 509, 512]
CODECS = [Codec(), Codec(4), Codec(4, packed=True)]


def rows(size: int, dtype="float32"):
    """Rows of one magnitude each, from 1e-6 to 1e3."""
    r = np.random.default_rng(size)
    return jnp.asarray(r.normal(size=(3, 4, size)) * np.geomspace(1e-6, 1e3, 12).reshape(3, 4, 1), dtype)


def largest_in_block(x: np.ndarray) -> np.ndarray:
    starts = range(0, x.shape[-1], BLOCK_SIZE)
    blocks = [np.abs(x[..., start : start + BLOCK_SIZE]) for start in starts]
    return np.concatenate([np.broadcast_to(each.max(-1, keepdims=True), each.shape) for each in blocks], -1)


@pytest.mark.mutants
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_an_entry_is_off_by_half_a_step_of_its_block(size, codec, dtype):
    x = rows(size, dtype)
    coded = codec.encode(x)
    assert {str(each.dtype): each.shape[-1] for each in coded} == codec.sizes(size)
    got, x = (np.asarray(each, np.float64) for each in (codec.decode(coded, size, x.dtype), x))
    largest = largest_in_block(x)
    # absmax may be rounded, by 2^-9 of it, and bfloat16 rounds results as much.
    error = largest / codec.largest / 2 + largest * 2.0**-9 * (1 + (dtype == "bfloat16"))
    assert (np.abs(got - x) <= error * 1.01).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_decoded_values_encode_to_the_same_codes(size, codec, dtype):
    """So that a copy which is sent twice is rounded once."""
    coded = codec.encode(rows(size, "float32").astype(dtype) if dtype != "float16" else rows(size, dtype) * 1e-1)
    again = codec.encode(codec.decode(coded, size, jnp.dtype(dtype)))
    np.testing.assert_array_equal(again.absmax, coded.absmax)
    np.testing.assert_array_equal(again.codes, coded.codes)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(codec):
    x = jnp.zeros((2, 600)).at[0, 300].set(jnp.nan).at[1, 599].set(jnp.inf)
    got = np.asarray(codec.decode(codec.encode(x), 600, x.dtype))
    assert not np.isfinite(got[0, 256:512]).any() and not np.isfinite(got[1, 512:]).any()
    assert (got[0, :256] == 0).all() and (got[0, 512:] == 0).all() and (got[1, :512] == 0).all()


def test_shards_have_the_codes_of_the_whole():
    x, codec = rows(300), Codec()
    whole = codec.encode(x)
    for i in range(4):
        shard = codec.encode(x[:, i : i + 1])
        np.testing.assert_array_equal(shard.codes, whole.codes[:, i : i + 1])
        np.testing.assert_array_equal(shard.absmax, whole.absmax[:, i : i + 1])


def test_packed_codes_are_the_codes():
    x = rows(509)
    plain, packed = Codec(4), Codec(4, packed=True)
    got, want = (each.decode(each.encode(x), 509, x.dtype) for each in (packed, plain))
    np.testing.assert_array_equal(got, want)


@pytest.mark.mutants
def test_stochastic_rounding_has_the_right_mean():
    """Of 4096 draws, within five standard deviations; to the nearest, nearly all would be zero."""
    codec, draws = Codec(4), 4096
    x = np.random.default_rng(0).normal(size=257).astype(np.float32) * 0.01
    x[[0, 256]] = 1.0  # each block's absmax, which bfloat16 holds
    copies = jnp.broadcast_to(jnp.asarray(x), (draws, 257))
    keys = jnp.uint32(3), jnp.uint32(5)
    got = np.asarray(codec.decode(codec.encode(copies, keys), 257, jnp.float32), np.float64)
    step = 1 / codec.largest
    assert np.abs(got - x).max() < step * 1.01
    fraction = np.abs(x) / step % 1
    deviation = step * np.sqrt(fraction * (1 - fraction) / draws)
    assert (np.abs(got.mean(0) - x) <= 5 * deviation + 1e-7).all()
    assert not np.asarray(codec.decode(codec.encode(copies[0]), 257, jnp.float32))[1:200].any()


def test_rounding_is_of_the_key_the_entry_and_the_scale():
    codec, x = Codec(4), jnp.full((2, 64), 0.3).at[:, 0].set(1.0)
    first, again, other = (codec.encode(x, (jnp.uint32(1), jnp.uint32(n))).codes for n in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first[0] != first[1]).any()
    scaled = codec.encode(x * 2, (jnp.uint32(1), jnp.uint32(7))).codes
    assert (scaled != first).any()
