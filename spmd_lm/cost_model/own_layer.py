"""What a layer of one's own costs, by tracing it: FLOPs, what it saves for backward, and what it sends.

A trace knows no compiler: what is saved is an upper bound, and of what is sent a compiler may merge or drop some."""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import is_spec
from spmd_lm.axes import MODEL, SEQUENCE, is_dim_names
from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER
from spmd_lm.models.language_model import LanguageModel, ModelInput
from spmd_lm.models.modules import modules_of_model
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree

KIND_OF_PRIMITIVE = {
    "psum": ALL_REDUCE,
    "psum_invariant": ALL_REDUCE,
    "pmax": ALL_REDUCE,
    "pmin": ALL_REDUCE,
    "all_gather": ALL_GATHER,
    "all_gather_invariant": ALL_GATHER,
    "all_to_all": ALL_TO_ALL,
    "reduce_scatter": REDUCE_SCATTER,
    "ppermute": COLLECTIVE_PERMUTE,
}
"""Kinds of collectives by jax's primitives."""


class LayerTrace(NamedTuple):
    """One row on one device without a mesh: FLOPs of the products (dot_general) of forward, and bytes that are saved if
    nothing is recomputed: of arrays as wide as the residual stream, and of others."""

    flops: float
    stream_bytes: float
    other_bytes: float


class Sent(NamedTuple):
    """Collectives of one layer, forward and backward: kind, mesh axes, dtype and elements, gathered or unreduced."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    elements: int


def has_own_block(config: RunConfig) -> bool:
    """Whether model.module names a block, and not a head alone."""
    return config.model.module is not None and modules_of_model(config.model, config.objective).own_block


def trace_layer(config: RunConfig, *, fused: bool) -> LayerTrace:
    """Costs of a layer of a model whose layers are all of one kind.  fused: whether a kernel computes attention, which
    saves no scores."""
    model = _model(config, RematPolicy("selective" if fused else "none"))
    return _trace_layer(model, config.precision.compute, _microbatch(config, 1), jax.config.read("jax_enable_x64"))


@functools.lru_cache(maxsize=64)  # a search asks for it with each of its layouts
def _trace_layer(model: LanguageModel, compute: str, batch: Batch, x64: bool) -> LayerTrace:
    dtype = jnp.dtype(compute)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], dtype), model.shapes["blocks"])
    x = jax.ShapeDtypeStruct((1, model.c.context, model.c.width), dtype)

    def forward(params: Tree, x: jax.Array, batch: Batch) -> jax.Array:
        return model.block(params, x, ModelInput(batch, None, jnp.float32(1)), 0)[0]

    def saved(params: Tree, x: jax.Array, batch: Batch) -> Any:
        return jax.vjp(lambda params, x: forward(params, x, batch), params, x)[1]

    jaxpr = jax.make_jaxpr(forward)(params, x, batch)
    flops = sum(times * _flops(equation) for equation, times in _equations(jaxpr.jaxpr))
    weights = Counter(leaf.shape for leaf in jax.tree.leaves(params))
    stream = other = 0
    for leaf in jax.tree.leaves(jax.eval_shape(saved, params, x, batch)):
        if weights[leaf.shape]:
            weights[leaf.shape] -= 1
        elif leaf.shape == x.shape:
            stream += leaf.size * leaf.dtype.itemsize
        else:
            other += leaf.size * leaf.dtype.itemsize
    return LayerTrace(flops, stream, other)


def sent_by_layer(config: RunConfig, plan: Plan, *, backward: bool) -> Counter[Sent]:
    """How often a layer sends each collective for one row on a device under `plan`, as the block's code has it.
    config: of a model whose layers are all of one kind.  backward: forward and backward, else forward alone."""
    sizes = tuple((axis, plan.sizes[axis]) for axis in plan.active_axes(MODEL))
    model, batch = _model(config, config.remat_policy), _microbatch(config, plan.layout.batch_shards)
    key = model, config.precision.compute, batch, sizes, plan.sequence, backward, jax.config.read("jax_enable_x64")
    if key not in _SENT:
        _SENT[key] = _sent_by_layer(model, jnp.dtype(config.precision.compute), batch, plan, backward)
    return _SENT[key]


_SENT: dict[Any, Counter[Sent]] = {}


def _sent_by_layer(model: LanguageModel, dtype: jnp.dtype, batch: Batch, plan: Plan, backward: bool) -> Counter[Sent]:
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], dtype), model.shapes["blocks"])
    specs = jax.tree.map(lambda names: plan.param_rules.spec(names[1:]), model.names["blocks"], is_leaf=is_dim_names)
    x = jax.ShapeDtypeStruct((*batch.tokens.shape, model.c.width), dtype)
    stream = P(plan.axis_rules.axes("batch"), plan.axis_rules.axes(SEQUENCE) or None)
    batch_specs = jax.tree.map(lambda spec: P(*spec[1:]), plan.batch_specs, is_leaf=is_spec)
    block = model.block_fns()[0]

    def layer(params: Tree, x: jax.Array, batch: Batch) -> Any:
        def forward(params: Tree, x: jax.Array) -> jax.Array:
            return block(params, x, ModelInput(batch, None, jnp.float32(1)), 0)[0]

        if not backward:
            return forward(params, x)
        out, vjp = jax.vjp(forward, params, x)
        return vjp(out)

    run = plan.shard_map(layer, (specs, stream, batch_specs), (specs, stream) if backward else stream)
    sent = Counter[Sent]()
    for equation, times in _equations(jax.make_jaxpr(run)(params, x, batch).jaxpr):
        if kind := KIND_OF_PRIMITIVE.get(equation.primitive.name):
            for row in _sent(kind, equation):
                sent[row] += times
    return sent


def _sent(kind: str, equation: Any) -> Iterator[Sent]:
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    arrays = equation.outvars if kind == ALL_GATHER else equation.invars
    for array in arrays:
        yield Sent(kind, axes, array.aval.dtype.name, math.prod(array.aval.shape))


def _model(config: RunConfig, remat: RematPolicy) -> LanguageModel:
    modules = modules_of_model(config.model, config.objective)
    return LanguageModel(config.model, config.objective, config.precision.params, ("xla",), remat, modules=modules)


def _microbatch(config: RunConfig, rows: int) -> Batch:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[2:]), x.dtype), abstract_batch(config))


def _equations(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """All equations, nested ones too, and how often each runs."""
    for equation in jaxpr.eqns:
        yield equation, 1
        times = equation.params.get("length", 1) if equation.primitive is lax.scan_p else 1
        for each in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield from ((nested, times * count) for nested, count in _equations(inner))


def _flops(equation: Any) -> float:
    """FLOPs of a dot_general, 2 for each multiply-add; 0 of anything else."""
    if equation.primitive is not lax.dot_general_p:
        return 0.0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2.0 * math.prod(out.shape) * math.prod(left.shape[dim] for dim in contracted)
