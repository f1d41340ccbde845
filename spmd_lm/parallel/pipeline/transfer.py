"""Point-to-point sends between the stages of a pipeline."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.axes import MODEL, PIPE
from spmd_lm.ops.compiler_workarounds import as_row_major
from spmd_lm.parallel.plan import Plan


class StageTransfer:
    """Sends activations and their gradients from stage to stage; with n devices along `model`, each sends 1/n of it.

    Where the sequence is not sharded every device of `model` has the whole activation, and a slice from each is enough
    (arXiv:2104.04473, section 4.1).  wraps: whether the last stage sends to the first.  sends_unsplit: whether each
    device sends all that it holds."""

    def __init__(self, plan: Plan, activation: jax.ShapeDtypeStruct, wraps: bool):
        (rows, sequence, width), n = activation.shape, plan.layout.model
        self.sends_unsplit = n == 1 or plan.sequence or sequence % n > 0
        self.shape, self.dtype = (rows, sequence if self.sends_unsplit else sequence // n, width), activation.dtype
        self.stages, self.wraps, self.shards = plan.layout.pipe, wraps, plan.active_axes(MODEL)

    def zeros(self) -> Array:
        return jnp.zeros(self.shape, self.dtype)

    @jax.named_scope("messages")
    def send(self, x: Array, by: int) -> Array:
        """Sends from stage s to stage s + by; returns what stage s - by sent here, or zeros."""
        stages = range(self.stages)
        pairs = [(s, (s + by) % self.stages) for s in stages if self.wraps or 0 <= s + by < self.stages]
        return lax.ppermute(x, PIPE, pairs)

    def pack(self, x: Array) -> Array:
        """Slices out this device's share of an activation."""
        if self.sends_unsplit:
            return x
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.shards) * self.shape[1], self.shape[1], 1)

    @jax.named_scope("messages")
    def unpack(self, received: Array) -> Array:
        """All-gathers an activation, of which each device of `model` has received its share."""
        x = lax.all_gather(received, self.shards, axis=1, tiled=True)
        return as_row_major(x)  # that of the slots it is written to
