"""From a layout to a mesh: every device used, the model axis innermost, replicas outermost.

A layout resolves on an abstract mesh, so that plans cost no device; real devices bind last."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmd_lm.axes import DATA, MESH_AXES, MODEL, PIPE, REPLICA
from spmd_lm.config.layout_checks import check_devices
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import LayoutError

OUTERMOST_FIRST = (REPLICA, DATA, PIPE, MODEL)
"""Neighbouring devices are fastest: `model` is nearest, because its collectives are on the path of every layer."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many devices lie along each mesh axis."""

    pipe: int = 1
    replica: int = 1
    data: int = 1
    model: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def batch_shards(self) -> int:
        return self.replica * self.data

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())


def resolve(config: RunConfig, devices: int) -> Layout:
    """The layout that `config` asks for on `devices` devices.  LayoutError where something does not divide."""
    if problems := check_devices(config, devices):
        raise LayoutError(*problems)
    p = config.parallel
    data = devices // (p.pipe * p.replica * p.model) if p.data == -1 else p.data
    return Layout(p.pipe, p.replica, data, p.model)


def abstract_mesh(layout: Layout) -> AbstractMesh:
    return AbstractMesh(tuple(layout.sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def make_mesh(layout: Layout, devices: list[jax.Device], *, model_across_hosts: bool = False) -> Mesh:
    """A mesh of all `devices`, whose number must be the layout's.  model_across_hosts: any axis may span TPU slices.

    On a TPU `data` may become several axes, data0, data1, ..., each along dimensions of the torus: over one flat axis
    that spans several, its compiler makes full all-reduces of gathers and scatters."""
    assert layout.devices == len(devices), (layout, len(devices))
    data_shape: tuple[int, ...] = (layout.data,)
    if devices[0].platform == "tpu":
        data_shape, array = _on_torus(layout, devices, model_across_hosts)
    else:
        array = np.array(sorted(devices, key=lambda d: (d.process_index, d.id)))
    data = [f"{DATA}{i}" for i in range(len(data_shape))] if len(data_shape) > 1 else [DATA]
    outermost_first, names = (
        [name for axis in axes for name in (data if axis == DATA else [axis])] for axes in (OUTERMOST_FIRST, MESH_AXES)
    )
    array = array.reshape(_mesh_shape(layout, data_shape)).transpose([outermost_first.index(name) for name in names])
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _mesh_shape(layout: Layout, data_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the mesh with its axes in the order of OUTERMOST_FIRST."""
    return (layout.replica, *data_shape, layout.pipe, layout.model)


def domains_of_model(mesh: Mesh) -> int:
    """The most domains of fast links that one group of devices along `model` spans: hosts of GPUs, or TPU slices."""
    return domains_along(mesh, (MODEL,))


def domains_along(mesh: Mesh, axes: Sequence[str]) -> int:
    """The same for a group of devices along several axes."""
    last = range(-len(axes), 0)
    devices = np.moveaxis(mesh.devices, [mesh.axis_names.index(axis) for axis in axes], list(last))
    groups = devices.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))
    return max(len({_domain(device) for device in group}) for group in groups)


def devices_within_domain(sizes: Mapping[str, int], axes: Sequence[str], domain: int) -> int:
    """How many devices of a group along these axes share a domain of so many devices, where none need exist.

    sizes: of the mesh's axes.  domain: 0 for any number."""
    within, distance = 1, 1
    for axis in reversed(OUTERMOST_FIRST):
        for name in reversed([name for name in sizes if name.rstrip("0123456789") == axis]):
            if name in axes:
                near = domain // distance if domain else sizes[name]
                within *= math.gcd(sizes[name], max(1, near))
            distance *= sizes[name]
    return within


def peers_across_slices(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Groups of devices at the same place of each TPU slice, by their position in the mesh."""
    slices: dict[int, list[int]] = {}
    for position, device in enumerate(mesh.devices.flat):
        slices.setdefault(_domain(device), []).append(position)
    return tuple(zip(*slices.values(), strict=True))


def is_absent(device: Any) -> bool:
    """Whether this accelerator can be compiled for, not run on."""
    return device.platform != "cpu" and getattr(device, "local_hardware_id", None) is None


def _domain(device: Any) -> int:
    if device.platform == "gpu" and is_absent(device):
        return device.process_index  # a process has one host
    return getattr(device, "slice_index", 0) or 0


def _on_torus(layout: Layout, devices: list[jax.Device], across: bool) -> tuple[tuple[int, ...], np.ndarray]:
    """(shape of `data`, array of devices in the order of OUTERMOST_FIRST): the first shape that fits the torus."""
    from jax.experimental import mesh_utils

    slices = len(set(map(_domain, devices)))
    if layout.replica % slices and not across:
        raise LayoutError(
            f"parallel.replica={layout.replica} is not a multiple of the {slices} slices, between which only replicas "
            f"can be. Use parallel.replica={slices}, or parallel.model_across_hosts=true, which is slower."
        )
    for split, data_shape in itertools.product((False, True), _data_shapes(layout, devices)):
        replicas, *shape = _mesh_shape(layout, data_shape)
        options: dict[str, Any] = {"allow_split_physical_axes": split}
        try:
            if slices == 1:
                return data_shape, mesh_utils.create_device_mesh((replicas, *shape), devices, **options)
            within, between = (replicas // slices, *shape), (slices, *[1] * len(shape))
            return data_shape, mesh_utils.create_hybrid_device_mesh(within, between, devices, **options)
        except (NotImplementedError, ValueError):
            continue  # no axis of this length lies along the torus
    return (layout.data,), np.array(sorted(devices, key=lambda d: (_domain(d), d.process_index, d.id)))


def _data_shapes(layout: Layout, devices: list[jax.Device]) -> list[tuple[int, ...]]:
    """Shapes of `data`, the best first: two axes where it is longer than any dimension of the torus.

    A long inner ring leaves little for the outer one to send; some compilers refuse rings of 3, 5, ... devices."""
    corner = np.array([d.coords for d in devices])
    torus = {int(n) for n in corner.max(0) - corner.min(0) + 1 if n > 1}
    split = [(layout.data // n, n) for n in torus if n < layout.data and layout.data % n == 0]
    split.sort(key=lambda data_shape: (any(n % 2 for n in data_shape), -data_shape[1]))
    return [(layout.data,), *split] if layout.data <= max(torus, default=1) else [*split, (layout.data,)]
