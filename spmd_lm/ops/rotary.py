"""Rotary position embeddings (arXiv:2104.09864) of all features of a head, or its first ones, and their scalings to
rows longer than in pretraining.

A scaling is a ratio for each frequency and a factor of the cosines and sines.  The formulas are those of transformers
5.23, modeling_rope_utils.py, except that `dynamic` knows the row's length before it runs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Rotary:
    """theta: base of the frequencies.  fraction: share of a head's features that are rotated, the first ones.  scaling:
    a section of config/rope.py; None for none.  context: tokens per row, on which `dynamic` depends."""

    theta: float
    fraction: float = 1.0
    scaling: Any = None
    context: int = 0

    def rotated(self, head_width: int) -> int:
        """Features of a head that are rotated."""
        return int(head_width * self.fraction)

    def ratios(self, head_width: int) -> np.ndarray | None:
        """Factors of the scaling for each frequency, float64 [rotated / 2]; None without one."""
        if self.scaling is None:
            return None
        return RATIOS[self.scaling.kind](self, self.rotated(head_width))

    def frequencies(self, head_width: int, dtype: Any) -> Array:
        """Radians per position of each pair of features, [rotated / 2]."""
        pairs = self.rotated(head_width) // 2
        ratios = self.ratios(head_width)
        if ratios is None:
            return self.theta ** (-jnp.arange(pairs, dtype=dtype) / pairs)
        return jnp.asarray(self.theta ** (-np.arange(pairs) / pairs) * ratios, dtype)  # rounded once

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines; scores are multiplied by its square."""
        s = self.scaling
        if s is None or s.kind != "yarn":
            return 1.0
        if s.attention_factor is not None:
            return s.attention_factor
        if s.mscale and s.mscale_all_dim:
            return (0.1 * s.mscale * math.log(s.factor) + 1) / (0.1 * s.mscale_all_dim * math.log(s.factor) + 1)
        return 0.1 * math.log(s.factor) + 1

    def apply(self, x: Array, positions: Array) -> Array:
        """Rotates x [B, T, H, K]: of the R features that are rotated, feature i with feature i + R/2, by position x
        frequency i, so that dot products of queries and keys depend on their distance.  positions: int32 [B, T].

        Angles are float32 or wider: bfloat16 cannot tell position 257 from 256."""
        if (rotated := self.rotated(x.shape[-1])) < x.shape[-1]:
            first, rest = jnp.split(x, [rotated], axis=-1)
            return jnp.concatenate([dataclasses.replace(self, fraction=1.0).apply(first, positions), rest], axis=-1)
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        frequencies = self.frequencies(x.shape[-1], dtype)
        angles = positions[..., None, None].astype(dtype) * frequencies
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if (factor := self.attention_factor) != 1:
            cos, sin = factor * cos, factor * sin
        a, b = jnp.split(x.astype(dtype), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _linear(rotary: Rotary, rotated: int) -> np.ndarray:
    return np.full(rotated // 2, 1 / rotary.scaling.factor)


def _dynamic(rotary: Rotary, rotated: int) -> np.ndarray:
    """Ratios for rows of `context` tokens.  transformers recomputes them as a generation grows; here they are fixed, so
    that the keys in a cache are those of training."""
    theta_ratio = rotary.scaling.grown_theta(1.0, rotary.context, rotated)
    return theta_ratio ** (-np.arange(rotated // 2) / (rotated // 2))


def _yarn(rotary: Rotary, rotated: int) -> np.ndarray:
    s = rotary.scaling

    def pair_with(rotations: float) -> float:
        """Fractional index of the feature pair that rotates this often over the original context."""
        return rotated * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))

    low, high = pair_with(s.beta_fast), pair_with(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = np.clip((np.arange(rotated // 2) - low) / ((high - low) or 0.001), 0, 1)
    return ramp / s.factor + (1 - ramp)


def _llama3(rotary: Rotary, rotated: int) -> np.ndarray:
    s, pairs = rotary.scaling, rotated // 2
    rotations = s.original_context * rotary.theta ** (-np.arange(pairs) / pairs) / (2 * math.pi)
    ramp = np.clip((rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - ramp) / s.factor + ramp


RATIOS: dict[str, Callable[[Rotary, int], np.ndarray]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
"""Ratios of the frequencies of `rotated` features, float64 [rotated / 2], by kind of scaling."""
