"""The cost of one layer on one device, from its trace: forward, and backward under the run's remat policy.

Nothing here knows what a layer is made of: a user's own block is traced like any other."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import is_spec
from spmd_lm.adapters import adapters_of, coding_of
from spmd_lm.axes import CONTEXT, EXPERT, MODEL, SEQUENCE, TIME, is_dim_names
from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.adapters import CODED
from spmd_lm.config.attention_kernels import attention_block, choose_kernel
from spmd_lm.config.data_sections import packs_documents
from spmd_lm.config.expert_products import BUFFERS, choose_product
from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import Model, Objective, Precision, RunConfig
from spmd_lm.cost_model.dataflow import (
    KIND_OF_PRIMITIVE,
    PRODUCTS,
    VIEWS,
    Dataflow,
    Kernel,
    Operation,
    Value,
    equations,
    save_p,
)
from spmd_lm.cost_model.hardware import RATES
from spmd_lm.cost_model.kernels import Product
from spmd_lm.cost_model.sizes import shares_of_kinds
from spmd_lm.cost_model.wire import ALL_GATHER
from spmd_lm.models.context import local_batch
from spmd_lm.models.language_model import LanguageModel, ModelInput
from spmd_lm.models.modules import modules_of_model
from spmd_lm.models.transformer import RESIDUAL
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.ops.dropout import DropoutKey, as_one_operation
from spmd_lm.ops.eight_bits import EightBits
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree, drop_residuals, exclude, merge, subset_of

ATTENTION_PRODUCTS = {"fused_attention": 2, "fused_attention_vjp": 5}
"""Matmuls of a fused kernel, each as large as the scores'; backward recomputes the scores."""
OF_OPERATIONS = "xla", "chunked"
"""Attention kernels that are made of XLA's operations, and traced as such."""
PARAMS, X, GRADIENT, INDEX, BATCH = "parameters", "x", "gradient of y", "index of the layer", "batch"


class Sent(NamedTuple):
    """A collective of a layer.  elements: size of the gathered or unreduced array, for one row."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    elements: int


class TracedProduct(NamedTuple):
    """Matmuls for one row of a batch.

    per_row: the field of `product` that grows with the rows of a microbatch, if any does.
    times: how many there are."""

    product: Product
    per_row: str
    times: int = 1

    def of_rows(self, rows: float) -> Product:
        if not self.per_row:
            return self.product
        return self.product._replace(**{self.per_row: getattr(self.product, self.per_row) * rows})

    @property
    def of_experts(self) -> bool:
        """True for matmuls with a stack of matrices, or of their gradients; those of attention grow in their batch."""
        return self.product.batch > 1 and self.per_row in ("rows", "inner")


class Pass(NamedTuple):
    """Forward, or backward with its recomputation, of one row on one device.

    products: matmuls, except those of fused attention.
    attention_flops: FLOPs of fused attention, over scores that no mask or window hides.
    traffic: bytes that fused elementwise operations read and write, in loops each time.
    fusions: number of these.
    peak: most bytes of activations that it makes and holds at once.
    sent: how often it sends each collective, by the layer's code."""

    products: tuple[TracedProduct, ...]
    attention_flops: float
    traffic: float
    fusions: int
    peak: float
    sent: Counter[Sent]

    @property
    def product_flops(self) -> float:
        return sum(each.times * each.product.flops for each in self.products)


class LayerTrace(NamedTuple):
    """One layer, for one row of a batch on one device.

    saved: bytes that forward saves for backward and that grow with the rows.
    saved_once: saved bytes that do not."""

    forward: Pass
    backward: Pass
    saved: float
    saved_once: float = 0.0


def has_own_block(config: RunConfig) -> bool:
    """True if model.module names a block, not a head alone."""
    return config.model.module is not None and modules_of_model(config.model, config.objective).own_block


def trace_layers(
    config: RunConfig, plan: Plan | None, *, kernel: str | None = None, **options: Any
) -> list[tuple[RunConfig, float, LayerTrace]]:
    """For each layer of a period: (the run as if all layers were of its kind, its share of the layers, its cost).

    kernel: the attention kernel; default: the platform's choice.
    options: those of `trace_layer`."""
    traced = []
    for place, (of_kind, share) in enumerate(zip(config.of_each_kind, shares_of_kinds(config), strict=True)):
        one = kernel
        if one is None:
            assert plan
            one = choose_kernel(of_kind, plan.platform, plan.device_kind).kernel
        traced.append((of_kind, share, trace_layer(of_kind, plan, config.stack_path(place), kernel=one, **options)))
    return traced


