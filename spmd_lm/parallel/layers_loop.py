"""A stack of layers, forward and backward: in one loop, or unrolled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.parallel.residuals import drop_residuals

Tree = Any


def run_layers(
    block: Callable, stack: Tree, x: jax.Array, scan: bool, *, shared: int = 1, group: int = 1
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """x through block(layer_params, x, layer) for each layer of `stack`; the layers' auxiliary losses, summed.

    shared: of how many layers the one of the stack is the weights.  group: of so many layers backward finds the first
    one's input alone, and runs them again."""
    if shared > 1:
        alone = jax.tree.map(lambda w: lax.squeeze(w, (0,)), stack)
        again = lambda _, x, i: block(alone, x, i)  # noqa: E731
        return run_layers(again, jnp.zeros((shared, 0)), x, scan, group=group)
    if group > 1:
        some = lambda layers, x, i: _run_group(block, layers, x, i, scan)  # noqa: E731
        return run_layers(jax.checkpoint(some, prevent_cse=not scan), _grouped(stack, group), x, scan)
    x, losses = _loop(lambda x, layer: block(layer[0], x, layer[1]), x, _each(stack, scan), scan)
    return x, _summed(losses, scan)


def _grouped(stack: Tree, group: int) -> Tree:
    """[layers, ...] as [groups, layers of each, ...]."""
    return jax.tree.map(lambda w: w.reshape(w.shape[0] // group, group, *w.shape[1:]), stack)


def _run_group(block: Callable, layers: Tree, x: jax.Array, i: jax.Array, scan: bool):
    """x through group i of a grouped stack."""
    first = i * jax.tree.leaves(layers)[0].shape[0]
    return run_layers(lambda layer, x, j: block(layer, x, first + j), layers, x, scan)


def pull_layers(
    block: Callable, source: Tree, rest: Tree, x: jax.Array, scan: bool, *, group: int = 1
) -> tuple[jax.Array, dict[str, jax.Array], Callable]:
    """What run_layers gives for block((source, rest), x, layer), and pull(d_x, total, at, fresh) -> (total, d_x).

    `pull` takes the gradient of the result, and 1 for that of the losses, to that of x, and adds those of `source` to
    `total`, from its entry `at` on, layer by layer as they are made: they are never all there beside it.  fresh: where
    it is true, what `total` held is forgotten."""
    if group > 1:
        some = lambda layers, x, i: _run_group(block, layers, x, i, scan)  # noqa: E731
        again = jax.checkpoint(some, prevent_cse=not scan)
        y, losses, pull_groups = pull_layers(again, _grouped(source, group), _grouped(rest, group), x, scan)

        def pull_grouped(d_y, total, at, fresh=None):
            new, d_x = pull_groups(d_y, _grouped(total, group), at // group, fresh)
            return jax.tree.map(lambda w, t: w.reshape(t.shape), new, total), d_x

        return y, losses, pull_grouped

    def forward(x, layer):
        (source, rest), i = layer
        (x, losses), pull = jax.vjp(lambda source, x: block((source, rest), x, i), source, x)
        return x, (losses, drop_residuals(pull, (source, rest)))

    def backward(carry, layer):
        (d_x, total, fresh), (((source, rest), _), (losses, (saved, rebuild)), at) = carry, layer
        d_source, d_x = rebuild(saved, (source, rest))((d_x, jax.tree.map(jnp.ones_like, losses)))

        def add(t, d):
            old = lax.dynamic_slice_in_dim(t, at, 1, 0)
            old = old if fresh is None else jnp.where(fresh, 0, old)
            return lax.dynamic_update_slice_in_dim(t, old + d.astype(t.dtype)[None], at, 0)

        return (d_x, jax.tree.map(add, total, d_source), fresh), None

    layers = _each((source, rest), scan)
    y, made = _loop(forward, x, layers, scan)

    def pull(
        d_y: jax.Array, total: Tree, at: jax.Array | int, fresh: jax.Array | None = None
    ) -> tuple[Tree, jax.Array]:
        places = at + jnp.arange(jax.tree.leaves(source)[0].shape[0], dtype=jnp.int32)
        every = (layers, made, places) if scan else list(zip(layers, made, places, strict=True))
        (d_x, total, _), _ = _loop(backward, (d_y, total, fresh), every, scan, reverse=True)
        return total, d_x

    return y, _summed(made[0] if scan else [losses for losses, _ in made], scan), pull


def _each(stack: Tree, scan: bool) -> Any:
    """The layers of a stack and their numbers, as `_loop` takes them.

    Unrolled: by one split per leaf, because its transpose is one concatenation."""
    leaves, treedef = jax.tree.flatten(stack)
    if scan:
        return stack, jnp.arange(leaves[0].shape[0], dtype=jnp.int32)
    split = [[part[0] for part in lax.split(leaf, (1,) * leaf.shape[0])] for leaf in leaves]
    return [(jax.tree.unflatten(treedef, layer), jnp.int32(i)) for i, layer in enumerate(zip(*split, strict=True))]


def _loop(step: Callable, carry: Tree, layers: Any, scan: bool, reverse: bool = False) -> tuple[Tree, Any]:
    """lax.scan of `layers`; or the same unrolled over a list of them, which makes a list."""
    if scan:
        return lax.scan(step, carry, layers, reverse=reverse)
    made = []
    for layer in reversed(layers) if reverse else layers:
        carry, y = step(carry, layer)
        made.append(y)
    return carry, made[::-1] if reverse else made


def _summed(losses: Any, scan: bool) -> dict[str, jax.Array]:
    if scan:
        return jax.tree.map(lambda loss: loss.sum(0), losses)
    return jax.tree.map(lambda *losses: sum(losses), *losses)
