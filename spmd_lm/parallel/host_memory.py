"""Arrays in the pinned memory of their devices' hosts: no program computes with them there."""

from collections.abc import Callable

import jax

from spmd_lm.parallel.trees import Tree

PINNED, DEVICE = "pinned_host", "device"  # jax's names of memories


def moved(tree: Tree, memory: str) -> Tree:
    """Arrays in this memory of their devices; those that are already there are returned as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(memory)), tree)


def on_devices(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """f(x), computed in the devices' memory and returned in the memory that `x` is in."""
    memory = x.sharding.memory_kind
    return moved(f(moved(x, DEVICE)), memory) if memory == PINNED else f(x)