def trace_layer(
    config: RunConfig,
    plan: Plan | None,
    stack: tuple[str, ...] = ("blocks",),
    *,
    kernel: str = "xla",
    dtype: str = "",
    remat: RematPolicy | None = None,
    sharded: bool = True,
    lanes: int = 1,
) -> LayerTrace:
    """The cost of a layer of a model whose layers are all of one kind, cached by what it depends on.

    plan: determines what is trained, and a device's shards; None for all, on one device.
    stack: the layers' path among the parameters of `plan`.
    kernel: the attention kernel; all fused ones are traced alike.
    dtype: the compute dtype; default the run's.
    remat: default the run's policy; of `block`, that of a layer within a remat block.
    sharded: whether the device has its shards of a layer, or all of it.
    lanes: the features of a head are padded to a multiple of it, in memory."""
    p, remat, gathers = config.precision, remat or config.remat_policy, False
    kernel = kernel if kernel in OF_OPERATIONS else "traced"
    key: Any = config.model, config.objective, config.adapter, packs_documents(config.data), p, dtype, kernel
    trains, of_shards = None, plan if sharded else None
    if plan is not None:
        trains = functools.partial(plan.trains, *stack)
        key = *key, stack, plan.freeze, plan.trainable
    if of_shards is not None:
        sizes = tuple((axis, of_shards.sizes[axis]) for axis in of_shards.active_axes(EXPERT, CONTEXT, MODEL))
        gathers = of_shards.sequence
        key = *key, of_shards.own_rules, of_shards.replicated, sizes, gathers, of_shards.ring
    grouped = plan is not None and choose_product(config, plan.platform).product != BUFFERS
    block = attention_block(plan.platform) if plan else AttentionSpec.block
    key = *key, grouped, block, jax.config.read("jax_enable_x64")
    if (trace := _TRACES.get((key, remat, lanes))) is None:
        inside = _policy_inside(remat, gathers=gathers)
        if (flow := _FLOWS.get((key, inside))) is None:
            _bound(_FLOWS)
            kernels = _Kernels(kernel, block, "traced" if grouped else BUFFERS)
            in_dtype = jnp.dtype(dtype or p.compute)
            flow = _FLOWS[key, inside] = _flow(config, of_shards, trains, in_dtype, kernels, inside)
        _bound(_TRACES)
        trace = _TRACES[key, remat, lanes] = flow.under(remat).cost(lanes)
    return trace


_TRACES: dict[Any, LayerTrace] = {}
_FLOWS: dict[Any, "_LayerFlow"] = {}
"""Caches: a search asks for the same entries with each of its layouts."""


def _bound(remembered: dict) -> None:
    if len(remembered) >= 512:
        remembered.clear()


def _policy_inside(remat: RematPolicy, *, gathers: bool) -> RematPolicy:
    """The policy with which a layer is traced: `selective` recomputes attention, `none` gathers sequences again, `full`
    neither; `_LayerFlow.under` recomputes whole layers."""
    if remat.recomputes_attention:
        return RematPolicy("selective")
    return RematPolicy("none" if gathers and not remat.recomputes_layer else "full")


class _LayerFlow(NamedTuple):
    """gradients: those of parameters, which do not count as activations.
    products_of_gradients: what they are casts and transposes of."""

    flow: Dataflow
    gradients: frozenset[Value]
    products_of_gradients: frozenset[Value]

    def under(self, remat: RematPolicy) -> "_LayerFlow":
        if not remat.recomputes_layer:
            return self
        return self._replace(flow=self.flow.recomputed(self.flow.named[RESIDUAL] if remat.saves_branch_sums else ()))

    def cost(self, lanes: int) -> LayerTrace:
        forward, backward = (_pass(self, backward, lanes) for backward in (False, True))
        return LayerTrace(forward, backward, *_saved(self.flow, lanes))


