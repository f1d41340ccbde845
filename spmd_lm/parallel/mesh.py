"""Meshes of layouts: every device is used, the model axis is innermost, replicas outermost.

A layout resolves on an abstract mesh, so that plans cost no device; real devices bind last."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmd_lm.axes import (
    BATCH_AXES,
    MESH_AXES,
    MODEL,
    OPTIONAL_AXES,
    OUTERMOST_FIRST,
    ZERO_AXES,
    devices_along,
    mesh_axes_of,
)
from spmd_lm.errors import LayoutError


@dataclasses.dataclass(frozen=True)
class Layout:
    """Number of devices along each mesh axis."""

    pipe: int = 1
    replica: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1
    model: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Those of the axes of its mesh."""
        degrees = {axis: getattr(self, axis) for axis in MESH_AXES}
        return {axis: size for axis, size in degrees.items() if size > 1 or axis not in OPTIONAL_AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        return devices_along(BATCH_AXES, self.sizes)

    @property
    def zero_shards(self) -> int:
        """Number of shards that ZeRO makes of parameters that all tokens use."""
        return devices_along(ZERO_AXES, self.sizes)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())


class Rings(NamedTuple):
    """`data` as two axes at the border of hosts: data0, devices on several hosts, and data1, devices of one host."""

    hosts: int
    within: int


def host_rings(layout: Layout, devices_per_host: int | None) -> Rings:
    """The rings of `data`; one of them has one device where the border of a host divides no group of data.

    devices_per_host: None for simulated devices, of which each half of a group stands for a host."""
    if devices_per_host is None:
        return Rings(2, layout.data // 2) if layout.data % 2 == 0 else Rings(1, layout.data)
    near, rest = divmod(devices_per_host, layout.pipe * layout.expert * layout.context * layout.model)
    within = math.gcd(layout.data, near) if near and not rest else 1
    return Rings(layout.data // within, within)


def devices_per_host(devices: Sequence[Any]) -> int | None:
    """None for the simulated devices of one process."""
    hosts = {device.process_index if device.platform == "cpu" else _domain(device) for device in devices}
    return None if devices[0].platform == "cpu" and len(hosts) == 1 else len(devices) // len(hosts)


def abstract_mesh(layout: Layout, rings: Rings | None = None) -> AbstractMesh:
    """rings: those into which `data` is split, or None."""
    sizes = _axis_sizes(layout, **({"data": tuple(rings)} if rings else {}))
    names = _axis_names(sizes)
    axes = [name for axis in sizes for name in names[axis]]
    lengths = tuple(size for axis in sizes for size in sizes[axis])
    return AbstractMesh(lengths, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def make_mesh(
    layout: Layout, devices: list[jax.Device], *, model_across_hosts: bool = False, rings: Rings | None = None
) -> Mesh:
    """A mesh of all `devices`, whose number must be the layout's.  model_across_hosts: any axis may span TPU slices.
    rings: those into which `data` is split, or None.

    On a TPU `data` may become two axes, data0 and data1, each along dimensions of the torus, and `model` model0 and
    model1: over one flat axis that spans several, its compiler makes full all-reduces of gathers and scatters."""
    assert layout.devices == len(devices), (layout, len(devices))
    if devices[0].platform == "tpu":
        sizes, array = _on_torus(layout, devices, model_across_hosts)
    else:
        sizes = _axis_sizes(layout, **({"data": tuple(rings)} if rings else {}))
        array = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)))
    names = _axis_names(sizes)
    outermost_first = [name for axis in _outermost_first(sizes) for name in names[axis]]
    in_mesh_order = [name for axis in sizes for name in names[axis]]
    array = array.reshape(_mesh_shape(sizes)).transpose([outermost_first.index(name) for name in in_mesh_order])
    return Mesh(array, in_mesh_order, axis_types=(AxisType.Auto,) * len(in_mesh_order))


_AxisSizes = Mapping[str, tuple[int, ...]]
"""Sizes of the mesh axes that make up each axis of a layout, outermost first; in the order of MESH_AXES."""


def _axis_sizes(layout: Layout, **split: tuple[int, ...]) -> _AxisSizes:
    return {axis: (size,) for axis, size in layout.sizes.items()} | split


def _axis_names(sizes: _AxisSizes) -> dict[str, list[str]]:
    """The mesh axes that make up each axis of a layout, outermost first."""
    return {axis: [axis] if len(on) == 1 else [f"{axis}{i}" for i in range(len(on))] for axis, on in sizes.items()}


def _mesh_shape(sizes: _AxisSizes) -> tuple[int, ...]:
    """Shape of the mesh with its axes in the order of OUTERMOST_FIRST."""
    return tuple(size for axis in _outermost_first(sizes) for size in sizes[axis])


def _outermost_first(sizes: _AxisSizes) -> list[str]:
    """The axes of the mesh, in the order of OUTERMOST_FIRST."""
    return [axis for axis in OUTERMOST_FIRST if axis in sizes]


