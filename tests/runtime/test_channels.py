"""Collectives in flight at once, on simulated devices."""

import os
import re
import subprocess
import sys

import jax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.runtime.compiler_workarounds import number_channels
from tests.helpers import make_config, program

COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "data"),
    "pmax": lambda x: lax.pmax(x, "data"),
    "all_gather": lambda x: lax.all_gather(x, "data", tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
    "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
}


def channels(lowered: jax.stages.Lowered) -> list[int]:
    return [int(found) for found in re.findall(r"channel_handle<handle = (\d+)", lowered.as_text())]


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("check_vma", [False, True])
def test_equal_collectives_have_channels_of_their_own_on_cpus_alone(kind, check_vma):
    """Channels are numbered once, however often asked."""
    number_channels()
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def thrice(x):
        return [COLLECTIVES[kind](x * i).sum()[None] for i in range(3)]

    step = jax.shard_map(thrice, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    traced = jax.jit(step).trace(jax.ShapeDtypeStruct((64,), "float32"))
    assert len(set(channels(traced.lower()))) == len(channels(traced.lower())) == 3
    for platform in ("tpu", "cuda"):
        found = channels(traced.lower(lowering_platforms=(platform,)))
        assert found and set(found) == {1}


def test_a_pipeline_under_zero_3_has_no_channel_twice():
    """The program is for CPUs; one for TPUs keeps channel 1."""
    parallel = {"pipe": 2, "data": 2, "microbatches": 2, "zero": 3}
    p = program(make_config(model={"layers": 4}, parallel=parallel))
    traced = p.train_step.trace(p.abstract_state(), p.abstract_batch())
    found = channels(traced.lower())
    assert len(found) == len(set(found)) > 10
    assert set(channels(traced.lower(lowering_platforms=("tpu",)))) == {1}


OVERTAKES = """
from spmd_lm.runtime.devices import simulate_devices
simulate_devices(4)
import jax, numpy as np
from jax import lax, numpy as jnp
from jax.sharding import PartitionSpec as P

def scatter(x):
    return lax.psum_scatter(x, "data", tiled=True)

def step(x, other):
    looped = lax.fori_loop(0, 20, lambda i, x: jnp.repeat(scatter(jnp.sin(x)), 4, 0), x)
    return looped, [scatter(other + i) for i in range(20)]

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False))
x = np.arange(256 * 256, dtype=np.float32).reshape(256, 256) / 256
for _ in range(10):
    for i, got in enumerate(step(x, x)[1]):
        np.testing.assert_array_equal(got, (x + i) * 4)
"""


def test_scatters_that_overtake_those_of_a_loop_do_not_meet_them():
    """The process would end if they met.  The program is large enough that XLA runs operations side by side."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", OVERTAKES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if not line.lstrip().startswith("@")][-5:]