class _Kernels(NamedTuple):
    """What a layer is traced with: its attention kernel, AttentionSpec.block, and the product of its experts."""

    attention: str
    block: int
    products: str


@functools.lru_cache(maxsize=64)
def _model(
    model: Model, objective: Objective, adapter: Any, precision: Precision, kernels: _Kernels, remat: RematPolicy
) -> LanguageModel:
    traced = LanguageModel(
        model,
        objective,
        precision.params,
        (kernels.attention,),
        remat,
        modules=modules_of_model(model, objective),
        expert_products=(kernels.products,),
        attention_block=kernels.block,
    )
    adapters, base = adapters_of(adapter, traced), coding_of(adapter, precision)
    traced = dataclasses.replace(traced, adapters=adapters, base=base, fake_quant=precision.fake_quant)
    return traced if precision.matmul == "none" else dataclasses.replace(traced, eight_bits=EightBits(precision.matmul))


def _flow(
    config: RunConfig,
    plan: Plan | None,
    trains: Callable[..., bool] | None,
    dtype: jnp.dtype,
    kernels: _Kernels,
    remat: RematPolicy,
) -> _LayerFlow:
    """plan: determines the shards.  trains: whether a parameter is trained, by its path in a layer; None for all.
    kernels: those of attention and of experts."""
    model = _model(config.model, config.objective, config.adapter, config.precision, kernels, remat)
    names = jax.tree.map(lambda names: names[1:], model.names["blocks"], is_leaf=is_dim_names)

    def of_layer(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype if path[-1].key in CODED else dtype)

    params = jax.tree_util.tree_map_with_path(of_layer, model.shapes["blocks"])
    trained = params if trains is None else _trained(params, trains)
    rows = plan.layout.batch_shards if plan else 1  # one for each device
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[2:]), x.dtype), abstract_batch(config))
    x = jax.ShapeDtypeStruct((*batch.tokens.shape, model.c.width), dtype)

    def layer(params: Tree, x: jax.Array, d_y: jax.Array, index: jax.Array, batch: Batch) -> Any:
        batch = local_batch(batch)
        key = DropoutKey(jnp.uint32(0), jnp.uint32(0), batch.sample_ids) if model.has_dropout else None
        frozen = exclude(params, trained)

        def forward(trained: Tree, x: jax.Array) -> Any:
            return model.block(merge(frozen, trained), x, ModelInput(batch, key, jnp.float32(1)), index)

        learned = subset_of(params, trained)
        (y, losses), vjp = jax.vjp(forward, learned, x)
        residuals, rebuild = drop_residuals(vjp, (learned, frozen))  # as in LayersLoop.vjp
        backward = rebuild(save_p.bind(*residuals), (learned, frozen))
        return y, losses, *backward((d_y, jax.tree.map(jnp.ones_like, losses)))

    run: Callable = layer
    if plan:
        specs = jax.tree.map(plan.param_rules.spec, names, is_leaf=is_dim_names)
        batch_axes, time, sequence = map(plan.axis_rules.axes, ("batch", TIME, SEQUENCE))
        stream = P(batch_axes, (*time, *sequence) or None)
        batch_specs = jax.tree.map(lambda spec: P(*spec[1:]), plan.batch_specs, is_leaf=is_spec)
        out_specs = stream, P(), subset_of(specs, trained), stream
        run = plan.shard_map(layer, (specs, stream, stream, P(), batch_specs), out_specs)
    arguments = params, x, x, jax.ShapeDtypeStruct((), jnp.int32), batch
    names_of = zip((PARAMS, X, GRADIENT, INDEX, BATCH), arguments, strict=True)
    roots = [root for root, argument in names_of for _ in jax.tree.leaves(argument)]
    with as_one_operation(True):
        jaxpr = jax.make_jaxpr(run)(*arguments)
    flow = Dataflow(jaxpr, roots, gradient=GRADIENT)
    gradients = flow.outputs[-1 - len(jax.tree.leaves(trained)) : -1]
    scaled = {"mul"} if model.eight_bits else set()
    products = _before_casts(flow, gradients, scaled)
    return _LayerFlow(flow, frozenset(value.base for value in (products if scaled else gradients)), products)


