"""GPTQ of one matrix."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.ops.few_bits import CodedMatrix, Coding, encode, store
from spmd_lm.quantization import gptq as module
from spmd_lm.quantization.gptq import decode, gptq, nearest, round_to_nearest, squared_error

CODINGS = [Coding("int8"), Coding("int4", 16), Coding("int3"), Coding("nf4", 64)]


def drawn(inputs: int, outputs: int, tokens: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """A matrix, and X'X of inputs that vary together."""
    r = np.random.default_rng(inputs)
    x = r.normal(size=(tokens, inputs)) @ r.normal(size=(inputs, inputs)) * r.uniform(0.1, 3, inputs)
    return r.normal(size=(inputs, outputs)).astype(np.float32), x.T @ x


def by_definition(w: np.ndarray, gram: np.ndarray, coding: Coding, absmax: np.ndarray) -> np.ndarray:
    """Values, one input after the other: those left take the step that makes up for the error best, and the inverse of
    the Gram matrix loses the input (arXiv:2210.17323, equations 2 and 3)."""
    left, done = w.astype(np.float64), np.empty(w.shape)
    inverse = np.linalg.inv(gram + module.DAMPING * np.diag(gram).mean() * np.eye(len(gram)))
    scales = np.repeat(absmax, coding.group or len(w), 0)
    for i in np.argsort(-np.diag(gram), kind="stable"):
        _, done[i] = nearest(coding, left[i], scales[i])
        left -= np.outer(inverse[:, i], (left[i] - done[i]) / inverse[i, i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return done


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
def test_codes_are_those_of_the_definition(coding, monkeypatch):
    monkeypatch.setattr(module, "PART", 24)  # which divides neither groups nor inputs
    w, gram = drawn(64, 10)
    found, rounded = gptq(w, gram, coding), round_to_nearest(w, coding)
    np.testing.assert_allclose(
        decode(coding, found), by_definition(w, gram, coding, found.absmax), rtol=1e-6, atol=1e-6
    )
    assert squared_error(w, decode(coding, found), gram) < 0.7 * squared_error(w, decode(coding, rounded), gram)


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
def test_the_nearest_codes_are_those_of_the_step(coding):
    w, _ = drawn(64, 10)
    found, stored = round_to_nearest(w, coding), encode(coding, jnp.asarray(w), False)
    matrix = CodedMatrix(stored, coding, "mlp", False)
    assert np.array_equal(found.codes, matrix.codes) and np.array_equal(found.absmax, matrix.scales)
    np.testing.assert_allclose(decode(coding, found), matrix.entries, rtol=1e-6)
    for key, x in store(coding, jnp.asarray(found.codes), jnp.asarray(found.absmax), False).items():
        assert x.dtype == stored[key].dtype and np.array_equal(x, stored[key])


@pytest.mark.parametrize("coding", CODINGS, ids=lambda coding: coding.name)
def test_inputs_that_are_always_zero_are_rounded(coding):
    w, _ = drawn(64, 10)
    w[:, 3] = 0
    found = gptq(w, np.zeros((64, 64)), coding)
    assert np.array_equal(decode(coding, found)[:, 3], np.zeros(64))
    codes, _ = nearest(coding, w.reshape(-1, coding.group or 64, 10), found.absmax[:, None])
    assert np.array_equal(found.codes, codes.reshape(w.shape))
