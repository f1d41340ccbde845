"""Dropout whose random bits are a function of (seed, step, layer, site; sample, coordinates), on any device.

Threefry-2x32 is written out on counters that broadcast, and every device counts its global indices: layout, remat and
the number of devices cannot change a mask.  The bits are integers compared with a threshold, because float draws differ
between float32 and float64 modes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive

from spmd_lm.ops.compiler_workarounds import compute_first

KeyWords = tuple[Array, Array]  # a threefry key: two uint32 words


as_one_operation = jax.make_user_context(False)
"""True if random bits are one primitive, which cannot be compiled: for traces that cost a layer."""
random_bits_p = Primitive("random_bits")
random_bits_p.multiple_results = True
random_bits_p.def_abstract_eval(
    lambda *words: [words[0].update(shape=np.broadcast_shapes(*(x.shape for x in words)))] * 2
)


def threefry(key: KeyWords, x0: Array, x1: Array) -> KeyWords:
    """Threefry-2x32 of uint32, 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""
    if as_one_operation.value:
        return tuple(random_bits_p.bind(*key, x0, x1))
    return _rounds(key, x0, x1)


@functools.partial(jax.jit, inline=True)  # traced once for all calls of the same shapes, of which a block has several
def _rounds(key: KeyWords, x0: Array, x1: Array) -> KeyWords:
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


def _uint32(x) -> Array:
    return jnp.asarray(x).astype(jnp.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DropoutKey:
    """Inputs of a dropout mask besides its site and coordinates.  seed, step, layer: integer scalars.  sample_ids:
    [batch], the index of each row within the global batch."""

    seed: Array
    step: Array
    sample_ids: Array
    layer: Array | int = 0

    def at_layer(self, layer: Array | int) -> "DropoutKey":
        return dataclasses.replace(self, layer=layer)

    def words(self, site: int, lane: Array | int = 0) -> KeyWords:
        """Threefry keys [batch, *lane.shape]: one for each sample and lane (an attention head, say) of a site."""
        run = threefry((_uint32(self.seed), _uint32(self.step)), _uint32(self.layer), _uint32(site))
        lane = _uint32(lane)
        rows = _uint32(self.sample_ids).reshape(-1, *(1,) * lane.ndim)
        return compute_first(threefry(run, rows, lane))


def dropout(x: Array, rate: float, key: KeyWords, row: Array, column: Array) -> Array:
    """`x` with entries zeroed with probability `rate`, others scaled up.  key, row, column: uint32, broadcast to x."""
    bits, _ = threefry(key, *jnp.broadcast_arrays(row, column))
    keep = bits >= np.uint32(round(rate * 2**32))
    dtype = jnp.promote_types(x.dtype, jnp.float32)  # in bfloat16 1 / 0.9 is 0.16% too small
    return jnp.where(keep, x.astype(dtype) * (1 / (1 - rate)), 0).astype(x.dtype)
