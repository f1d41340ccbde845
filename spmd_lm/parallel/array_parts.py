"""Parts of arrays in safetensors files, as bytes because safetensors lacks some of jax's dtypes.  A part's key is its
array's path and its bounds, as in 'params.head.table|0:64,32:64'."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spmd_lm.files import safetensors_header

Bounds = tuple[tuple[int, int], ...]
"""Start and stop of a part of an array, in each dimension."""


def header_of_parts(sizes: Mapping[str, int]) -> bytes:
    """The beginning of a file of parts, in this order.  sizes: bytes of each, by key."""
    ends = itertools.accumulate(sizes.values(), initial=0)
    entries = {
        key: {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        for (key, size), start in zip(sizes.items(), ends, strict=False)
    }
    return safetensors_header(entries)


class ShardReader:
    def __init__(self, files: list[Any]):
        self._parts: dict[str, dict[Bounds, Any]] = {}  # by the array's path: the file of each part
        for file in files:
            for key in file.keys():  # noqa: SIM118
                name, _, bounds = key.partition("|")
                self._parts.setdefault(name, {}).setdefault(_parse(bounds), file)

    def read(self, name: str, leaf: jax.ShapeDtypeStruct, index: tuple[slice, ...] | None) -> np.ndarray:
        """leaf[index].  Raises KeyError if an element is in no part."""
        wanted, parts = bounds_of(index or (), leaf.shape), self._parts.get(name, {})
        if wanted in parts:
            return self._read_part(name, wanted, leaf.dtype)
        result = np.empty(sizes_of(wanted), leaf.dtype)
        missing = np.ones(result.shape, bool)
        for part in parts:
            overlap = tuple((max(a, b), min(c, d)) for (a, c), (b, d) in zip(wanted, part, strict=True))
            if all(start < stop for start, stop in overlap):
                to = within(overlap, wanted)
                result[to] = self._read_part(name, part, leaf.dtype)[within(overlap, part)]
                missing[to] = False
        if missing.any():
            raise KeyError(f"{name}: some of {text_of(wanted)} is in no part")
        return result

    def _read_part(self, name: str, bounds: Bounds, dtype: Any) -> np.ndarray:
        file = self._parts[name][bounds]
        return file.get_tensor(part_key(name, bounds)).view(dtype).reshape(sizes_of(bounds))


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Bounds of the part at this index, as in jax.Shard.index."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def local_bounds(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[jax.Device, Bounds]:
    """Bounds of the shard of each device of this process."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: bounds_of(index or (), shape) for device, index in indices.items()}


def sizes_of(bounds: Bounds) -> list[int]:
    return [stop - start for start, stop in bounds]


def within(part: Bounds, other: Bounds) -> tuple[slice, ...]:
    """The position of `part` within `other`, which contains it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, other, strict=True))


def text_of(bounds: Bounds) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


def _parse(text: str) -> Bounds:
    pairs = [part.split(":") for part in text.split(",") if part]
    return tuple((int(start), int(stop)) for start, stop in pairs)


def part_key(name: str, bounds: Bounds) -> str:
    return f"{name}|{text_of(bounds)}"
