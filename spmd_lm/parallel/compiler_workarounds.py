"""Workarounds for XLA's compilers in loops, pipelines and ZeRO: symptom, compiler, remedy, and the test that sees it.

Seen with jax 0.10.2 to 0.12, unless a version is named; docs/compilers.md has the facts.  No value changes."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_lm.ops.compiler_workarounds import as_row_major
from spmd_lm.ops.sharding_types import is_explicit, manual_region
from spmd_lm.parallel.trees import Tree

Updated = TypeVar("Updated")
Leaves = dict[int, Array]


def scan_into_allocated(step: Callable, carry: Tree, xs: Tree, *, reverse: bool = False) -> tuple[Tree, Any]:
    """lax.scan(step, carry, xs, reverse=reverse), but not differentiable.

    lax.scan writes its outputs into zeros.  For GPUs XLA makes one array of zeros for all outputs of a shape, and
    copies it for each of them whenever the loop begins: a ninth of a GPU's memory traffic in a step of GPT-2 124M under
    ZeRO-3.  Here they are written into uninitialized arrays, but for those in the host's memory.
    tests/step/test_allocated_scan.py sees it; benchmarks/gpu_traffic.py sees the bytes."""
    treedef = None

    def step_of_leaves(carry: Tree, x: Tree) -> tuple[Tree, Leaves, Leaves]:
        """The carry, and the outputs, by their places, in the device's memory and in the host's."""
        nonlocal treedef
        carry, y = step(carry, x)
        leaves, treedef = jax.tree.flatten(y)
        host = {i: y for i, y in enumerate(leaves) if jax.typeof(y).memory_space == jax.memory.Space.Host}
        return carry, {i: y for i, y in enumerate(leaves) if i not in host}, host

    def turn(carry: tuple[Tree, Leaves], entry: tuple[Array, Tree]) -> tuple[tuple[Tree, Leaves], Leaves]:
        (inner, stacks), (i, x) = carry, entry
        inner, new, host = step_of_leaves(inner, x)
        return (inner, {at: lax.dynamic_update_index_in_dim(stacks[at], y, i, 0) for at, y in new.items()}), host

    length = jax.tree.leaves(xs)[0].shape[0]
    _, shapes, _ = jax.eval_shape(step_of_leaves, carry, jax.tree.map(lambda x: x[0], xs))
    stacks = {at: _allocate(length, y) for at, y in shapes.items()}
    (carry, stacks), host = lax.scan(turn, (carry, stacks), (jnp.arange(length, dtype=jnp.int32), xs), reverse=reverse)
    assert treedef is not None
    outputs = stacks | host
    return carry, jax.tree.unflatten(treedef, [outputs[at] for at in range(len(outputs))])


def _allocate(length: int, entry: jax.ShapeDtypeStruct) -> Array:
    """A stack of `length` entries, sharded as each of them is; uninitialized on a GPU or TPU, zeros on a CPU.

    Where arrays are global each device allocates its shard: XLA's partitioner would allocate the whole array on all
    devices, and slice it.  tests/step/test_allocated_scan.py sees that."""
    if not is_explicit():
        return lax.empty((length, *entry.shape), entry.dtype)
    spec, shard = P(*[None] * len(entry.shape)), entry.shape
    if isinstance(entry.sharding, NamedSharding):  # scalars have none
        spec, shard = entry.sharding.spec, entry.sharding.shard_shape(entry.shape)
    stacked = spec.update(partitions=(None, *spec.partitions))
    return manual_region(lambda: lax.empty((length, *shard), entry.dtype), stacked)()


def map_over_layers(f: Callable[[list[Array]], list[Array]], stacks: list[Array]) -> list[Array]:
    """lax.map(f, stacks), where each result fits into its argument.

    lax.map would write its results into zeros, which depend on nothing: a GPU's compiler then keeps them from the start
    of the step.  Here results are written into a slice of each stack.  tests/planning/test_audit.py sees the peak."""
    results = jax.eval_shape(f, [stack[0] for stack in stacks])
    layers = stacks[0].shape[0]
    slices = [
        lax.slice(stack, (0,) * stack.ndim, (layers, *result.shape)).astype(result.dtype)
        for stack, result in zip(stacks, results, strict=True)
    ]

    def write(i: Array, slices: list[Array]) -> list[Array]:
        layer = f([lax.dynamic_index_in_dim(stack, i, keepdims=False) for stack in stacks])
        return [lax.dynamic_update_index_in_dim(x, g, i, 0) for x, g in zip(slices, layer, strict=True)]

    return lax.fori_loop(0, layers, write, slices)


def after(first: Array | None, x: Array) -> Array:
    """x, once `first` is computed; NaN if the first entry of that is not finite: no compiler removes the dependence.

    On a CPU nothing else orders collectives in a loop and outside of it, over the same devices: they meet in one
    rendezvous, and XLA aborts (jaxlib 0.10.2: 4 of 5 runs of ZeRO-1 over 8 devices)."""
    return x if first is None else x + 0 * first[(0,) * first.ndim].astype(x.dtype)


def scattered_before(grads: Tree, d_x: Any) -> tuple[Tree, Any]:
    """Scattered gradients of weights, and the gradient of x that backward continues with.

    XLA would postpone scatters, and keep unsharded gradients in memory.  A barrier before the rest of backward prevents
    that.  tests/planning/test_audit.py sees the peak."""
    return lax.optimization_barrier((grads, d_x))


@jax.custom_vjp
def complete_gradient(w: Array) -> Array:
    """w, whose gradient is complete before anything reads it.

    A TPU's compiler would upcast all of it to add it to the sum over microbatches, because of a reshape in between.  A
    barrier prevents that (docs/compilers.md)."""
    return w


complete_gradient.defvjp(lambda w: (w, None), lambda _, d_w: (lax.optimization_barrier(d_w),))


def update_if(predicate: Array, update: Callable[[Updated], Updated], value: Updated) -> Updated:
    """lax.cond(predicate, update, lambda value: value, value), for large values.

    A GPU's compiler copies what goes through a conditional, in both branches and once more after it, but updates a
    loop's carry in place: hence a loop of one iteration or none."""

    def once(carry: tuple[Array, Updated]) -> tuple[Array, Updated]:
        return jnp.zeros_like(predicate), update(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (predicate, value))[1]


def as_loop_reads(stacks: Tree, platform: str) -> Tree:
    """Stacks of gradients; for a TPU, whose compiler would copy them, laid out as the loop that scatters reads them."""
    return jax.tree.map(as_row_major, stacks) if platform == "tpu" else stacks
