import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.ops.dropout import DropoutKey, dropout, threefry
from spmd_lm.parallel.mesh import Layout, make_mesh
from tests import reference

WORD = 2**32


def words(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, WORD, shape, dtype=np.uint32))


def key_of(samples, *, seed=5, step=7, layer=0) -> DropoutKey:
    return DropoutKey(jnp.uint32(seed), jnp.int32(step), jnp.asarray(samples, jnp.int32), layer)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # the vectors that come with Random123, threefry2x32 of 20 rounds
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((WORD - 1, WORD - 1), (WORD - 1, WORD - 1), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors(key, counter, expected):
    assert tuple(map(int, threefry(tuple(map(jnp.uint32, key)), *map(jnp.uint32, counter)))) == expected


def test_threefry_is_jax_s_own_and_broadcasts():
    key, x0, x1 = (words(0, 3, 1), words(1, 3, 1)), words(2, 1, 5), words(3, 5)
    whole = [jnp.broadcast_to(w, (3, 5)) for w in (*key, x0, x1)]
    np.testing.assert_array_equal(threefry(key, x0, x1), threefry2x32_p.bind(*whole))


def mask(key, rate, site, shape=(64, 128)):
    k0, k1 = (word[:, None, None] for word in key.words(site))
    row, column = (jnp.arange(n, dtype=jnp.uint32) for n in shape)
    return np.asarray(dropout(jnp.ones((len(key.sample_ids), *shape)), rate, (k0, k1), row[:, None], column))


def test_a_mask_is_a_function_of_what_it_is_documented_to_be():
    got = mask(key_of([3, 9], layer=2), 0.25, 1)
    want = reference.Dropout((5, 7), np.array([3, 9])).hidden(np.ones((2, 64, 128)), 0.25, 2, 1)
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_of_zeros_is_the_rate(rate):
    got = mask(key_of(range(16)), rate, 1)
    assert set(np.unique(got)) == {0, np.float32(1 / (1 - rate))}
    sigma = np.sqrt(rate * (1 - rate) / got.size)
    assert abs((got == 0).mean() - rate) < 5 * sigma
    for axis in range(3):  # nor is any sample, position or feature favoured
        lines = (got == 0).mean(axis=tuple({0, 1, 2} - {axis}))
        assert np.abs(lines - rate).max() < 5 * sigma * np.sqrt(len(lines))


@pytest.mark.parametrize(
    "other",
    [
        (key_of([3], seed=6), 1),
        (key_of([3], step=8), 1),
        (key_of([4]), 1),
        (key_of([3]).at_layer(1), 1),
        (key_of([3]), 2),
    ],
    ids=["seed", "step", "sample", "layer", "site"],
)
def test_masks_that_differ_in_one_coordinate_are_unrelated(other):
    a, b = (mask(*case[:1], 0.5, case[1]) == 0 for case in ((key_of([3]), 1), other))
    assert abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(a.size)


def test_lanes_are_unrelated():
    a, b = np.asarray(key_of(range(1000)).words(0, jnp.arange(2)))[0].T & 1
    assert abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(1000)


def test_a_mask_is_the_same_in_float64_mode_and_for_every_dtype():
    want = mask(key_of([3]), 0.3, 1) == 0
    with jax.enable_x64(True):
        np.testing.assert_array_equal(mask(key_of([3]), 0.3, 1) == 0, want)


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P("data", None, "model"), P(None, ("data", "model"))])
def test_a_mask_is_the_same_however_it_is_split(spec):
    sharding = NamedSharding(make_mesh(Layout(data=2, model=4), jax.devices()), spec)
    x = jnp.ones((2, 64, 128))

    def f(x, samples):
        k0, k1 = (word[:, None, None] for word in key_of(samples).words(1))
        row, column = (jnp.arange(n, dtype=jnp.uint32) for n in x.shape[1:])
        return dropout(x, 0.25, (k0, k1), row[:, None], column)

    got = jax.jit(f, out_shardings=sharding)(jax.device_put(x, sharding), jnp.array([3, 9]))
    assert got.sharding == sharding
    np.testing.assert_array_equal(got, mask(key_of([3, 9]), 0.25, 1))
