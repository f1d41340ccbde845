"""A stack of layers under ZeRO-3, each of which gathers weights for the next one while it runs.

A layer that gathers its own weights waits for those that it uses first.  Here these are prefetched while the layer
before it runs, forward and backward, and the rest is gathered while the prefetched ones compute.  Backward computes
their gradients last, and scatters them while the next layer runs.  Only some weights are prefetched, because a loop
copies what it carries from layer to layer.  The first and last layers are peeled: no gather is wasted."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.ops.collectives import zeros_like_gradient
from spmd_lm.ops.compiler_workarounds import run_again
from spmd_lm.parallel.compiler_workarounds import scan_into_allocated
from spmd_lm.parallel.layers_loop import Losses
from spmd_lm.parallel.trees import Tree, drop_residuals, merge, tree_add
from spmd_lm.period import BlockFn

Write = Callable[[Tree, Tree, Array | int], Tree]
"""write(stack, layer, i): the stack with a layer's gradients in its entry i, or added to it."""


class PrefetchSplit(NamedTuple):
    """A layer, or a stack of them, in two: what is prefetched, and the rest."""

    prefetched: Tree
    rest: Tree


class Saved(NamedTuple):
    """Residuals for backward, from `drop_residuals`: those of all layers but the last, stacked; and the last one's."""

    layers: tuple[Tree, Callable]
    last: tuple[Tree, Callable]


