"""ZeRO (arXiv:1910.02054): the state that data parallelism replicates n times is sharded over ZERO_AXES.

One dimension of every matrix, `width`, is sharded between steps.  `gather` unshards weights, in the compute dtype;
`scatter` sums gradients onto the shards that own them.  `ZeroPolicy` says how often a step does each.  Vectors stay
replicated, and their gradients are all-reduced once per step: the same bytes as gathering and scattering them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.axes import EXPERT_ZERO_DIMS, ZERO_DIMS, DimNames, is_dim_names
from spmd_lm.ops.collectives import reduce_scatter
from spmd_lm.ops.compiler_workarounds import as_row_major, run_again
from spmd_lm.ops.dropout import KeyWords, threefry
from spmd_lm.parallel.codecs import Codec, Coded
from spmd_lm.parallel.compiler_workarounds import after, map_over_layers, scattered_before
from spmd_lm.parallel.trees import Tree, drop_residuals, is_coded, merge, subset_of

Frequency = Literal["never", "step", "chunk", "layer"]
ZeroAxes = Callable[[DimNames], tuple[str, ...]]
"""The mesh axes over which ZeRO shards a leaf of these sharded names, outermost first."""


@dataclasses.dataclass(frozen=True)
class ZeroPolicy:
    """Frequencies at which a step gathers weights over ZERO_AXES and scatters their gradients.

        stage   gather   scatter  of layers
        0       never    never    nothing is sharded; gradients are all-reduced once per step
        1       step     step
        2       step     layer    each layer's gradients as backward computes them
        3       layer    layer    in the loop over layers, each time that it runs; backward gathers again

    From stage 1 on the embedding and the head are gathered once per step, and scattered as often as layers.
    Breadth-first pipelines have `chunk` in place of `layer`: all microbatches run through one chunk of layers before
    the next, so a chunk is gathered once forward and once backward, and scattered once."""

    stage: int = 0
    gather_per: Frequency = "never"
    scatter_per: Frequency = "never"

    @classmethod
    def of_stage(cls, stage: int, *, reduce_once: bool = False, layers: int = 2, breadth_first: bool = False) -> Self:
        """reduce_once: gather and scatter once per step, whatever the stage.  layers: number with weights of their
        own.  breadth_first: whether a pipeline runs this schedule."""
        if stage == 0:
            return cls()
        if stage == 1 or reduce_once:
            return cls(stage, "step", "step")
        often: Frequency = "chunk" if breadth_first else "layer"
        # A single layer is gathered once: there is no next one to make room for.
        return cls(stage, often if stage == 3 and layers > 1 else "step", often)

    @property
    def gathers_on_use(self) -> bool:
        """True if layers are gathered each time that they, or their chunk, run; otherwise all are held."""
        return self.gather_per in ("chunk", "layer")

    @property
    def scatters_in_backward(self) -> bool:
        """True if gradients are scattered as backward computes them; otherwise at the end of the step, if at all."""
        return self.scatter_per in ("chunk", "layer")


def gathered_names(names: DimNames) -> DimNames:
    """The inverse of `sharded_names`."""
    return tuple(GATHERED.get(name or "", name) for name in names)


GATHERED = {sharded: name for name, sharded in [*ZERO_DIMS.items(), *EXPERT_ZERO_DIMS.items()]}


def zero_dim(names: DimNames) -> int | None:
    """The dimension that ZeRO shards in an array with these sharded names, or None."""
    return next((dim for dim, name in enumerate(names) if name in GATHERED), None)


def block_dim(names: DimNames) -> int:
    """The dimension along which a matrix of these sharded names is quantized: the last one that ZeRO does not shard."""
    return max(dim for dim in range(len(names)) if dim != zero_dim(names))


@jax.named_scope("weights")
def gather(
    tree: Tree,
    names: Tree,
    zero_axes: ZeroAxes,
    sizes: Mapping[str, int],
    *,
    codec: Codec | None = None,
    row_major_stacks: bool = False,
) -> Tree:
    """All-gathers shards over one axis after the other, innermost first.  names: the sharded dimension names of each
    leaf.  sizes: the sharded dimensions' unpadded sizes; {} where nothing is padded.

    codec: sends its codes and scales, but for arrays of matrices that are quantized already.  Every device decodes the
    same ones, those of its own shard too.

    row_major_stacks: lays stacks of layers out as loops read them.  A GPU gathers with the sharded dimension outermost
    and copies the stack for the loop; without this it keeps both until backward, whose first layer it runs ahead of the
    loop."""

    def all_gather(x: Array, axes: tuple[str, ...], at: int) -> Array:
        for axis in reversed(axes):
            x = lax.all_gather(x, axis, axis=at, tiled=True)
        return x

    def gather_leaf(path: tuple, names: DimNames, x: Array) -> Array:
        dim = zero_dim(names)
        if dim is None:
            return x
        at = 0 if dim == x.ndim - 1 else dim  # never the minor dimension in memory
        x = jnp.moveaxis(x, dim, at)
        axes = zero_axes(names)
        if codec and axes and not is_coded(path):
            coded = Coded(*(all_gather(each, axes, at) for each in codec.encode(x)))
            x = codec.decode(coded, x.shape[-1], x.dtype)
        else:
            x = all_gather(x, axes, at)
        x = jnp.moveaxis(lax.slice_in_dim(x, 0, sizes.get(str(names[dim])), axis=at), at, dim)
        return as_row_major(x) if row_major_stacks and names[0] == "layers" else x

    return jax.tree_util.tree_map_with_path(gather_leaf, names, tree, is_leaf=is_dim_names)


@jax.named_scope("gradients")
def scatter(
    tree: Tree,
    names: Tree,
    zero_axes: ZeroAxes,
    padded_shape: Callable[[DimNames, tuple[int, ...]], tuple[int, ...]],
    dtype: jnp.dtype,
    *,
    in_order: bool,
    codec: Codec | None = None,
    key: KeyWords | None = None,
) -> Tree:
    """Reduce-scatters unsharded gradients over ZeRO's axes, in `dtype`, onto each device's own shard; casts the others.
    padded_shape(names, shape): the shape to which a gradient [width, ...] is padded before it is sent.

    On a TPU a reduce-scatter compiles to a full all-reduce over one flat axis that spans several dimensions of the
    torus, along the minor dimension in memory, and of a large stack: hence axis by axis, along another dimension, and
    layer by layer.  Stacks of one length share a loop: a CPU runs independent loops at the same time, and collectives
    over the same devices meet in one rendezvous.

    in_order: make each scatter wait for the one before it, as a CPU needs (`after`).  Elsewhere that would expose them
    (docs/adr/0024).

    codec: sends its codes and scales in all-to-alls, and sums what they stand for in float32, or wider if `dtype` is.
    key: of its stochastic rounding; None rounds to the nearest."""

    def exchange(x: Array, axes: tuple[str, ...], key: KeyWords | None) -> Array:
        """The sum of x [width, ...] over these axes, one after the other, on this device's shard."""
        assert codec
        for hop, axis in enumerate(axes):
            devices = lax.axis_size(axis)
            coded = codec.encode(x, key and threefry(key, jnp.uint32(hop), jnp.uint32(1)))
            coded = Coded(*(lax.all_to_all(each, axis, 0, 0, tiled=True) for each in coded))
            addends = codec.decode(coded, x.shape[-1], jnp.promote_types(dtype, jnp.float32))
            x = addends.reshape(devices, -1, *x.shape[1:]).sum(0)
        return x.astype(dtype)

    def scatter_leaf(i: int, names: DimNames, g: Array) -> Array:
        dim = zero_dim(names)
        assert dim is not None, names
        g = jnp.moveaxis(g.astype(dtype), dim, 0)
        padding = [(0, to - size) for size, to in zip(g.shape, padded_shape(names, g.shape), strict=True)]
        padded, axes = jnp.pad(g, padding), zero_axes(names)
        if codec:
            shard = exchange(padded, axes, key and threefry(key, jnp.uint32(i), jnp.uint32(0)))
        else:
            shard = reduce_scatter(padded, axes, 0, row_major=True)
        return jnp.moveaxis(shard[..., : g.shape[-1]], 0, dim)

    leaf_names = jax.tree.leaves(names, is_leaf=is_dim_names)
    leaves, treedef = jax.tree.flatten(tree)
    sharded = [i for i, each in enumerate(leaf_names) if zero_axes(each)]
    stacks = [i for i in sharded if leaf_names[i][0] == "layers"]
    last: Array | None = None

    def scatter_layer(alike: list[int], layer: list[Array]) -> list[Array]:
        return [scatter_leaf(i, leaf_names[i][1:], g) for i, g in zip(alike, layer, strict=True)]

    # Stacks of the layers of a truncated last period have one entry more.
    for layers in dict.fromkeys(leaves[i].shape[0] for i in stacks):
        alike = [i for i in stacks if leaves[i].shape[0] == layers]
        first, *others = (leaves[i] for i in alike)
        grads = [after(last, first) if in_order else first, *others]
        for i, g in zip(alike, map_over_layers(functools.partial(scatter_layer, alike), grads), strict=True):
            leaves[i] = last = g
    for i, each in enumerate(leaf_names):
        if i not in sharded:
            leaves[i] = leaves[i].astype(dtype)
        elif i not in stacks:
            g = leaves[i].astype(dtype)
            leaves[i] = last = scatter_leaf(i, each, after(last, g) if in_order else g)
    return jax.tree.unflatten(treedef, leaves)


