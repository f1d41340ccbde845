"""The Plan: a layout resolved for one model, immutable.  Everything that knows how arrays lie on devices asks it.

Two shapes of every parameter: canonical, as the model says and checkpoints hold; and placed, padded to what the mesh
divides. `place` and `canonical` go between them, exactly."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm import axes
from spmd_lm.axes import BATCH_AXES, DATA, MODEL, PIPE, REPLICA, Names, Placement, is_names
from spmd_lm.errors import LayoutError
from spmd_lm.parallel import zero
from spmd_lm.parallel.mesh import Layout
from spmd_lm.parallel.rules import PARAMETERS, Rules, activations

Tree = Any


def padded_vocab(vocab: int, model: int) -> int:
    """`vocab` rounded up so that `model` divides it, and full tiles of 128 rows too where that costs less than an
    eighth."""
    tile = 128 * model if 8 * 128 * model <= vocab else model
    return -(-vocab // tile) * tile


def padded_width(width: int, shards: int) -> int:
    """`width` rounded up so that `shards` divides it; where it does not, to full tiles of 16 rows of bfloat16 a shard.

    Of a step of 1T parameters whose shards are of 4,272 rows, not 4,267, a TPU's compiler makes 26 s, not 92."""
    tile = 16 * shards if 8 * 16 * shards <= width else shards
    return width if width % shards == 0 else -(-width // tile) * tile


def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x`, padded with zeros or cut at the end of each dimension to `shape`."""
    grow = [(0, to - size, 0) for size, to in zip(x.shape, shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), grow)


def dealt(x: jax.Array, at: int, first: int, second: int) -> jax.Array:
    """The entries of dimension `at`, counted as [first, second, the rest], in the order [second, first, the rest]."""
    split = x.reshape(*x.shape[:at], first, second, -1, *x.shape[at + 1 :])
    return split.swapaxes(at, at + 1).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Plan:
    """names, shapes: trees of the parameters' names and canonical shapes.  mesh: abstract until devices bind.
    zero: the stage.  sequence: whether the residual stream is split along it.  chunks: of layers on a stage of the
    pipeline; layer l lies in chunk l // (pipe x n) of stage l // n % pipe, n layers to a chunk.  mask: whether a stage
    that is idle works all the same, and what it makes is thrown away."""

    layout: Layout
    mesh: Mesh | AbstractMesh
    platform: str
    names: Tree
    shapes: Tree
    zero: int = 0
    sequence: bool = False
    chunks: int = 1
    mask: bool = False

    def __post_init__(self):
        problems = []
        for path, names in jax.tree_util.tree_leaves_with_path(self.kept, is_leaf=is_names):
            leaf = functools.reduce(lambda tree, key: tree[key.key], path, self.placed_shapes)
            for name, size in zip(names, leaf.shape, strict=True):
                chunks = self.chunks if name == "layers" else 1
                parts = self._parts(name) * chunks
                if size % parts:
                    where = ".".join(k.key for k in path)
                    on = " x ".join(self.parameters.axes(name)) + " x chunks" * (chunks > 1)
                    problems.append(f"{where}: dimension '{name}' of size {size} is not divisible by {on} = {parts}")
        if problems:
            raise LayoutError(*problems)

    # ---- the mesh

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, `data`'s rings one by one."""
        return dict(self.mesh.shape)

    @functools.cached_property
    def rings(self) -> tuple[str, ...]:
        """The axes of the mesh that together are `data`, outermost first."""
        return tuple(axis for axis in self.mesh.axis_names if axis.startswith(DATA))

    @functools.cached_property
    def parameters(self) -> Rules:
        return PARAMETERS.with_rings(self.rings)

    @functools.cached_property
    def activations(self) -> Rules:
        return activations(self.sequence).with_rings(self.rings)

    def live(self, *names: str) -> tuple[str, ...]:
        """The axes of the mesh among `names` that have more than one device, in its order: a collective over one device
        is none."""
        physical = {ring for name in names for ring in (self.rings if name == DATA else (name,))}
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis in physical)

    # ---- where things lie

    @functools.cached_property
    def kept(self) -> Tree:
        """The names of the parameters as they are kept between steps, gradients and moments as well."""
        return jax.tree.map(zero.cut, self.names, is_leaf=is_names) if self.zero else self.names

    def _parts(self, name: str | None) -> int:
        return math.prod(self.sizes[axis] for axis in self.parameters.axes(name))

    def _placed_size(self, name: str | None, size: int) -> int:
        if name == "vocab":
            return padded_vocab(size, self.layout.model)
        return padded_width(size, self._parts(name)) if name == zero.SHARD else size

    def _placed_shape(self, kept: Names, leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        return tuple(map(self._placed_size, kept, leaf.shape))

    @functools.cached_property
    def placement(self) -> Placement:
        """What a model may see inside the step."""
        return Placement(self.activations.table, self.sizes)

    @functools.cached_property
    def specs(self) -> Tree:
        """PartitionSpecs of the parameters, their gradients and their moments."""
        return jax.tree.map(self.parameters.spec, self.kept, is_leaf=is_names)

    @functools.cached_property
    def whole_specs(self) -> Tree:
        """The same of parameters that are whole over `data`."""
        return jax.tree.map(self.parameters.spec, self.names, is_leaf=is_names)

    @functools.cached_property
    def batch_spec(self) -> P:
        """Of every array of a batch: microbatches, then rows."""
        return P(None, self.activations.axes("batch"))

    @functools.cached_property
    def placed_shapes(self) -> Tree:
        """Shapes and dtypes of the parameters as devices hold them."""
        as_placed = lambda names, leaf: jax.ShapeDtypeStruct(self._placed_shape(names, leaf), leaf.dtype)  # noqa: E731
        return jax.tree.map(as_placed, self.kept, self.shapes, is_leaf=is_names)

    def sharding(self, specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))

    @functools.cached_property
    def canonical_specs(self) -> Tree:
        """PartitionSpecs of the unpadded parameters: as `specs`, less the axes that do not divide a canonical size."""

        def spec(names: Names, leaf: jax.ShapeDtypeStruct) -> P:
            whole = lambda name, size: None if size % self._parts(name) else name  # noqa: E731
            return self.parameters.spec(tuple(map(whole, names, leaf.shape)))

        return jax.tree.map(spec, self.kept, self.shapes, is_leaf=is_names)

    # ---- between canonical and placed

    @functools.cached_property
    def arranged(self) -> bool:
        """Whether layers lie in another order than the model's."""
        return self.chunks > 1

    def arrange(self, params: Tree, *, back: bool = False) -> Tree:
        """Layers in the order in which stages hold them, chunk by chunk; or back in the model's."""

        sides = (self.layout.pipe, self.chunks) if back else (self.chunks, self.layout.pipe)
        deal = lambda names, x: dealt(x, names.index("layers"), *sides) if "layers" in names else x  # noqa: E731
        return jax.tree.map(deal, self.names, params, is_leaf=is_names) if self.arranged else params

    def place(self, params: Tree) -> Tree:
        """Pad with zeros to the placed shapes, and arrange the layers."""
        return self.arrange(jax.tree.map(lambda x, to: fit(x, to.shape), params, self.placed_shapes))

    def canonical(self, params: Tree) -> Tree:
        """Its inverse."""
        return jax.tree.map(lambda x, to: fit(x, to.shape), self.arrange(params, back=True), self.shapes)

    # ---- running

    def manual(self, body: Callable, ins: Tree, outs: Tree, *, whole_sequence: bool = False) -> Callable:
        """`body`, run by every device on its own part; what devices tell each other, it says.  ins, outs: trees of
        specs.  whole_sequence: for bodies whose sequences are too short to split."""
        whole = Placement(activations(False).with_rings(self.rings).table, self.sizes)

        def placed(*args):
            with axes.placed(whole if whole_sequence else self.placement):
                return body(*args)

        return jax.shard_map(placed, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)

    @jax.named_scope("scalars")
    def batch_sum(self, x: Tree) -> Tree:
        """Inside `manual`: the sum over everything the batch is split over."""
        live = self.live(*BATCH_AXES)
        return lax.psum(x, live) if live else x

    @jax.named_scope("scalars")
    def stage_sum(self, x: Tree) -> Tree:
        """Inside `manual`: the sum over the stages of the pipeline."""
        live = self.live(PIPE)
        return lax.psum(x, live) if live else x

    # ---- the pair, inside `manual`

    @functools.cached_property
    def _width(self) -> int:
        """Of the matrices, unpadded."""
        pairs = zip(jax.tree.leaves(self.names, is_leaf=is_names), jax.tree.leaves(self.shapes), strict=True)
        (width,) = {leaf.shape[names.index(zero.CUT)] for names, leaf in pairs if zero.CUT in names}
        return width

    def gather(self, tree: Tree, kept: Tree) -> Tree:
        """What is kept, made whole over `data`.  kept: its names."""
        return zero.gather(tree, kept, self.live(DATA), self._width)

    def scatter(self, grads: Tree, kept: Tree) -> Tree:
        """Gradients of matrices summed over `data`, onto the shards that are kept.  Vectors: as they are."""
        return zero.scatter(grads, kept, self.live(DATA), self._placed_size(zero.SHARD, self._width))

    def all_layers(self, stack: Tree) -> Tree:
        """Every stage's layers of this tree of stacks, in the model's order."""
        if not self.live(PIPE):
            return stack
        gather = lambda x: lax.all_gather(x, PIPE, axis=0, tiled=True)  # noqa: E731
        return jax.tree.map(lambda x: dealt(gather(x), 0, self.layout.pipe, self.chunks), stack)

    def own_layers(self, each: jax.Array) -> jax.Array:
        """Of values [layers], in the model's order, those of the layers that this stage has, in its order."""
        each = dealt(each, 0, self.chunks, self.layout.pipe)
        here = each.shape[0] // self.layout.pipe
        return lax.dynamic_slice_in_dim(each, lax.axis_index(PIPE) * here, here) if self.live(PIPE) else each

    def unsummed(self, kept: Names) -> tuple[str, ...]:
        """The axes over which a leaf's gradient is still to be summed, once that of matrices is scattered.

        Where the sequence is split, a device has seen no more than its part of it, and what `model` does not split has
        a gradient of no more."""
        batch = self.live(REPLICA) if zero.SHARD in kept else self.live(*BATCH_AXES)
        split = any(MODEL in self.parameters.axes(name) for name in kept)
        stages = () if "layers" in kept else self.live(PIPE)  # what has no layers serves the first and the last
        return (*stages, *batch) if split or not self.sequence else (*stages, *batch, *self.live(MODEL))

    @jax.named_scope("gradients")
    def sum_gradients(self, grads: Tree, kept: Tree) -> Tree:
        """What is left to do: one sum for each set of axes."""
        leaves, treedef = jax.tree.flatten(grads)
        over = [self.unsummed(names) for names in jax.tree.leaves(kept, is_leaf=is_names)]
        for live in set(over) - {()}:
            chosen = [i for i, axes_ in enumerate(over) if axes_ == live]
            for i, g in zip(chosen, lax.psum([leaves[i] for i in chosen], live), strict=True):
                leaves[i] = g
        return jax.tree.unflatten(treedef, leaves)
