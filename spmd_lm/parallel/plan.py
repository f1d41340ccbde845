"""The Plan: a layout resolved for one model, immutable.  Everything that knows how arrays lie on devices asks it.

Two shapes of every parameter: canonical, as the model says and checkpoints hold; and placed, padded to what the mesh
divides. `place` and `canonical` go between them, exactly."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm import axes
from spmd_lm.axes import BATCH_AXES, MESH_AXES, MODEL, Names, Placement, is_names
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.mesh import Layout
from spmd_lm.parallel.rules import ACTIVATIONS, PARAMETERS, Rules

Tree = Any

MANUAL = frozenset(MESH_AXES) - {MODEL}
"""The step is manual over these: their collectives are ours, explicit.  Over `model`, XLA inserts them."""

BATCH = P(None, BATCH_AXES)
"""Every array of a batch: microbatches, then rows."""


def padded_vocab(vocab: int, model: int) -> int:
    """`vocab` rounded up so that `model` divides it, and full tiles of 128 rows too where that costs less than an
    eighth."""
    tile = 128 * model if 8 * 128 * model <= vocab else model
    return -(-vocab // tile) * tile


def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x`, padded with zeros or cut at the end of each dimension to `shape`."""
    grow = [(0, to - size, 0) for size, to in zip(x.shape, shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), grow)


def _manual_part(spec: P) -> P:
    """`spec` as a manual body knows it: without the axes that are left to XLA."""
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()  # noqa: E731
    return P(*(tuple(a for a in axes_of(entry) if a in MANUAL) or None for entry in spec))


@dataclasses.dataclass(frozen=True)
class Plan:
    """names, shapes: trees of the parameters' names and canonical shapes.  mesh: abstract until devices bind."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    platform: str
    names: Tree
    shapes: Tree
    parameters: Rules = PARAMETERS
    activations: Rules = ACTIVATIONS

    def __post_init__(self):
        problems = []
        for path, names in jax.tree_util.tree_leaves_with_path(self.names, is_leaf=is_names):
            shape = self._placed_shape(names, functools.reduce(lambda t, k: t[k.key], path, self.shapes))
            for name, size in zip(names, shape, strict=True):
                parts = self._parts(name)
                if size % parts:
                    where = ".".join(k.key for k in path)
                    on = " x ".join(self.parameters.axes(name))
                    problems.append(f"{where}: dimension '{name}' of size {size} is not divisible by {on} = {parts}")
        if problems:
            raise LayoutError(*problems)

    # ---- where things lie

    def _parts(self, name: str | None) -> int:
        sizes = self.layout.sizes
        return functools.reduce(lambda n, axis: n * sizes[axis], self.parameters.axes(name), 1)

    def _placed_shape(self, names: Names, leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        pad = lambda name, size: padded_vocab(size, self.layout.model) if name == "vocab" else size  # noqa: E731
        return tuple(pad(name, size) for name, size in zip(names, leaf.shape, strict=True))

    @functools.cached_property
    def placement(self) -> Placement:
        """What a model may see inside the step: the mesh axes that are left to XLA."""
        rules = {name: tuple(a for a in on if a not in MANUAL) for name, on in self.activations.table.items()}
        return Placement(rules, self.layout.sizes)

    @functools.cached_property
    def specs(self) -> Tree:
        """PartitionSpecs of the parameters, their gradients and their moments."""
        return jax.tree.map(self.parameters.spec, self.names, is_leaf=is_names)

    @functools.cached_property
    def placed_shapes(self) -> Tree:
        """Shapes and dtypes of the parameters as devices hold them."""
        as_placed = lambda names, leaf: jax.ShapeDtypeStruct(self._placed_shape(names, leaf), leaf.dtype)  # noqa: E731
        return jax.tree.map(as_placed, self.names, self.shapes, is_leaf=is_names)

    def sharding(self, specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))

    @functools.cached_property
    def canonical_specs(self) -> Tree:
        """PartitionSpecs of the unpadded parameters: as `specs`, less the axes that do not divide a canonical size."""

        def spec(names: Names, leaf: jax.ShapeDtypeStruct) -> P:
            whole = lambda name, size: None if size % self._parts(name) else name  # noqa: E731
            return self.parameters.spec(tuple(map(whole, names, leaf.shape)))

        return jax.tree.map(spec, self.names, self.shapes, is_leaf=is_names)

    # ---- between canonical and placed

    def place(self, params: Tree) -> Tree:
        """Pad with zeros to the placed shapes."""
        return jax.tree.map(lambda x, to: fit(x, to.shape), params, self.placed_shapes)

    def canonical(self, params: Tree) -> Tree:
        """Take the padding off."""
        return jax.tree.map(lambda x, to: fit(x, to.shape), params, self.shapes)

    # ---- running

    def manual(self, body: Callable, ins: Tree, outs: Tree) -> Callable:
        """`body` run by each group of devices along `model`, which alone is left to XLA.  ins, outs: trees of full
        specs."""
        strip = functools.partial(jax.tree.map, _manual_part, is_leaf=lambda s: isinstance(s, P))

        def placed(*args):
            with axes.placed(self.placement):
                return body(*args)

        return jax.shard_map(
            placed, mesh=self.mesh, in_specs=strip(ins), out_specs=strip(outs), axis_names=MANUAL, check_vma=False
        )

    def live(self, *names: str) -> tuple[str, ...]:
        """The mesh axes among `names` that have more than one device: a collective over one device is none."""
        return tuple(axis for axis in names if self.layout.sizes[axis] > 1)

    def batch_sum(self, x: Tree) -> Tree:
        """Inside `manual`: the sum over everything the batch is split over, of values that `model` does not split."""
        live = self.live(*BATCH_AXES)
        return lax.psum(x, live) if live else x
