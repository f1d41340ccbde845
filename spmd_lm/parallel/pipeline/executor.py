"""Loss and gradients of one step: microbatches through the stack of layers, one after the other.

The model comes as three functions of plain dicts, so that nothing here knows what a layer is.  With one stage a
pipeline's microbatches are gradient accumulation: the gradients of each are added up in the parameters' own dtype and
reduced once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm.parallel.data import reduce_gradients
from spmd_lm.parallel.plan import Plan

Tree = Any


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A model as a pipeline runs it.  `part` is one microbatch, whatever it holds.

    embed(params, part) -> x; block(layer_params, x, part, layer) -> (x, losses); head(params, x, part) -> loss. Losses
    are already divided by the weight of the whole global batch: a sum over microbatches and devices is the mean."""

    embed: Callable[[Tree, Tree], jax.Array]
    block: Callable[[Tree, jax.Array, Tree, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
    head: Callable[[Tree, jax.Array, Tree], jax.Array]
    scan: bool = True


def _unstack(tree: Tree) -> list[Tree]:
    """The layers of a stack.  By one split per leaf, because its transpose is one concatenation."""
    leaves, treedef = jax.tree.flatten(tree)
    split = [[part[0] for part in lax.split(leaf, (1,) * leaf.shape[0])] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*split, strict=True)]


def run_layers(block: Callable, stack: Tree, x: jax.Array, scan: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """x through block(layer_params, x, layer) for each layer of `stack`; the layers' auxiliary losses, summed."""
    layers = jax.tree.leaves(stack)[0].shape[0]
    if scan:
        step = lambda x, layer: block(layer[0], x, layer[1])  # noqa: E731
        x, losses = lax.scan(step, x, (stack, jnp.arange(layers, dtype=jnp.int32)))
        return x, jax.tree.map(lambda loss: loss.sum(0), losses)
    each = []
    for layer, params in enumerate(_unstack(stack)):
        x, losses = block(params, x, layer)
        each.append(losses)
    return x, jax.tree.map(lambda *losses: sum(losses), *each)


def forward(pieces: Pieces, params: Tree, part: Tree) -> jax.Array:
    """The loss of one microbatch."""
    block = lambda layer_params, x, layer: pieces.block(layer_params, x, part, layer)  # noqa: E731
    x, losses = run_layers(block, params["blocks"], pieces.embed(params, part), pieces.scan)
    return sum(losses.values(), pieces.head(params, x, part))


def gradients(plan: Plan, pieces: Pieces, params: Tree, batch: Tree, *, compute, reduce) -> tuple[jax.Array, Tree]:
    """Mean loss of the global batch, and its gradients, reduced over data in dtype `reduce`, laid out as `params` are.

    batch: leaves [microbatches, rows here, ...].  compute: the dtype of the model's arithmetic."""
    low = jax.tree.map(lambda p: p.astype(compute), params)
    one = jax.value_and_grad(lambda low, part: forward(pieces, low, part))
    microbatches = jax.tree.leaves(batch)[0].shape[0]
    if microbatches == 1:
        loss, grads = one(low, jax.tree.map(lambda x: x[0], batch))
    else:

        def add(total, part):
            return jax.tree.map(lambda t, new: t + new.astype(t.dtype), total, one(low, part)), None

        zero = jnp.zeros((), jnp.promote_types(compute, jnp.float32)), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = lax.scan(add, zero, batch)
    return plan.batch_sum(loss), reduce_gradients(plan, grads, reduce)
