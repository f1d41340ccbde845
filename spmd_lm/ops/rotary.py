"""Rotary position embeddings (arXiv:2104.09864): queries and keys are rotated by angles proportional to their position,
so that their products depend on relative distance."""

import jax
import jax.numpy as jnp


def apply_rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """x: [B, T, H, K]; positions: int32 [B, T].  Rotates feature i with feature i + K/2, by position x theta^(-2i/K).

    Angles are float32 or wider: bfloat16 cannot tell position 257 from 256."""
    half = x.shape[-1] // 2
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequencies = theta ** (-jnp.arange(half, dtype=wide) / half)
    angles = positions[..., None, None].astype(wide) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
