"""Dropout whose bits are a function of (seed, step, layer, site; sample, coordinates), whoever computes them.

Threefry-2x32 is written out on counters that broadcast, and each device counts from its place in the whole
(`collectives.global_indices`): no layout, no recomputation and no device count can change a mask.  The bits are
integers compared with a threshold, because float draws differ between float32 and float64 modes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Key = tuple[jax.Array, jax.Array]


def threefry(key: Key, x0: jax.Array, x1: jax.Array) -> Key:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); uint32 in,
    uint32 out."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def _u32(x) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """Where in a run a random decision falls.  Nothing else decides it.

    seed, step, layer: integer scalars.  samples: [b], each row's number within the global batch of its step."""

    seed: jax.Array
    step: jax.Array
    samples: jax.Array
    layer: jax.Array | int = 0

    def at(self, layer: jax.Array | int) -> "Draw":
        return dataclasses.replace(self, layer=layer)

    def keys(self, site: int, lane: jax.Array | int = 0) -> Key:
        """Keys of shape [b, *lane.shape], one for each sample and lane (an attention head, say) of a site in a
        layer."""
        run = threefry((_u32(self.seed), _u32(self.step)), _u32(self.layer), _u32(site))
        lane = _u32(lane)
        # Computed before they are used: merged into the loops over entries, their rounds are repeated for each row, and
        # LLVM's vectorizer, in jax 0.12, takes a time that is exponential in their number.
        return lax.optimization_barrier(threefry(run, _u32(self.samples).reshape(-1, *(1,) * lane.ndim), lane))


def dropout(x: jax.Array, rate: float, key: Key, row: jax.Array, column: jax.Array) -> jax.Array:
    """`x` with a share `rate` of its entries zero and the rest scaled up.  `key`, `row`, `column`: uint32, broadcast to
    x."""
    bits, _ = threefry(key, *jnp.broadcast_arrays(row, column))
    keep = bits >= np.uint32(round(rate * 2**32))
    wide = jnp.promote_types(x.dtype, jnp.float32)  # in bfloat16 1 / 0.9 is 0.16% too small
    return jnp.where(keep, x.astype(wide) * (1 / (1 - rate)), 0).astype(x.dtype)
