"""Compares a user's modules under tensor parallelism with themselves on one device, before they train.

If a collective is missing, or a parameter between two of them is replicated, jax raises no error: the step would
compute something else.  So a model of one period runs on one example, sharded over `model` and whole: losses
and gradients must be the same.  jax.vmap over a named axis stands for the devices, and needs only one."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_lm.active_rules import use_axis_rules
from spmd_lm.axes import MODEL, DimNames, is_dim_names, is_matrix
from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.schema import Parallel, Remat, RunConfig
from spmd_lm.errors import LayoutError
from spmd_lm.models.language_model import LanguageModel
from spmd_lm.models.modules import ModelModules
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.trees import Tree, leaves_by_path
from spmd_lm.resolve import abstract_plan, make_model

MOST_PARAMETERS = 2**27
"""Most parameters of a period that is compared: more would take too much memory, and minutes."""


def check_own_modules(config: RunConfig, modules: ModelModules, plan: Plan) -> str:
    """Compares the modules; returns a line on what was not compared, or ''.  Raises LayoutError if devices along
    `model` would compute something else than one device does."""
    if modules == ModelModules() or plan.layout.model == 1:
        return ""
    small, shards = _one_period(config, plan.layout.model), plan.layout.model
    sharded = abstract_plan(small, shards, "cpu", "cpu", modules)
    if (size := sum(math.prod(each.shape) for each in sharded.parameters)) > MOST_PARAMETERS:
        what = f"your modules over {shards} devices of `model` are not compared with one device"
        return f"{what}: a period has {size:,} parameters. Plan them once with a smaller width and train that."
    model = make_model(small, "cpu", sharded, modules)
    params, batch = _params(model), _batch(small)
    with jax.default_matmul_precision("highest"):
        loss, gradients = _on_one_device(model, params, batch)
        losses, sharded_gradients = _on_shards(model, sharded, params, batch)
    tolerance = 1e-8 if small.precision.params == "float64" else 1e-3
    problems = [*_differences("the loss", losses, loss, tolerance)]
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
    of_shards = leaves_by_path(sharded_gradients)
    for path, g in leaves_by_path(gradients).items():
        problems += _differences(f"the gradient of {path}", of_shards[path], g, tolerance, scale)
    if problems:
        keys = f"parallel.model={shards}" + " parallel.sequence=true" * plan.sequence
        advice = "A collective is missing or one too many, or a parameter is not sharded as what it meets is"
        raise LayoutError(*(f"{keys}: {problem}. {advice}." for problem in problems[:3]))
    return ""


def _one_period(config: RunConfig, shards: int) -> RunConfig:
    """A run of one example, with a model of one period, without dropout."""
    m, rows = config.model, config.objective.rows_per_example
    sizes = {"layers": len(m.kinds), "attention": "xla", "share_layers": False}
    sizes |= {"dropout": 0.0, "attention_dropout": 0.0}
    dtype = "float64" if config.precision.params == "float64" else "float32"
    dtypes = dict.fromkeys(("params", "compute", "reduce"), dtype) | {"loss_scale": "none", "matmul": "none"}
    parallel = Parallel(data=1, model=shards, sequence=config.parallel.sequence, partitioner="manual")
    return config.model_copy(
        update={
            "model": m.model_copy(update=sizes),
            "precision": config.precision.model_copy(update=dtypes),
            "parallel": parallel,
            "train": config.train.model_copy(update={"batch": rows, "eval_every": 0}),
            "remat": Remat(),
            "optim": config.optim.model_copy(update={"freeze": ""}),
        }
    )


def _params(model: LanguageModel) -> Tree:
    """Random parameters, biases and norms too, large enough for every computation to have an effect."""
    rng = np.random.default_rng(0)

    def param(names: DimNames, x: jax.Array) -> jax.Array:
        noise = rng.standard_normal(x.shape).astype(x.dtype)
        return noise * model.c.width**-0.5 if is_matrix(names) else x + 0.1 * noise

    return jax.tree.map(param, model.names, model.init(0), is_leaf=is_dim_names)


def _batch(config: RunConfig) -> Batch:
    """A microbatch of random tokens and labels."""
    rng, context = np.random.default_rng(0), config.model.context

    def field(name: str, x: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = x.shape[1:]
        match name:
            case "positions":
                return np.broadcast_to(np.arange(context, dtype=np.int32), shape)
            case "sample_ids":
                return np.arange(shape[0], dtype=np.int32)
            case "segments" | "loss_weights" | "label_weights":
                return np.ones(shape, x.dtype)
            case "tokens" | "targets":
                return rng.integers(0, config.model.vocab, shape).astype(x.dtype)
        return rng.integers(0, 2, shape).astype(x.dtype)

    fields = vars(abstract_batch(config)).items()
    return Batch(**{name: None if x is None else field(name, x) for name, x in fields})


def _on_one_device(model: LanguageModel, params: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    return jax.jit(lambda params: jax.value_and_grad(model.unchecked_mean_loss)(params, batch, None))(params)


def _on_shards(model: LanguageModel, plan: Plan, params: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
    """Losses of all shards, and gradients with the sums that a step makes."""

    def dim_of(names: DimNames) -> int | None:
        return next((dim for dim, name in enumerate(names) if MODEL in plan.param_rules.axes(name)), None)

    def split(names: DimNames, x: jax.Array) -> jax.Array:
        dim = dim_of(names)
        return x if dim is None else jnp.stack(jnp.split(x, plan.layout.model, dim))

    def join(names: DimNames, g: jax.Array) -> jax.Array:
        if (dim := dim_of(names)) is not None:
            return jnp.concatenate(list(g), dim)
        return g.sum(0) if MODEL in plan.grad_reduce_axes(names) else _unless_they_differ(g)

    @jax.jit
    def run(params: Tree) -> tuple[jax.Array, Tree]:
        shards = jax.tree.map(split, plan.names, plan.from_canonical(params), is_leaf=is_dim_names)
        axes = jax.tree.map(lambda names: None if dim_of(names) is None else 0, plan.names, is_leaf=is_dim_names)
        one = jax.value_and_grad(model.unchecked_mean_loss)
        each = jax.vmap(lambda params: one(params, batch, None), (axes,), axis_name=MODEL, axis_size=plan.layout.model)
        losses, gradients = each(shards)
        return losses, plan.canonical(jax.tree.map(join, plan.names, gradients, is_leaf=is_dim_names))

    with use_axis_rules(plan.axis_rules):
        return run(params)


def _unless_they_differ(g: jax.Array) -> jax.Array:
    """The gradient that all shards of g [shards, ...] agree on; NaN if they do not."""
    return jnp.where(jnp.abs(g - g[0]).max() <= 1e-3 * jnp.abs(g).max(), g[0], jnp.nan)


def _differences(what: str, got: Any, wanted: Any, tolerance: float, scale: float = 0.0) -> Iterator[str]:
    """Differences beyond `tolerance`.  scale: the largest of all gradients; one far below it is mostly rounded."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    largest = max(np.abs(wanted).max(initial=0.0), 1e-3 * scale, 1e-30)
    difference = np.abs(got - wanted).max(initial=0.0) / largest
    if np.isnan(difference):
        yield f"devices along `model` do not agree on {what}"
    elif difference > tolerance:
        yield f"{what} differs from that on one device by {difference:.2g} of it"
