"""Shards of arrays, by their bounds."""

import jax

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a part of an array, in each dimension."""


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Bounds of the part at this index, as in jax.Shard.index."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def local_bounds(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[jax.Device, Bounds]:
    """Bounds of the shard of each device of this process."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: bounds_of(index or (), shape) for device, index in indices.items()}
