import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_lm.data.shuffle import fold_in, permute


@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@given(n=st.integers(1, 2**45), key=st.integers(0, 2**64 - 1), data=st.data())
def test_an_image_does_not_depend_on_other_indices(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    together = permute(index, n, key)
    assert [int(permute([i], n, key)[0]) for i in index] == together.tolist()
    assert (together < n).all()


def test_each_element_may_have_its_own_key():
    keys = np.arange(50, dtype=np.uint64)
    assert permute(np.full(50, 3), 7, keys).tolist() == [int(permute(3, 7, key)) for key in keys]


@pytest.mark.parametrize("n", [2, 3, 5, 8, 20])
def test_every_image_is_equally_likely(n):
    keys = 400 * n
    images = permute(np.repeat(np.arange(n), keys), n, fold_in(7, np.tile(np.arange(keys), n))).reshape(n, keys)
    counts = np.array([np.bincount(image, minlength=n) for image in images])
    # Each count is binomial of mean 400 and deviation at most 20; none of 400 is 5 of them away.
    assert np.abs(counts - 400).max() < 100


def test_neighbours_are_separated():
    n = 2**16
    steps = np.diff(permute(np.arange(n), n, 11)) % n
    assert len(np.unique(steps)) > 0.6 * n  # 1 - 1/e of all differences, if they are drawn at random


def test_values_never_change():
    """Other values here would change the order of every run that is resumed."""
    assert int(fold_in(0)) == 0xE220A8397B1DCDAF  # the first output of splitmix64, from its own paper's code
    assert int(fold_in(1, 2)) == 13608149317741381227
    assert permute(np.arange(10), 10, 42).tolist() == [2, 6, 0, 7, 9, 1, 5, 4, 8, 3]
