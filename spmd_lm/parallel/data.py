"""Data parallelism: each group of devices along `model` sees its own rows, and gradients are summed once per step."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_lm import axes
from spmd_lm.axes import BATCH_AXES
from spmd_lm.parallel.plan import Plan


def reduce_gradients(plan: Plan, grads: Any, dtype: jnp.dtype) -> Any:
    """Sum `grads` over replica and data in `dtype`.

    Nested over `model`: a manual collective on a value that XLA has split over `model` would first gather it."""
    live = plan.live(*BATCH_AXES)
    grads = jax.tree.map(lambda g: g.astype(dtype), grads)
    if not live:
        return grads
    return axes.per_shard(lambda g: lax.psum(g, live), (plan.names,), plan.names)(grads)
