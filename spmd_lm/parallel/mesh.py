"""From a layout to a mesh: every device used, the model axis inside a host, replicas outermost.

A layout resolves on an abstract mesh, so that plans cost no device; real devices bind last."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmd_lm.axes import DATA, MESH_AXES, MODEL, PIPE, REPLICA
from spmd_lm.config.checks import check_devices
from spmd_lm.config.schema import RunConfig
from spmd_lm.errors import LayoutError

OUTERMOST_FIRST = (REPLICA, DATA, PIPE, MODEL)
"""Neighbouring devices are fastest: model speaks most, then pipe, then data, then replica."""


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


def make_mesh(layout: Layout, devices: list[jax.Device]) -> Mesh:
    """A mesh of all `devices`, whose number must be the layout's."""
    assert layout.devices == len(devices), (layout, len(devices))
    shape = [layout.sizes[axis] for axis in OUTERMOST_FIRST]
    if devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        array = mesh_utils.create_device_mesh(shape, devices)  # axes along the torus
    else:
        array = np.array(sorted(devices, key=lambda d: (d.process_index, d.id))).reshape(shape)
    order = [OUTERMOST_FIRST.index(axis) for axis in MESH_AXES]
    return Mesh(array.transpose(order), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
