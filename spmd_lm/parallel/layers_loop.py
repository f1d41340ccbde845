"""A stack of layers, forward and backward: in one loop, or unrolled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_lm.parallel.compiler_workarounds import complete_gradient, scan_into_allocated
from spmd_lm.parallel.trees import Tree, drop_residuals
from spmd_lm.period import BlockFn

Losses = dict[str, Array]
Stacks = tuple[Tree, ...]
"""Trees of arrays [layers, ...]: the weights, or with_gathered_weights' first three arguments.  Unrolled, a stack of
matrices may be a list of them: see `unstack_matrices`."""


@dataclasses.dataclass(frozen=True)
class LayersLoop:
    """Runs a stack of layers.
    scan: in a lax.scan, otherwise unrolled.
    layers_per_weight: layers that share the weights of the one layer in the stack.
    layers_per_remat_block: layers per remat block; only the block's input is saved.
    allocated: whether residuals that `vjp` saves in a scan go into uninitialized arrays."""

    scan: bool = True
    layers_per_weight: int = 1
    layers_per_remat_block: int = 1
    allocated: bool = False

    @property
    def unstacks(self) -> bool:
        """True if matrices may come unstacked, so that no microbatch has to slice them out of stacks."""
        return not self.scan and self.layers_per_weight == self.layers_per_remat_block == 1

    def run(
        self, block: BlockFn, stacks: Stacks, x: Array, microbatch: Tree, first_layer: Array | int = 0
    ) -> tuple[Array, Losses]:
        """Runs x through all layers; returns it and the sum of their losses.  first_layer: index of the first layer, or
        of its period, among all of the model's."""
        if self.layers_per_weight > 1:
            block, stacks = self._share_weights(block, stacks)
        if self.layers_per_remat_block > 1:
            block, stacks, first_layer = self._remat_blocks(block, stacks, first_layer)

        def step(x: Array, layer: tuple[Stacks, Array]) -> tuple[Array, Losses]:
            layer_stacks, i = layer
            return block(*layer_stacks, x, microbatch, first_layer + i)

        x, losses = self._loop(step, x, self._layers(stacks))
        return x, self._sum(losses)

    def vjp(
        self, block: BlockFn, stacks: Stacks, x: Array, microbatch: Tree, first_layer: Array | int = 0
    ) -> tuple[Array, Losses, Callable]:
        """Returns what `run` does, and accumulate_grads(d_y, grads, offset, overwrite) -> (grads, d_x), for the first
        stack.

        accumulate_grads runs backward: from d_y, the gradient of the result (each loss has gradient 1), it returns d_x.
        It adds each layer's gradients to `grads`, from layer `offset` on, as they are computed, so that they never all
        exist at once.  overwrite: if true, overwrite instead.  Layers must not share weights: layout_checks refuses it
        in pipelines."""
        if self.layers_per_remat_block > 1:
            block, stacks, first_layer = self._remat_blocks(block, stacks, first_layer)

        def forward(x, layer):
            (grad_argument, *rest), i = layer
            (x, losses), vjp = jax.vjp(
                lambda grad_argument, x: block(grad_argument, *rest, x, microbatch, first_layer + i), grad_argument, x
            )
            return x, (losses, drop_residuals(vjp, (grad_argument, *rest)))

        def backward(carry, inputs):
            (d_x, grads, overwrite), ((layer, _), (losses, (residuals, rebuild)), entry) = carry, inputs
            d_layer, d_x = rebuild(residuals, layer)((d_x, jax.tree.map(jnp.ones_like, losses)))

            def add(total, d):
                old = lax.dynamic_slice_in_dim(total, entry, 1, 0)
                old = old if overwrite is None else jnp.where(overwrite, 0, old)
                return lax.dynamic_update_slice_in_dim(total, old + d.astype(total.dtype)[None], entry, 0)

            return (d_x, jax.tree.map(add, grads, d_layer), overwrite), None

        layers = self._layers(stacks)
        y, saved = self._loop(forward, x, layers, allocated=self.allocated)

        def accumulate_grads(d_y: Array, grads: Tree, offset: Array | int, overwrite: Array | None = None):
            start = offset // self.layers_per_remat_block if self.layers_per_remat_block > 1 else offset
            entries = start + jnp.arange(jax.tree.leaves(stacks)[0].shape[0], dtype=jnp.int32)
            inputs = (layers, saved, entries) if self.scan else list(zip(layers, saved, entries, strict=True))
            (d_x, new, _), _ = self._loop(backward, (d_y, self._group(grads), overwrite), inputs, reverse=True)
            return jax.tree.map(lambda new, old: new.reshape(old.shape), new, grads), d_x

        return y, self._sum(saved[0] if self.scan else [losses for losses, _ in saved]), accumulate_grads

    def _share_weights(self, block: BlockFn, stacks: Stacks) -> tuple[BlockFn, Stacks]:
        """A stack without weights, whose layers all use those of the one layer in `stacks`."""
        layer = jax.tree.map(lambda w: lax.squeeze(w, (0,)), stacks)

        def shared_block(_, x, microbatch, index):
            return block(*layer, x, microbatch, index)

        return shared_block, (jnp.zeros((self.layers_per_weight, 0)),)

    def _remat_blocks(self, block: BlockFn, stacks: Stacks, first_layer: Array | int) -> tuple[BlockFn, Stacks, int]:
        """A stack of remat blocks, each of which runs its layers again in backward."""
        inner = LayersLoop(self.scan)

        def remat_block(*inputs):
            *layers, x, microbatch, index = inputs
            return inner.run(block, tuple(layers), x, microbatch, first_layer + index * self.layers_per_remat_block)

        # CSE cannot undo remat inside a scan; unrolled it could, so prevent it.
        return jax.checkpoint(remat_block, prevent_cse=not self.scan), self._group(stacks), 0

    def _group(self, stacks: Tree) -> Tree:
        """[layers, ...] as [remat blocks, layers of each, ...]; unchanged without remat blocks."""
        if (size := self.layers_per_remat_block) == 1:
            return stacks
        return jax.tree.map(lambda w: complete_gradient(w).reshape(w.shape[0] // size, size, *w.shape[1:]), stacks)

    def _layers(self, stacks: Stacks) -> Any:
        """The layers of the stacks and their indices, as `_loop` takes them: stacked, or a list."""
        if self.scan:
            return stacks, jnp.arange(jax.tree.leaves(stacks)[0].shape[0], dtype=jnp.int32)
        leaves, treedef = jax.tree.flatten(stacks, is_leaf=_is_unstacked)
        layers = zip(*(leaf if _is_unstacked(leaf) else _split(leaf) for leaf in leaves), strict=True)
        return [(jax.tree.unflatten(treedef, layer), jnp.int32(i)) for i, layer in enumerate(layers)]

    def _loop(
        self, step: Callable, carry: Tree, layers: Any, *, reverse: bool = False, allocated: bool = False
    ) -> tuple[Tree, Any]:
        """lax.scan over stacked layers, whose outputs are stacked; or a loop over a list, whose outputs are a list."""
        if self.scan and not allocated:
            return lax.scan(step, carry, layers, reverse=reverse)
        if self.scan:
            return scan_into_allocated(step, carry, layers, reverse=reverse)
        outputs = []
        for layer in reversed(layers) if reverse else layers:
            carry, y = step(carry, layer)
            outputs.append(y)
        return carry, outputs[::-1] if reverse else outputs

    def _sum(self, losses: Any) -> Losses:
        """The sum over layers of what `_loop` collected."""
        if self.scan:
            return jax.tree.map(lambda loss: loss.sum(0), losses)
        return jax.tree.map(lambda *losses: sum(losses), *losses)


def unstack_matrices(stacks: Tree) -> Tree:
    """Splits each stack of matrices into a list.  Vectors stay stacked: apart they would take more kernels to sum."""
    return jax.tree.map(lambda stack: _split(stack) if stack.ndim > 2 else stack, stacks)


def stack_matrices(stacks: Tree) -> Tree:
    """The inverse of `unstack_matrices`; stacks unchanged."""
    return jax.tree.map(lambda x: _stack(x) if _is_unstacked(x) else x, stacks, is_leaf=_is_unstacked)


def _is_unstacked(x: Any) -> bool:
    return isinstance(x, list)


def _split(stack: Array) -> list[Array]:
    """Splits a stack into layers, in one operation, whose transpose is one concatenation."""
    return [part[0] for part in lax.split(stack, (1,) * stack.shape[0])]


def _stack(matrices: list[Array]) -> Array:
    """jnp.stack(matrices).  Under sharding types jnp.stack itself would sum gradients twice: jax 0.10.2 forgets that
    its operands are unreduced."""
    return lax.concatenate([matrix[None] for matrix in matrices], 0)
