"""Sizes that all of the cost model uses."""

import functools

import jax

from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.mesh import Layout
from spmd_lm.parallel.plan import Plan


@functools.cache
def dtype_bytes(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def wire_itemsize(dtype: str) -> float:
    """Bytes of an element on a wire, where two of int4 take one."""
    return 0.5 if dtype == "int4" else dtype_bytes(dtype)


@functools.cache
def at_least_float32(dtype: str) -> str:
    return jax.numpy.promote_types(dtype, "float32").name


def rows_per_device(config: RunConfig, layout: Layout) -> int:
    """Rows of one microbatch of which a device has tokens."""
    return config.train.batch // config.parallel.microbatches // layout.batch_shards


def tokens_per_device(config: RunConfig, layout: Layout) -> int:
    """Tokens of one microbatch on a device, between the linears of a branch."""
    return rows_per_device(config, layout) * config.model.context // layout.context


def stream_bytes(config: RunConfig, plan: Plan, dtype: str = "") -> int:
    """Bytes of one microbatch's residual stream on a device.  dtype: default the run's."""
    size = tokens_per_device(config, plan.layout) * config.model.width * dtype_bytes(dtype or config.precision.compute)
    return size // (plan.layout.model if plan.sequence else 1)


def shares_of_kinds(config: RunConfig) -> list[float]:
    """Share of the layers at each place of a period."""
    m = config.model
    return [m.layers_like(place) / m.layers for place in range(len(m.kinds))]