def domains_of_model(mesh: Mesh) -> int:
    """The most fast-link domains (GPU hosts, or TPU slices) that one group of devices along `model` spans."""
    return domains_along(mesh, mesh_axes_of(MODEL, mesh.axis_names))


def domains_along(mesh: Mesh, axes: Sequence[str]) -> int:
    """The most fast-link domains that one group of devices along these mesh axes spans."""
    last = range(-len(axes), 0)
    devices = np.moveaxis(mesh.devices, [mesh.axis_names.index(axis) for axis in axes], list(last))
    groups = devices.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    return max(len({_domain(device) for device in group}) for group in groups)


@functools.cache
def devices_within_domain(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], domain: int) -> int:
    """Number of devices of a group along these axes that share a fast-link domain; no device need exist.

    domain: devices per domain; 0 for no limit."""
    within, distance, sizes = 1, 1, mesh.shape
    for axis in reversed(OUTERMOST_FIRST):
        for name in reversed(mesh_axes_of(axis, sizes)):
            if name in axes:
                near = domain // distance if domain else sizes[name]
                within *= math.gcd(sizes[name], max(1, near))
            distance *= sizes[name]
    return within


def peers_across_slices(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Groups of devices at the same place in each TPU slice, as positions in the mesh."""
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(_domain(device), []).append(position)
    return tuple(zip(*slices.values(), strict=True))


def require_replicas_between(slices: int, layout: Layout) -> None:
    """Raises LayoutError if any axis but `replica` spans TPU slices."""
    if layout.replica % slices:
        raise LayoutError(
            f"parallel.replica={layout.replica} is not a multiple of the {slices} slices, between which only replicas "
            f"can be. Use parallel.replica={slices}, or parallel.model_across_hosts=true, which is slower."
        )


def is_absent(device: Any) -> bool:
    """True for an accelerator that can be compiled for, but not run on."""
    return device.platform != "cpu" and getattr(device, "local_hardware_id", None) is None


def _domain(device: Any) -> int:
    if device.platform == "gpu" and is_absent(device):
        return device.process_index  # a process has one host
    return getattr(device, "slice_index", 0) or 0


def _on_torus(layout: Layout, devices: list[jax.Device], across: bool) -> tuple[_AxisSizes, np.ndarray]:
    """(sizes, devices in the order of OUTERMOST_FIRST): the first candidate that fits the torus; else by id."""
    from jax.experimental import mesh_utils

    slices = len(set(map(_domain, devices)))
    if not across:
        require_replicas_between(slices, layout)
    for split, sizes in itertools.product((False, True), _sizes_on_torus(layout, devices, slices)):
        replicas, *shape = _mesh_shape(sizes)
        options: dict[str, Any] = {"allow_split_physical_axes": split}
        try:
            if slices == 1:
                return sizes, mesh_utils.create_device_mesh((replicas, *shape), devices, **options)
            within, between = (replicas // slices, *shape), (slices, *[1] * len(shape))
            return sizes, mesh_utils.create_hybrid_device_mesh(within, between, devices, **options)
        except (NotImplementedError, ValueError):
            continue  # no axis of this length lies along the torus
    return _axis_sizes(layout), np.array(sorted(devices, key=lambda d: (_domain(d), d.process_index, d.id)))


def _sizes_on_torus(layout: Layout, devices: list[jax.Device], slices: int) -> list[_AxisSizes]:
    """Candidates, best first: with `data`, `expert` and `context` as two axes where they are longer than any dimension
    of the torus, with `model` as two where it is all of a slice, because over one axis its reduce-scatter compiles to
    an all-reduce."""
    coords = np.array([d.coords for d in devices])
    torus = {int(n) for n in coords.max(0) - coords.min(0) + 1}
    flat = _axis_sizes(layout)
    if layout.model == len(devices) // slices:
        return [*(_axis_sizes(layout, model=pair) for pair in _pairs(layout.model, torus)), flat]
    lengths = {axis: _lengths(flat[axis][0], torus) for axis in ZERO_AXES if axis in flat}
    return [
        _axis_sizes(layout, **dict(zip(lengths, chosen, strict=True)))
        for chosen in itertools.product(*lengths.values())
    ]


def _lengths(size: int, torus: set[int]) -> list[tuple[int, ...]]:
    """Lengths of the mesh axes that may make up an axis of `size`, best first: one, or two where it is longer than any
    dimension of the torus."""
    one: list[tuple[int, ...]] = [(size,)]
    return [*one, *_pairs(size, torus)] if size <= max(torus) else [*_pairs(size, torus), *one]


def _pairs(size: int, torus: set[int]) -> list[tuple[int, int]]:
    """Lengths (outer, inner) of two rings with a product of `size`, best first; the inner is a torus dimension's.

    A long inner ring leaves little for the outer one to send; some compilers reject rings of odd length."""
    pairs = [(size // n, n) for n in torus if 1 < n < size and size % n == 0]
    return sorted(pairs, key=lambda pair: (any(n % 2 for n in pair), -pair[1]))
