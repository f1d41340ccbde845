"""The vocabulary: what dimensions and mesh axes are called, and all that a model may say about them.

A model speaks of `heads` or `vocab`; a `Placement` says which mesh axes hold them.  Whoever traces a model says so
once, with `placed(placement)`; inside it `constrain` pins an array, and `per_shard` runs a function on each device's
own part, where `total`, `maximum` and `index` speak of the parts that other devices hold.  With no placement every
array is whole, and the same code runs on one device without a mesh.

The train step is already manual over pipe, replica and data, so what is placed here is placed on what is left to XLA:
`model`.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

PIPE, REPLICA, DATA, MODEL = MESH_AXES = ("pipe", "replica", "data", "model")
BATCH_AXES = (REPLICA, DATA)

Names = tuple[str | None, ...]
"""The dimensions of one array, outermost first; None is a dimension that is never split."""


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

    def spec(self, *names: str | None) -> P:
        return P(*(self.axes(name) or None for name in names))


_placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar("placement", default=None)


@contextlib.contextmanager
def placed(placement: Placement | None):
    """Trace what is inside under `placement`."""
    token = _placement.set(placement)
    try:
        yield
    finally:
        _placement.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x`, placed as its names say."""
    placement = _placement.get()
    return x if placement is None else lax.with_sharding_constraint(x, placement.spec(*names))


def per_shard(f: Callable, ins: Any, outs: Any) -> Callable:
    """`f`, run by each device on its own part of the arguments.

    `ins` and `outs` are trees of names, or prefixes of such trees; () is an array that every device holds whole.
    Explicit collectives, and kernels that XLA cannot partition, live in one of these: outside, XLA would first gather
    over `model`. Never differentiate through one that has whole floating-point arguments or results: write its
    transpose."""
    placement = _placement.get()
    if placement is None:
        return f
    specs = lambda tree: jax.tree.map(lambda names: placement.spec(*names), tree, is_leaf=is_names)  # noqa: E731
    manual = {axis for axes in placement.rules.values() for axis in axes}
    return jax.shard_map(f, in_specs=specs(ins), out_specs=specs(outs), axis_names=manual, check_vma=False)


def _live(name: str) -> tuple[str, ...]:
    """The axes that `name` is really split over.  A collective over one device is no collective."""
    placement = _placement.get()
    return () if placement is None else tuple(a for a in placement.axes(name) if placement.sizes[a] > 1)


def shards(name: str) -> int:
    """How many parts `name` is split into."""
    placement = _placement.get()
    return math.prod(placement.sizes[a] for a in _live(name)) if placement else 1


def index(name: str) -> jax.Array:
    """Inside `per_shard`: which part of `name` this device holds, int32."""
    axes = _live(name)
    return lax.axis_index(axes).astype(jnp.int32) if axes else jnp.zeros((), jnp.int32)


def total(x: Any, name: str) -> Any:
    """Inside `per_shard`: the sum of `x` over the parts of `name`."""
    axes = _live(name)
    return lax.psum(x, axes) if axes else x


def maximum(x: jax.Array, name: str) -> jax.Array:
    """Inside `per_shard`: the maximum of `x` over the parts of `name`."""
    axes = _live(name)
    return lax.pmax(x, axes) if axes else x
