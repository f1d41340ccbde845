"""Rotary positions and their scalings against formulas written out pair by pair."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_lm.config.rope import DynamicRope, LinearRope, Llama3Rope, YarnRope
from spmd_lm.ops.rotary import Rotary
from tests.helpers import relative

LINEAR = LinearRope(kind="linear", factor=4.0)
DYNAMIC = DynamicRope(kind="dynamic", factor=2.0, original_context=1024)
YARN = YarnRope(kind="yarn", factor=8.0, original_context=4096)
LLAMA3 = Llama3Rope(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def expected_frequency(rotary: Rotary, pair: int, pairs: int) -> float:
    """The papers' formula."""
    s, theta, frequency = rotary.scaling, rotary.theta, rotary.theta ** (-pair / pairs)
    if s is None:
        return frequency
    if s.kind == "linear":
        return frequency / s.factor
    if s.kind == "dynamic":
        length = max(rotary.context, s.original_context)
        theta *= (s.factor * length / s.original_context - (s.factor - 1)) ** (2 * pairs / (2 * pairs - 2))
        return theta ** (-pair / pairs)
    if s.kind == "llama3":
        wavelength = 2 * math.pi / frequency
        if wavelength < s.original_context / s.high_freq_factor:
            return frequency
        if wavelength > s.original_context / s.low_freq_factor:
            return frequency / s.factor
        smooth = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        return (1 - smooth) * frequency / s.factor + smooth * frequency
    low, high = (
        pairs * math.log(s.original_context / (2 * math.pi * beta), theta) for beta in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    stretched = min(1.0, max(0.0, (pair - max(low, 0)) / (min(high, 2 * pairs - 1) - max(low, 0))))
    return stretched * frequency / s.factor + (1 - stretched) * frequency


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(1e4),
        Rotary(5e5, fraction=0.25),
        Rotary(1e4, scaling=LINEAR),
        Rotary(1e4, scaling=DYNAMIC, context=1000),
        Rotary(1e4, 0.5, DYNAMIC, 3000),
        Rotary(1e4, scaling=YARN),
        Rotary(5e5, 0.5, YARN.model_copy(update={"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0})),
        Rotary(5e5, scaling=LLAMA3),
        Rotary(1e4, 0.75, LLAMA3),
    ],
)
def test_frequencies_are_those_of_the_papers(rotary, x64):
    width = 128
    pairs = int(width * rotary.fraction) // 2
    want = [expected_frequency(rotary, pair, pairs) for pair in range(pairs)]
    np.testing.assert_allclose(rotary.frequencies(width, jnp.float64), want, rtol=1e-12)
    if rotary.scaling:
        ratios = rotary.ratios(width)
        assert ratios.dtype == np.float64 and (
            len({*ratios}) > 1 or rotary.scaling.kind == "linear" or (ratios == 1).all()
        )


def test_what_attention_is_multiplied_by():
    assert [Rotary(1e4, scaling=s).attention_factor for s in (None, LINEAR, DYNAMIC, LLAMA3)] == [1.0] * 4

    def of(**changes):
        return Rotary(1e4, scaling=YARN.model_copy(update=changes)).attention_factor

    log = math.log(8)
    assert of() == pytest.approx(0.1 * log + 1)
    assert of(mscale=0.707) == of(mscale_all_dim=1.0) == of(mscale=0.0, mscale_all_dim=1.0) == of()
    assert of(mscale=1.0, mscale_all_dim=0.707) == pytest.approx((0.1 * log + 1) / (0.0707 * log + 1))
    assert of(attention_factor=1.25, mscale=1.0, mscale_all_dim=0.5) == 1.25
    assert of(factor=1.0) == 1.0


@pytest.mark.parametrize(("fraction", "scaling"), [(1.0, None), (0.25, None), (1.0, YARN), (0.5, YARN)])
def test_the_first_features_are_rotated_and_the_rest_are_left(fraction, scaling, x64):
    x = np.random.default_rng(0).normal(size=(2, 7, 3, 16))
    positions = np.random.default_rng(1).integers(0, 5000, (2, 7), dtype=np.int32)
    rotary, rotated = Rotary(1e4, fraction, scaling), int(16 * fraction)
    frequencies = [expected_frequency(rotary, pair, rotated // 2) for pair in range(rotated // 2)]
    turns = rotary.attention_factor * np.exp(1j * positions[..., None, None] * np.array(frequencies))
    z = (x[..., : rotated // 2] + 1j * x[..., rotated // 2 : rotated]) * turns
    got = np.asarray(rotary.apply(jnp.asarray(x), positions))
    assert relative(got[..., :rotated], np.concatenate([z.real, z.imag], axis=-1)) < 1e-11
    np.testing.assert_array_equal(got[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_without_a_scaling_nothing_is_computed_for_one(dtype):
    """The program of all features is the one it has always been."""
    x, positions = jax.ShapeDtypeStruct((2, 5, 3, 8), dtype), jax.ShapeDtypeStruct((2, 5), jnp.int32)

    def plain(x, positions):
        frequencies = 1e4 ** (-jnp.arange(4, dtype=jnp.float32) / 4)
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    assert str(jax.make_jaxpr(Rotary(1e4).apply)(x, positions)) == str(jax.make_jaxpr(plain)(x, positions))
