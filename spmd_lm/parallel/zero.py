"""ZeRO (arXiv:1910.02054): what data parallelism would hold n times, held once, as one row and one pair.

The row: matrices and tables of what is kept between steps are cut along `width`, over `data`.  The pair: `gather` makes
weights whole, in the compute dtype, and `scatter` sums gradients onto the shards that own them.  The stage says where
the pair stands:

    0   nothing is cut; gradients are all-reduced once per step
    1   both once per step, around all the layers
    2   gather once per step; scatter each layer's gradients as backward makes them
    3   both for each layer, inside the loop over layers; backward gathers again

Vectors stay whole, and their gradients are all-reduced once per step: what gathering and scattering them would send."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm import axes
from spmd_lm.axes import DATA, Names, is_names
from spmd_lm.parallel.residuals import without

Tree = Any

CUT, SHARD = "width", "shard"
ROWS: dict[str, tuple[str, ...]] = {SHARD: (DATA,)}


def cut(names: Names) -> Names:
    """The names of a parameter as ZeRO keeps it.  A vector's are its own."""
    matrix = len([name for name in names if name != "layers"]) > 1
    return tuple(SHARD if name == CUT else name for name in names) if matrix else names


def _dimension(kept: Names) -> int | None:
    return kept.index(SHARD) if SHARD in kept else None


def _each(f: Callable, tree: Tree, kept: Tree) -> Tree:
    """f(leaf, names) of every leaf."""
    return jax.tree.map(lambda names, x: f(x, names), kept, tree, is_leaf=is_names)


def _off_lanes(x: jax.Array, dim: int) -> tuple[jax.Array, int]:
    """`x` with `dim` first if it was last, and where it is now."""
    return (jnp.moveaxis(x, dim, 0), 0) if dim == x.ndim - 1 else (x, dim)


@jax.named_scope("weights")
def gather(tree: Tree, kept: Tree, rings: tuple[str, ...], width: int) -> Tree:
    """Shards to whole leaves, one ring after the other, innermost first; `width` of each without its padding."""

    def leaf(x: jax.Array, names: Names) -> jax.Array:
        if (dim := _dimension(names)) is None:
            return x
        x, at = _off_lanes(x, dim)
        for ring in reversed(rings):
            x = lax.all_gather(x, ring, axis=at, tiled=True)
        return jnp.moveaxis(lax.slice_in_dim(x, 0, width, axis=at), at, dim)

    return _each(leaf, tree, kept)


@jax.named_scope("gradients")
def scatter(tree: Tree, kept: Tree, rings: tuple[str, ...], width: int) -> Tree:
    """Each device's whole gradients to the sum over `data` of the shard that it owns; `width`: padded.

    On a TPU a scatter compiles to a full all-reduce over one flat axis that spans several dimensions of the torus,
    along the last dimension in memory, and of a large stack: so it goes ring by ring, along another, and layer by
    layer."""

    def leaf(g: jax.Array, names: Names) -> jax.Array:
        if (dim := _dimension(names)) is None:
            return g
        if names[0] == "layers":
            return lax.map(lambda layer: leaf(layer, names[1:]), g)
        g, at = _off_lanes(g, dim)
        g = jnp.pad(g, [(0, width - g.shape[d] if d == at else 0) for d in range(g.ndim)])
        for ring in rings:
            g = axes.scatter(g, ring, at, pinned=True)
        return jnp.moveaxis(g, at, dim)

    return _each(leaf, tree, kept)


def fetching(
    f: Callable,
    gather: Callable[[Tree], Tree],
    scatter: Callable[[Tree], Tree],
    *,
    apart: bool = False,
    at_once: bool = False,
) -> Callable:
    """run(slots, shards, held, x, extra) = f(weights, x, *extra), whose gradient for the weights is scattered as it is
    made, and comes out as the gradient for `slots`: zeros of the shards' shapes and of `scatter`'s dtype.

    The weights are `held`, or gathered from `shards` where that is None: then backward gathers them again, and keeps of
    them nothing but the shards.  Everything else that backward needs is kept, as f's own remat says.  apart: keep the
    second gather from being merged with the first, which would hold the weights in between; a loop does that by itself,
    and takes less memory without.  at_once: scatter before backward goes on, so that nothing whole waits beside it."""

    @jax.custom_vjp
    def run(slots, shards, held, x, extra):
        return f(gather(shards) if held is None else held, x, *extra)

    def forward(slots, shards, held, x, extra):
        weights = gather(shards) if held is None else held
        out, pull = jax.vjp(lambda weights, x: f(weights, x, *extra), weights, x)
        saved, rebuild = without(pull, weights)
        return out, (shards, held, saved, rebuild)

    def backward(residuals, g):
        shards, held, saved, rebuild = residuals
        if held is None:
            shards, g = lax.optimization_barrier((shards, g)) if apart else (shards, g)
            held = gather(shards)
        d_weights, d_x = rebuild(saved, held)(g)
        d_slots = scatter(d_weights)
        d_slots, d_x = lax.optimization_barrier((d_slots, d_x)) if at_once else (d_slots, d_x)
        return d_slots, None, None, d_x, None

    run.defvjp(forward, backward)
    return run
