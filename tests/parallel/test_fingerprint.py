"""Fingerprints are what their definition says, on every mesh: those in checkpoints must be found again."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spmd_lm.parallel.fingerprint import GOLDEN, MURMUR_1, MURMUR_2, Sums, fingerprints, measure, sums_of_part

SHAPES = [(), (0,), (3,), (8, 16), (2, 8, 4)]
DTYPES = ["float64", "float32", "bfloat16", "float16", "int32", "uint8", "bool"]


def by_definition(x: np.ndarray) -> list[int]:
    """The sums, word by word, in Python's numbers."""
    sums = [0, 0]
    for position, word in enumerate(x.reshape(-1).view(f"uint{8 * min(x.itemsize, 4)}").tolist()):
        mixed = ((word ^ (position * GOLDEN)) * MURMUR_1) % 2**32
        mixed = ((mixed ^ (mixed >> 13)) * MURMUR_2) % 2**32
        mixed ^= mixed >> 16
        sums = [(sums[0] + mixed) % 2**32, (sums[1] + mixed * (position | 1)) % 2**32]
    return sums


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fingerprint_is_that_of_its_definition(dtype, x64):
    for shape in SHAPES:
        x = jnp.asarray(100 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
        found, is_finite = measure(x)
        assert found.tolist() == by_definition(np.asarray(x)), shape
        assert is_finite


def test_a_fingerprint_is_the_same_on_every_mesh(x64):
    x = np.random.default_rng(0).normal(size=(8, 16))
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    for spec in ((None, None), ("data", "model"), ("model", None), (None, ("data", "model"))):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        assert measure(placed)[0].tolist() == by_definition(x), spec


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_number_that_is_not_finite_is_noticed(dtype, value, x64):
    x = jnp.zeros((4, 8), dtype)
    assert fingerprints({"x": x, "n": jnp.int32(1)})[1]
    assert not fingerprints({"x": x.at[2, 3].set(value), "n": jnp.int32(1)})[1]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_sums_of_parts_add_up_to_the_array_s(dtype, monkeypatch):
    monkeypatch.setattr("spmd_lm.parallel.fingerprint.CHUNK", 16)
    x = np.random.default_rng(0).normal(size=(4, 6, 10)).astype(jnp.dtype(dtype))
    total = Sums(0, 0, True)
    for bounds in itertools.product([(0, 1), (1, 4)], [(0, 6)], [(0, 3), (3, 10)]):
        total += sums_of_part(x[tuple(slice(*each) for each in bounds)], bounds, x.shape)
    assert [total.plain, total.weighted, total.finite] == [*by_definition(x), True]
    assert str(total) == f"{total.plain:08x}{total.weighted:08x}"
    x[3, 5, 9] = np.nan
    assert not sums_of_part(x, ((0, 4), (0, 6), (0, 10)), x.shape).finite
