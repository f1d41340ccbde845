"""The vocabulary: what dimensions and mesh axes are called, and all that a model may say about them.

A step runs on every device on its own part of each array, and a model is written for one such part.  It speaks of
names, `heads` or `vocab`, and never of devices: `shards` is how many parts a name has and `index` which of them is
here; `enter` and `leave` begin and end a stretch whose matrices are split; `total`, `maximum` and `whole` put parts
together.  A `Placement` says which mesh axes hold each name; whoever traces a model says so once, with
`placed(placement)`.  With no placement every array is whole, and the same code runs on one device without a mesh.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

PIPE, REPLICA, DATA, MODEL = MESH_AXES = ("pipe", "replica", "data", "model")
BATCH_AXES = (REPLICA, DATA)

Names = tuple[str | None, ...]
"""The dimensions of one array, outermost first; None is a dimension that is never split."""

SEQUENCE = "sequence"
"""Dimension 1 of the residual stream, [batch, sequence, width]."""


def is_names(x: Any) -> bool:
    """Whether a node of a tree is an array's names (a leaf) rather than a container of more nodes."""
    return isinstance(x, tuple) and all(n is None or isinstance(n, str) for n in x)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh axes hold each name, and how many devices lie along each.

    `rules` lists every name that a model may use; a name that is not in it is a mistake, not a whole dimension."""

    rules: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def axes(self, name: str | None) -> tuple[str, ...]:
        return () if name is None else tuple(self.rules[name])


_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)


@contextlib.contextmanager
def placed(placement: Placement | None):
    """Trace what is inside under `placement`."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


def _live(name: str) -> tuple[str, ...]:
    """The axes that `name` is really split over.  A collective over one device is no collective."""
    placement = _placement.get()
    return () if placement is None else tuple(a for a in placement.axes(name) if placement.sizes[a] > 1)


def shards(name: str) -> int:
    """How many parts `name` is split into."""
    placement = _placement.get()
    return math.prod(placement.sizes[a] for a in _live(name)) if placement else 1


def index(name: str) -> jax.Array:
    """Which part of `name` this device holds, int32."""
    axes = _live(name)
    return lax.axis_index(axes).astype(jnp.int32) if axes else jnp.zeros((), jnp.int32)


def places(name: str, here: int) -> jax.Array:
    """Where the `here` entries of this device stand in the whole dimension `name`, int32 [here]."""
    return index(name) * here + jnp.arange(here, dtype=jnp.int32)


def part(x: jax.Array, name: str, dim: int) -> jax.Array:
    """This device's part of the dimension `dim` of x, called `name`, which every device holds whole."""
    here = x.shape[dim] // shards(name)
    return lax.dynamic_slice_in_dim(x, index(name) * here, here, dim) if _live(name) else x


def total(x: Any, name: str) -> Any:
    """The sum of `x` over the parts of `name`.  Not to be differentiated through."""
    axes = _live(name)
    return lax.psum(x, axes) if axes else x


def maximum(x: jax.Array, name: str) -> jax.Array:
    """The maximum of `x` over the parts of `name`.  Not to be differentiated through."""
    axes = _live(name)
    return lax.pmax(x, axes) if axes else x


def whole(x: jax.Array, name: str, dim: int) -> jax.Array:
    """x with every device's part of the dimension `dim`, called `name`.  Not to be differentiated through."""
    axes = _live(name)
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def gathered(x: jax.Array) -> jax.Array:
    """x [batch, sequence, ...] with all of the sequence.  Not to be differentiated through."""
    return whole(x, SEQUENCE, 1)


def _from_first(x: jax.Array) -> jax.Array:
    return total(jnp.where(index(SEQUENCE) == 0, x, 0), SEQUENCE)


@jax.custom_vjp
def at_first(x: jax.Array) -> jax.Array:
    """A value that the device makes which holds the sequence's beginning; the others' are dropped, and so are their
    gradients."""
    return _from_first(x)


at_first.defvjp(lambda x: (_from_first(x), None), lambda _, g: (jnp.where(index(SEQUENCE) == 0, g, 0),))


@jax.custom_vjp
def together(x: jax.Array) -> jax.Array:
    """x [batch, sequence, ...] with all of the sequence, of which every device then makes the same; so that of the
    gradient each takes its part."""
    return gathered(x)


together.defvjp(lambda x: (gathered(x), None), lambda _, g: (part(g, SEQUENCE, 1),))


def scatter(x: jax.Array, axes: str | tuple[str, ...], dim: int, *, pinned: bool = False) -> jax.Array:
    """The sum of x over mesh axes, of which each device keeps its part of the dimension `dim`.

    A TPU's compiler makes a full all-reduce of it where an array has dimensions of one, which are taken out meanwhile,
    or where `dim` comes last in memory; and it pads most arrays, but none whose first dimension is the devices'.
    pinned: lay it out as its dimensions are written, for arrays that would else take their layout from what made
    them."""
    ones = tuple(d for d, size in enumerate(x.shape) if size == 1 and d != dim)
    x, at = lax.squeeze(x, ones), dim - sum(d < dim for d in ones)
    devices = lax.psum(1, axes)
    rest = (x.shape[0] // devices, *x.shape[1:])
    first = at == 0 and rest[0] > 1
    x = x.reshape(devices, *rest) if first else x
    if pinned:
        x = with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))
    part = lax.psum_scatter(x, axes, scatter_dimension=at, tiled=True)
    return lax.expand_dims(part.reshape(rest) if first else part, ones)


def summed(x: jax.Array, name: str) -> jax.Array:
    """The sum of x [batch, sequence, ...], whole, over the parts of `name`; of it this device's part of the sequence.

    One reduce-scatter where the sequence is split, else an all-reduce.  Not to be differentiated through."""
    if not (axes := _live(SEQUENCE)):
        return total(x, name)
    assert axes == _live(name), (name, axes)
    return scatter(x, axes, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: jax.Array, name: str) -> jax.Array:
    """x [batch, sequence, width] of the residual stream, whole, where it meets matrices that are split along `name`.

    Megatron's f (arXiv:1909.08053, section 3): its gradient is the sum of what the parts make of it."""
    return gathered(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(x: jax.Array, name: str) -> jax.Array:
    """The residual stream's part of the sum of x [batch, whole sequence, width] over the parts of `name`.

    Megatron's g: every part receives the same gradient."""
    return summed(x, name)


enter.defvjp(lambda x, name: (gathered(x), None), lambda name, _, g: (summed(g, name),))
leave.defvjp(lambda x, name: (summed(x, name), None), lambda name, _, g: (gathered(g),))
