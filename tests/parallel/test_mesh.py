import dataclasses
import itertools

import jax
import numpy as np
import pytest

from spmd_lm.cost_model.expected_collectives import expected_collectives
from spmd_lm.errors import LayoutError
from spmd_lm.parallel.mesh import (
    Layout,
    Rings,
    abstract_mesh,
    devices_per_host,
    domains_along,
    domains_of_model,
    host_rings,
    make_mesh,
)
from spmd_lm.resolve import abstract_plan, layout_on
from spmd_lm.runtime.formatting import format_bytes
from spmd_lm.step.program import Program
from tests.helpers import make_config


@dataclasses.dataclass(frozen=True)
class Device:
    process_index: int
    id: int
    platform: str = "gpu"
    device_kind: str = "none"
    local_hardware_id: int | None = None  # None: to be compiled for
    slice_index: int = 0


CLUSTER = [Device(host, 100 * host + i) for host in range(4) for i in range(4)]


@pytest.mark.parametrize("sizes", [d for d in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(d) == 8])
def test_every_device_is_used_once(sizes):
    mesh = make_mesh(Layout(replica=sizes[0], data=sizes[1], model=sizes[2]), jax.devices())
    assert mesh.axis_names == ("pipe", "replica", "data", "model") and mesh.devices.shape == (1, *sizes)
    assert sorted(d.id for d in mesh.devices.flat) == [d.id for d in jax.devices()]


def test_model_is_innermost_and_replicas_outermost():
    """Four hosts of four devices, told in any order."""
    shuffled = [CLUSTER[i] for i in np.random.default_rng(0).permutation(16)]
    devices = make_mesh(Layout(replica=2, data=2, model=4), shuffled).devices[0]
    hosts = np.vectorize(lambda d: d.process_index)(devices)
    assert hosts.tolist() == [[[0] * 4, [1] * 4], [[2] * 4, [3] * 4]]
    assert [d.id for d in devices.flat] == [d.id for d in CLUSTER]


def test_pipe_lies_between_model_and_data():
    devices = make_mesh(Layout(pipe=2, replica=2, data=2, model=2), CLUSTER).devices
    strides = {"model": devices[0, 0, 0, 1], "pipe": devices[1, 0, 0, 0], "data": devices[0, 0, 1, 0]}
    strides["replica"] = devices[0, 1, 0, 0]
    assert {axis: CLUSTER.index(d) for axis, d in strides.items()} == {"model": 1, "pipe": 2, "data": 4, "replica": 8}


PROCESS_PER_GPU = [Device(i, i, local_hardware_id=0, slice_index=i // 4) for i in range(16)]


@pytest.mark.parametrize("devices", [CLUSTER, PROCESS_PER_GPU], ids=["a process per host", "a process per GPU"])
@pytest.mark.parametrize(("model", "hosts"), [(1, 1), (4, 1), (8, 2), (16, 4)])
def test_the_hosts_that_model_spans_are_counted(devices, model, hosts):
    assert domains_of_model(make_mesh(Layout(data=16 // model, model=model), devices)) == hosts


def test_model_across_hosts_is_refused_with_its_cost():
    """8 of 16 devices on each of two hosts; each sends the collectives of 4 layers over `model`."""
    hosts = [Device(i // 8, i) for i in range(16)]
    parallel = {"data": 1, "model": 16}
    config = make_config(parallel=parallel, model={"heads": 16, "width": 64, "layers": 4})
    with pytest.raises(LayoutError) as refused:
        Program(config, hosts)
    sent = sum(row.bytes for row in expected_collectives(config, abstract_plan(config, 16, "gpu", "")))
    assert f"parallel.model=16 spans 2 hosts: of each step, every device would send {format_bytes(sent)}" in str(
        refused.value
    )
    assert "Use parallel.model=8, or parallel.model_across_hosts=true" in str(refused.value)
    allowed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"model_across_hosts": True})})
    assert Program(allowed, hosts).plan.layout.model == 16


def test_a_mesh_that_would_leave_devices_idle_is_not_made():
    with pytest.raises(AssertionError):
        make_mesh(Layout(data=3, model=2), jax.devices())


def test_data_takes_the_devices_that_are_left():
    config = make_config(parallel={"data": -1, "replica": 2, "model": 2})
    layout = layout_on(config, 8)
    assert layout == Layout(replica=2, data=2, model=2)
    assert (layout.devices, layout.batch_shards, str(layout)) == (8, 4, "pipe 1 x replica 2 x data 2 x model 2")
    assert abstract_mesh(layout).shape == layout.sizes


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"data": 3, "model": 2}, "makes 6 devices, but there are 8"),
        ({"data": -1, "model": 3}, "does not divide 8 devices"),
        ({"data": 8, "microbatches": 4}, "gives 4 sequences, not divisible by"),
    ],
)
def test_what_does_not_divide_is_refused(parallel, said):
    with pytest.raises(LayoutError, match=said):
        layout_on(make_config(parallel=parallel), 8)