def _before_casts(flow: Dataflow, values: list[Value], others: set[str]) -> frozenset[Value]:
    """`values`, and what they are casts, transposes and results of `others` of."""
    found, names = set(values), {*VIEWS, "transpose", *others}
    for operation in reversed(flow.operations):
        if operation.equation.primitive.name in names and not found.isdisjoint(operation.outputs):
            found.update(operation.inputs)
    return frozenset(found)


def _trained(tree: Tree, trains: Callable[..., bool], *path: str) -> Tree:
    """The leaves of nested dicts that are trained."""
    return {
        key: _trained(value, trains, *path, key) if isinstance(value, dict) else value
        for key, value in tree.items()
        if isinstance(value, dict) or trains(*path, key)
    }


def _is_activation(value: Value) -> bool:
    """True if it grows with the batch."""
    return bool(value.shape) and bool(value.roots - {PARAMS, INDEX})


def _bytes(value: Value, lanes: int) -> int:
    """Bytes of an array whose last dimension, if heads are ahead of it, is padded."""
    *outer, features = value.shape
    padded = -(-features // lanes) * lanes if len(outer) > 2 else features
    return value.bytes // features * padded


def _saved(flow: Dataflow, lanes: int) -> tuple[float, float]:
    """(bytes that grow with the rows, bytes that do not) of what forward makes, or begins with, and backward reads,
    except for parameters and what all layers share."""
    parameters = {value for value in flow.arguments if value.roots == {PARAMS}}
    of_layer = [value for value in flow.saved.values() if value.shape and value.roots - {BATCH}]
    stored = {value.base if value.base.bytes == value.bytes else value: value for value in of_layer}
    grows, fixed = 0, 0
    for value in stored.values():
        if _is_activation(value):
            grows += _bytes(value, lanes)
        elif value not in parameters:
            fixed += value.bytes
    return grows, fixed


def _sent(operations: list[Operation]) -> Counter[Sent]:
    sent = Counter[Sent]()
    for operation in operations:
        for equation, times in equations(operation.equation):
            if kind := KIND_OF_PRIMITIVE.get(equation.primitive.name):
                axes = equation.params.get("axes", equation.params.get("axis_name"))
                axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
                for array in equation.outvars if kind == ALL_GATHER else equation.invars:
                    sent[Sent(kind, axes, array.aval.dtype.name, math.prod(array.aval.shape))] += times
    return sent


def _pass(traced: _LayerFlow, backward: bool, lanes: int) -> Pass:
    flow, gradients, _ = traced
    operations = [each for each in flow.operations if each.backward == backward]
    kernels = flow.kernels(operations)
    work, attention = _elementwise(kernels, lanes, gradients), sum(map(_attention_flops, operations))
    return Pass(_merged(operations, traced.products_of_gradients), attention, *work, _sent(operations))


class _Elementwise(NamedTuple):
    """The fields of Pass."""

    traffic: float
    fusions: int
    peak: float


def _elementwise(kernels: list[Kernel], lanes: int, gradients: frozenset[Value] = frozenset()) -> _Elementwise:
    last = {value: i for i, kernel in enumerate(kernels) for value in kernel.read}
    ends, alive, peak, fusions, traffic = Counter[int](), 0, 0.0, 0, 0.0
    for i, kernel in enumerate(kernels):
        first = kernel.operations[0]
        made = [value for value in kernel.written if _is_activation(value) and value not in gradients]
        if made and not first.is_kernel:
            fusions += 1
            traffic += sum(value.bytes for value in (*filter(_is_activation, kernel.read), *made))
        for value in made:
            ends[last.get(value, len(kernels))] += _bytes(value, lanes)
        alive += sum(_bytes(value, lanes) for value in made)
        peak = max(peak, alive)
        if first.equation.primitive is lax.scan_p and (turns := first.equation.params["length"]):
            turn = _turn(first.equation, lanes)
            fusions, traffic = fusions + turns * turn.fusions, traffic + turns * turn.traffic
            peak = max(peak, alive + turn.peak)
        alive -= ends[i]
    return _Elementwise(traffic, fusions, peak)


def _turn(scan: Any, lanes: int) -> _Elementwise:
    """One turn of a loop, beside what it carries."""
    body = scan.params["jaxpr"]
    flow = Dataflow(body, [X] * len(body.jaxpr.invars), gradient="")
    return _elementwise(flow.kernels(flow.operations), lanes)


def _merged(operations: list[Operation], of_gradients: frozenset[Value]) -> tuple[TracedProduct, ...]:
    """The matmuls of `operations`.  Those of one array with several count as one: XLA merges them, or a library fills
    cores that one's tiles leave idle with another's."""
    products = [(operation, each) for operation in operations for each in _products(operation, of_gradients)]
    uses = Counter((value.base, each.product.inner) for operation, each in products for value in operation.inputs)
    merged: dict[Any, TracedProduct] = {}
    for operation, (product, per_row, times) in products:
        key: Any = product, per_row
        grows = per_row in ("rows", "inner")
        left, right = [*operation.inputs, None, None][:2]
        for shared, columns in ((left, product.columns), (right, product.rows)):
            if grows and shared and _is_activation(shared) and uses[shared.base, product.inner] > 1:
                key, rows = (shared.base, product.inner), product.rows * product.columns / columns
                columns += merged[key].product.columns if key in merged else 0
                merged[key] = TracedProduct(product._replace(rows=rows, columns=columns), per_row, times)
                break
        else:
            already = merged[key].times if key in merged else 0
            merged[key] = TracedProduct(product, per_row, times + already)
    return tuple(merged.values())


PER_ROW = ("", "columns"), ("rows", "inner")
"""The field of Product that grows with the rows, by whether the left and the right operand do."""


def _products(operation: Operation, of_gradients: frozenset[Value]) -> Iterator[TracedProduct]:
    """of_gradients: results that are gradients of parameters."""
    grows = tuple(map(_is_activation, operation.inputs[:2]))
    for equation, times in equations(operation.equation):
        if equation.primitive.name not in PRODUCTS:
            continue
        left, right, out = (each.aval.shape for each in (*equation.invars[:2], equation.outvars[0]))
        if equation.primitive.name == "conv_general_dilated":  # its features are the first dimension of its kernel
            columns, inner = right[0], math.prod(right[1:])
            yield TracedProduct(Product(math.prod(out) // columns, inner, columns), "rows", times)
            continue
        if equation.primitive.name == "ragged_dot_general":
            dimensions = equation.params["ragged_dot_dimension_numbers"]
            (inner, _), _ = dimensions.dot_dimension_numbers
            of_matrices = tuple(inner) == tuple(dimensions.lhs_ragged_dimensions)  # their gradient
            contracted, columns = math.prod(left[dim] for dim in inner), out[-1]
            rows = math.prod(left) // contracted
            yield TracedProduct(Product(rows, contracted, columns), "inner" if of_matrices else "rows", times)
            continue
        (inner, _), (batch, _) = equation.params["dimension_numbers"]
        shared, contracted = (math.prod(left[dim] for dim in dims) for dims in (batch, inner))
        rows, columns = (math.prod(shape) // shared // contracted for shape in (left, right))
        # Matmuls in a loop grow in some dimension, those of attention in their batch, those of experts in their slots.
        of_weights = not batch or not all(grows) or not of_gradients.isdisjoint(operation.outputs)
        in_loop = equation is not operation.equation
        per_row = PER_ROW[grows[0]][grows[1]] if of_weights and not in_loop else "batch"
        if per_row == "columns":
            rows, columns, per_row = columns, rows, "rows"
        yield TracedProduct(Product(rows, contracted, columns, shared, _rate(equation)), per_row, times)


def _rate(product: Any) -> str:
    """The peak at which a matmul of eight-bit codes runs; '' for others."""
    dtype = product.invars[0].aval.dtype
    return "" if dtype.itemsize > 1 else RATES["int8" if dtype == jnp.int8 else "fp8"]


def _attention_flops(operation: Operation) -> float:
    return sum(times * _flops_of_kernel(each) for each, times in equations(operation.equation))


def _flops_of_kernel(equation: Any) -> float:
    products = ATTENTION_PRODUCTS.get(equation.primitive.name, 0)
    if not products:
        return 0.0
    rows, time, heads, width = equation.invars[0].aval.shape
    return products * 2.0 * rows * heads * time**2 * equation.params["unmasked"] * width