@dataclasses.dataclass(frozen=True)
class PrefetchedLayers:
    """block(weights, x, microbatch, index) -> (x, losses): a layer.  Stacks have at least two.
    gather: some of a layer's shards -> their weights.
    scatter: gradients of such weights, and a key unless that is None -> those of their shards.
    trained: selects the weights that have gradients.
    keys: entries of a layer, a dict, that are prefetched.
    allocated: whether residuals go into uninitialized arrays."""

    block: BlockFn
    gather: Callable[[Tree], Tree]
    scatter: Callable[..., Tree]
    trained: Callable[[Tree], Tree]
    keys: tuple[str, ...]
    allocated: bool = False

    def differentiable(self) -> Callable[..., tuple[Array, Losses]]:
        """run(key, grad_dummies, shards, x, microbatch, first_layer): like a loop over with_gathered_weights(block)."""

        @jax.custom_vjp
        def run(key, grad_dummies, shards, x, microbatch, first_layer):
            return self.forward(shards, x, microbatch, first_layer, save=False)[0]

        def forward(key, grad_dummies, shards, x, microbatch, first_layer):
            result, saved = self.forward(shards, x, microbatch, first_layer)
            return result, (key, grad_dummies, shards, saved)

        def backward(residuals, g):
            key, grad_dummies, shards, saved = residuals
            zeros = jax.tree.map(lambda x: zeros_like_gradient(x, x.dtype), grad_dummies)
            layers = (
                self if key is None else dataclasses.replace(self, scatter=functools.partial(self.scatter, key=key))
            )
            grads, d_x = layers.backward(shards, saved, g, zeros, set_layer)
            return None, grads, None, d_x, None, None

        run.defvjp(forward, backward)
        return run

    def vjp(self, shards: Tree, x: Array, microbatch: Tree, first_layer: Array | int) -> tuple[Array, Losses, Callable]:
        """See LayersLoop.vjp; there is no `overwrite`."""
        (y, losses), saved = self.forward(shards, x, microbatch, first_layer)
        assert saved

        def accumulate_grads(d_y: Array, grads: Tree, offset: Array | int) -> tuple[Tree, Array]:
            def add(stack: Tree, layer: Tree, i: Array | int) -> Tree:
                return set_layer(stack, tree_add(index_layer(stack, offset + i), layer), offset + i)

            return self.backward(shards, saved, (d_y, jax.tree.map(jnp.ones_like, losses)), grads, add)

        return y, losses, accumulate_grads

    def forward(
        self, shards: Tree, x: Array, microbatch: Tree, first_layer: Array | int, *, save: bool = True
    ) -> tuple[tuple[Array, Losses], Saved | None]:
        """((x after all layers, the sum of their losses), residuals for `backward` or, without `save`, None)."""
        stacks, last = self._split(shards), _layers(shards) - 1

        def layer(x: Array, prefetched: Tree, i: Array | int) -> tuple[Array, Losses, Any]:
            weights = prefetched | self.gather(index_layer(stacks.rest, i))

            def run(trained: Tree, x: Array) -> tuple[Array, Losses]:
                return self.block(merge(weights, trained), x, microbatch, first_layer + i)

            if not save:
                return *run({}, x), None
            (x, losses), vjp = jax.vjp(run, self.trained(weights), x)
            return x, losses, drop_residuals(vjp, weights)

        def turn(carry: tuple[Array, Tree], i: Array) -> tuple[tuple[Array, Tree], tuple[Losses, Any]]:
            x, prefetched = carry
            next_prefetched = self.gather(index_layer(stacks.prefetched, i + 1))
            x, losses, saved = layer(x, prefetched, i)
            return (x, next_prefetched), (losses, saved)

        start = x, self.gather(index_layer(stacks.prefetched, 0))
        indices = jnp.arange(last, dtype=jnp.int32)
        scan = scan_into_allocated if self.allocated else lax.scan
        (x, prefetched), (losses, saved) = scan(turn, start, indices)
        x, losses_of_last, saved_of_last = layer(x, prefetched, jnp.int32(last))
        losses = jax.tree.map(lambda a, b: a.sum(0) + b, losses, losses_of_last)
        return (x, losses), Saved(saved, saved_of_last) if save else None

    def backward(
        self, shards: Tree, saved: Saved, g: tuple[Array, Losses], grads: Tree, write: Write
    ) -> tuple[Tree, Array]:
        """(gradients of the shards, written into `grads`; gradient of x), given g, that of `forward`'s result."""
        # Gathers again the weights and activations that forward gathered outside of its loop.  Two barriers: one alone
        # exposes scatters on a TPU (benchmarks/overlap.py; docs/compilers.md).
        shards, (d_x, d_losses) = run_again(shards, g)
        (residuals, rebuild), (residuals_of_last, rebuild_last) = run_again(*saved)
        stacks, last = self._split(shards), _layers(shards) - 1

        def gather_prefetched(i: Array | int) -> Tree:
            return self.gather(index_layer(stacks.prefetched, i))

        def layer(d_x: Array, prefetched: Tree, i: Array | int, vjp: Callable) -> tuple[PrefetchSplit, Array]:
            """Gradients of the weights, unsharded if prefetched, otherwise scattered; and of the input."""
            d_weights, d_x = vjp(prefetched | self.gather(index_layer(stacks.rest, i)))((d_x, d_losses))
            d = self._split(d_weights)
            return d._replace(rest=self.scatter(d.rest)), d_x

        def saved_vjp(i: Array | int) -> Callable:
            return lambda weights: rebuild(index_layer(residuals, i), weights)

        def turn(carry: tuple, i: Array | int) -> tuple:
            d_x, prefetched, d_prefetched, grads = carry
            next_prefetched = gather_prefetched(i - 1)
            of_previous = write(grads.prefetched, self.scatter(d_prefetched), i + 1)
            d, d_x = layer(d_x, prefetched, i, saved_vjp(i))
            return (d_x, next_prefetched, d.prefetched, PrefetchSplit(of_previous, write(grads.rest, d.rest, i))), None

        prefetched, next_prefetched, into = gather_prefetched(last), gather_prefetched(last - 1), self._split(grads)
        d, d_x = layer(d_x, prefetched, last, lambda weights: rebuild_last(residuals_of_last, weights))
        carry = d_x, next_prefetched, d.prefetched, into._replace(rest=write(into.rest, d.rest, last))
        indices = jnp.arange(1, last, dtype=jnp.int32)
        (d_x, prefetched, d_prefetched, into), _ = lax.scan(turn, carry, indices, reverse=True)
        into = into._replace(prefetched=write(into.prefetched, self.scatter(d_prefetched), 1))
        d, d_x = layer(d_x, prefetched, 0, saved_vjp(0))
        return write(into.prefetched, self.scatter(d.prefetched), 0) | write(into.rest, d.rest, 0), d_x

    def _split(self, layers: Tree) -> PrefetchSplit:
        prefetched = {key: x for key, x in layers.items() if key in self.keys}
        return PrefetchSplit(prefetched, {key: x for key, x in layers.items() if key not in prefetched})


def _layers(stack: Tree) -> int:
    return jax.tree.leaves(stack)[0].shape[0]


def index_layer(stack: Tree, i: Array | int) -> Tree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), stack)


def set_layer(stack: Tree, layer: Tree, i: Array | int) -> Tree:
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), stack, layer)