def with_gathered_weights(
    f: Callable,
    gather: Callable[[Tree], Tree],
    scatter: Callable[..., Tree],
    *,
    prevent_cse: bool = False,
    scatter_first: bool = False,
    differentiate_x: bool = True,
) -> Callable:
    """run(grad_dummies, shards, gathered, x, *extra, key=None) = f(weights, x, *extra).

    The weights are `gathered`; where that is None they are gathered from `shards`, and again in backward: of the
    weights only the shards are saved, and of f's other residuals those that its own remat saves.  Backward scatters the
    weights' gradients.  A custom_vjp must return these as gradients of an argument: hence the dummies `grad_dummies`,
    zeros with the shapes of the trained shards, in `scatter`'s dtype, never read.  `shards` and `gathered`
    have no gradients.  differentiate_x: whether x has one: jax does not tell a custom_vjp if it is used.  prevent_cse:
    keep XLA from merging the second gather with the first, which would hold the weights in between.  It does not merge
    across the loops of a scan, where the barrier would only cost memory.  scatter_first: scatter before backward
    continues, so that no unsharded gradient is held meanwhile.  key: passed on to `scatter`; backward could not close
    over it."""

    @jax.custom_vjp
    def run_with_key(key, grad_dummies, shards, gathered, x, *extra):
        return f(gather(shards) if gathered is None else gathered, x, *extra)

    def forward(key, grad_dummies, shards, gathered, x, *extra):
        weights = gather(shards) if gathered is None else gathered
        trained = subset_of(weights, grad_dummies)
        if differentiate_x:
            out, vjp = jax.vjp(lambda trained, x: f(merge(weights, trained), x, *extra), trained, x)
        else:
            out, vjp = jax.vjp(lambda trained: f(merge(weights, trained), x, *extra), trained)
        residuals, rebuild = drop_residuals(vjp, weights)
        return out, (key, shards, gathered, residuals, rebuild, (None,) * len(extra))

    def backward(saved, g):
        key, shards, weights, residuals, rebuild, d_extra = saved
        if weights is None:
            shards, g = run_again(shards, g) if prevent_cse else (shards, g)
            weights = gather(shards)
        d_weights, *rest = rebuild(residuals, weights)(g)
        d_x = rest[0] if differentiate_x else None
        d_dummies = scatter(d_weights) if key is None else scatter(d_weights, key=key)
        d_dummies, d_x = scattered_before(d_dummies, d_x) if scatter_first else (d_dummies, d_x)
        return None, d_dummies, None, None, d_x, *d_extra

    run_with_key.defvjp(forward, backward)

    def run(grad_dummies, shards, gathered, x, *extra, key=None):
        return run_with_key(key, grad_dummies, shards, gathered, x, *extra)

    return run
