"""One gated MLP on the residual stream, with gradients, and its collectives inserted in three ways.

    python benchmarks/inserted.py [TOPOLOGY ...]       default: v5p:4x4x4 h100:2x8 cpu:8

types: a plain jit over a mesh of Explicit axes; f and g (arXiv:1909.08053, section 3) are reshards to *reduced* and
from *unreduced* values.  constraints: a plain jit over a mesh of Auto axes, with with_sharding_constraint in place of f
and g.  written out: a shard_map, and psum.  Each is compiled, and its collectives are read from the program; theory has
two all-reduces of the stream over `model`, and one sum of each gradient over `data`."""

import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")  # without it, collectives of simulated devices deadlock on two cores
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from spmd_lm.analysis.compiled_collectives import collective_instructions
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.topology import parse_topology
from spmd_lm.ops.collectives import reduce_scatter

BATCH, TIME, WIDTH, MODEL, LAYERS, RATE = 64, 128, 512, 4, 2, 0.1
Layer = tuple[Array, ...]  # gate and up [width, 4 width], down [4 width, width], the norm's scale [width]
SPECS = (P(None, None, "model"), P(None, None, "model"), P(None, "model", None), P(None, None))


WHOLE, SHARDED = P("data", None, None), P("data", "model", None)
"""The stream, and the stream with its sequence sharded (arXiv:2205.05198, section 4.2.2)."""


def norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale


def dropped(x: Array, layer: Array) -> Array:
    """Dropout whose mask is a hash of an entry's index: the quality of its draws does not matter here."""
    row, column = (lax.broadcasted_iota(jnp.uint32, x.shape[1:], d) for d in (0, 1))
    bits = (row * jnp.uint32(2654435761) + column * jnp.uint32(40503) + layer.astype(jnp.uint32)) * jnp.uint32(
        2246822519
    )
    return jnp.where(bits >= jnp.uint32(RATE * 2**32), x / (1 - RATE), 0).astype(x.dtype)


def loss(branch: Callable[[Array, Layer, P], Array], stream: P, weights: Layer, x: Array) -> Array:
    """The mean square of the stream x [batch, time, width] after all layers."""

    def layer(x: Array, inputs: tuple[Layer, Array]) -> tuple[Array, None]:
        weights, i = inputs
        return x + dropped(branch(x, weights, stream), i), None

    x, _ = lax.scan(layer, x, (weights, jnp.arange(LAYERS)))
    return jnp.square(x.astype(jnp.float32)).sum() / (BATCH * TIME * WIDTH)


# ---- the branch, three times


def typed(x: Array, weights: Layer, stream: P) -> Array:
    *columns, down, scale = weights
    h = reshard(norm(x, scale), WHOLE.update(reduced={"model"}))
    gate, up = (jnp.einsum("btd,df->btf", h, w, out_sharding=P("data", None, "model")) for w in columns)
    y = jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, down, out_sharding=WHOLE.update(unreduced={"model"}))
    return reshard(y, stream)


def constrained(x: Array, weights: Layer, stream: P) -> Array:
    gate, up, down, scale = weights
    h = lax.with_sharding_constraint(norm(x, scale), WHOLE)
    return lax.with_sharding_constraint((jax.nn.silu(h @ gate) * (h @ up)) @ down, stream)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def f(x: Array, stream: P) -> Array:
    return x if stream == WHOLE else lax.all_gather(x, "model", axis=1, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def g(x: Array, stream: P) -> Array:
    return lax.psum(x, "model") if stream == WHOLE else reduce_scatter(x, ("model",), 1)


f.defvjp(lambda x, stream: (f(x, stream), None), lambda stream, _, d: (g(d, stream),))
g.defvjp(lambda x, stream: (g(x, stream), None), lambda stream, _, d: (f(d, stream),))


def written_out(x: Array, weights: Layer, stream: P) -> Array:
    gate, up, down, scale = weights
    h = f(norm(x, scale), stream)
    return g((jax.nn.silu(h @ gate) * (h @ up)) @ down, stream)


# ---- their steps: gradients of the weights


def step_of(way: str, stream: P) -> Callable:
    if way == "written out":
        # With the sequence sharded, a device saw only its part: gradients not sharded over `model` are summed over it.
        over_norm = ("data",) if stream == WHOLE else ("data", "model")

        def local_step(weights: Layer, x: Array) -> Layer:
            *matrices, scale = jax.grad(functools.partial(loss, written_out, stream))(weights, x)
            return (*lax.psum(matrices, "data"), lax.psum(scale, over_norm))

        return jax.shard_map(local_step, in_specs=(SPECS, stream), out_specs=SPECS, check_vma=False)
    return jax.grad(functools.partial(loss, typed if way == "types" else constrained, stream))


def census(way: str, stream: P, topology: str) -> Counter:
    """Number of arrays of more than a kilobyte that a device sends, by kind and mesh axes."""
    target = parse_topology(topology)
    axis_type = AxisType.Explicit if way == "types" else AxisType.Auto
    devices = np.array(target.devices()).reshape(-1, MODEL)
    mesh = Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)
    columns, rows = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
    shapes = (columns, columns, rows, (LAYERS, WIDTH))
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    weights = tuple(
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=sharding) for s, sharding in zip(shapes, shardings, strict=True)
    )
    x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, stream))
    with jax.set_mesh(mesh):
        step = jax.jit(step_of(way, stream), out_shardings=shardings)
        compiled = step.lower(weights, x).compile()
    sizes, found = dict(mesh.shape), Counter[tuple]()
    for c in collective_instructions(HloModule(compiled.as_text() or ""), target.size):
        if c.wire_bytes > 1024:
            found[c.kind, c.axes(sizes)] += c.num_arrays * round(c.count)
    return found


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)  # programs for absent hardware cannot be loaded
    print(f"| compiled for | sequence | written as | sends over model, in {LAYERS} layers | over data |")
    print("| --- | --- | --- | --- | --- |")
    for topology in sys.argv[1:] or ("v5p:4x4x4", "h100:2x8", "cpu:8"):
        for stream, way in itertools.product((WHOLE, SHARDED), ("types", "constraints", "written out")):
            found = census(way, stream, topology)
            activations, gradients = (
                ", ".join(f"{n} {kind}" for (kind, axes), n in sorted(found.items()) if ("model" in axes) == over_model)
                for over_model in (True, False)
            )
            print(
                f"| {topology} | {'sharded' if stream == SHARDED else 'whole'} | {way} | {activations} | {gradients} |"
            )


if __name__ == "__main__":
    main()