@dataclasses.dataclass(frozen=True)
class TorusDevice(Device):
    coords: tuple[int, ...] = ()
    platform: str = "tpu"
    device_kind: str = "TPU v5"
    core_on_chip: int = 0


def on_torus(layout: Layout, *dims: int, slices: int = 1) -> dict[str, int]:
    """Sizes of the mesh's axes that have more than one device."""
    coords = [(*at, 0, 0)[:3] for at in itertools.product(*map(range, dims))]
    devices = [TorusDevice(s, i, coords=at, slice_index=s) for s in range(slices) for i, at in enumerate(coords)]
    mesh = make_mesh(layout, devices)
    assert {*mesh.devices.flat} == {*devices}
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def test_data_expert_and_context_are_two_axes_where_no_dimension_of_the_torus_holds_it():
    assert on_torus(Layout(data=4, model=4), 4, 4) == {"data": 4, "model": 4}
    assert on_torus(Layout(data=8, model=2), 4, 4) == {"data0": 2, "data1": 4, "model": 2}
    assert on_torus(Layout(data=64), 4, 4, 4) == {"data0": 16, "data1": 4}
    assert on_torus(Layout(data=8, expert=8), 4, 4, 4) == {"data0": 2, "data1": 4, "expert0": 2, "expert1": 4}
    assert on_torus(Layout(data=8, expert=2), 4, 4) == {"data0": 2, "data1": 4, "expert": 2}
    assert on_torus(Layout(expert=8), 2, 2, 2) == {"expert0": 4, "expert1": 2}
    assert on_torus(Layout(data=4, context=4), 4, 4) == {"data": 4, "context": 4}
    assert on_torus(Layout(context=8), 2, 2, 2) == {"context0": 4, "context1": 2}
    assert on_torus(Layout(data=2, context=4), 2, 2, 2) == {"data": 2, "context0": 2, "context1": 2}
    assert on_torus(Layout(data=96), 12, 8) == {"data0": 8, "data1": 12}  # the long ring is the inner one


def test_model_is_two_axes_where_it_is_a_whole_slice():
    assert on_torus(Layout(model=8), 2, 2, 2) == {"model0": 4, "model1": 2}
    assert on_torus(Layout(model=16), 4, 4) == {"model0": 4, "model1": 4}
    assert on_torus(Layout(replica=2, model=16), 4, 4, slices=2) == {"replica": 2, "model0": 4, "model1": 4}
    assert on_torus(Layout(data=2, model=8), 4, 4) == {"data": 2, "model": 8}
    assert on_torus(Layout(model=4), 4) == {"model": 4}  # a ring


@pytest.mark.parametrize("devices", [CLUSTER, PROCESS_PER_GPU], ids=["a process per host", "a process per GPU"])
@pytest.mark.parametrize(
    ("layout", "rings"),
    [
        (Layout(data=16), Rings(4, 4)),
        (Layout(data=8, model=2), Rings(4, 2)),
        (Layout(data=8, pipe=2), Rings(4, 2)),
        (Layout(replica=2, data=8), Rings(2, 4)),
        (Layout(replica=4, data=4), Rings(1, 4)),
        (Layout(data=4, model=4), Rings(4, 1)),
        (Layout(data=2, model=8), Rings(2, 1)),
    ],
    ids=str,
)
def test_data_is_split_at_the_border_of_hosts(devices, layout, rings):
    assert host_rings(layout, devices_per_host(devices)) == rings
    mesh = make_mesh(layout, devices, rings=rings)
    assert mesh.axis_names == ("pipe", "replica", "data0", "data1", "model")
    assert domains_along(mesh, ["data1"]) == 1 and domains_along(mesh, ["data0"]) == rings.hosts
    plain = make_mesh(layout, devices)
    assert [d.id for d in mesh.devices.flat] == [d.id for d in plain.devices.flat]
    assert abstract_mesh(layout, rings).shape == mesh.shape


def test_simulated_devices_are_halves_of_two_hosts():
    assert devices_per_host(jax.devices()) is None
    assert host_rings(Layout(data=6), None) == Rings(2, 3) and host_rings(Layout(data=3), None) == Rings(1, 3)


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("layout", "platform", "kind", "reason"),
    [
        ({"data": 8}, "gpu", H100, "all 8 devices of `data` are on one host: nothing is gathered across hosts"),
        ({"data": 2, "model": 8}, "gpu", H100, "all 2 devices of `data` are on hosts of their own"),
        ({"data": 8}, "tpu", "TPU v5", "on a TPU: the links of a slice join devices of all its hosts alike"),
        ({"data": 3}, "cpu", "cpu", "all 3 devices of `data` are on one host"),
    ],
)
def test_a_secondary_copy_needs_a_border_within_data(layout, platform, kind, reason):
    model = {"heads": 8, "width": 64}
    config = make_config(model=model, parallel=layout | {"zero": 3, "secondary": "within_host"}, train={"batch": 24})
    with pytest.raises(LayoutError) as error:
        abstract_plan(config, layout["data"] * layout.get("model", 1), platform, kind)
    assert reason in str(error.value) and "Use parallel.secondary=none." in str(error.value)
