"""What stages of a pipeline tell each other."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from spmd_lm.axes import MODEL, PIPE
from spmd_lm.parallel.plan import Plan


class Messages:
    """What goes from stage to stage: one device's part of an activation, an n-th where `model` is n.

    Where the sequence is not split every device of `model` has all of it, and one part each is enough to send
    (arXiv:2104.04473, section 4.1)."""

    def __init__(self, plan: Plan, like: jax.ShapeDtypeStruct, wraps: bool):
        n = plan.layout.model
        self.parts = 1 if plan.sequence or like.shape[1] % n else n
        self.stages, self.wraps = plan.layout.pipe, wraps
        self.shape = (like.shape[0], like.shape[1] // self.parts, *like.shape[2:])
        self.dtype = like.dtype

    @property
    def whole(self) -> bool:
        """Whether a message is all that a device holds."""
        return self.parts == 1

    def none(self) -> jax.Array:
        return jnp.zeros(self.shape, self.dtype)

    @jax.named_scope("messages")
    def send(self, x: jax.Array, by: int) -> jax.Array:
        """To the stage `by` places on; what the one as many places back has sent."""
        every = range(self.stages)
        pairs = [(s, (s + by) % self.stages) for s in every if self.wraps or 0 <= s + by < self.stages]
        return lax.ppermute(x, PIPE, pairs)

    def pack(self, x: jax.Array) -> jax.Array:
        if self.whole:
            return x
        return lax.dynamic_slice_in_dim(x, lax.axis_index(MODEL) * self.shape[1], self.shape[1], 1)

    @jax.named_scope("messages")
    def unpack(self, message: jax.Array) -> jax.Array:
        if self.whole:
            return message
        x = lax.all_gather(message, MODEL, axis=1, tiled=True)
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))  # as the slots it goes to
