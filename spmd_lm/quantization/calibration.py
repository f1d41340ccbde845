"""Runs rows of text through a model layer by layer, and measures what each matrix multiplies.

It computes in float64, so that rounding, which depends on the layout, changes no code; on TPUs, which have no float64
products, in float32.  Whatever a run's layout, devices divide rows, and each matrix as parallel.model says; one layer
is on devices at a time."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from spmd_lm.active_rules import active_axes
from spmd_lm.axes import is_dim_names
from spmd_lm.batch import Batch
from spmd_lm.config.schema import Parallel, RunConfig
from spmd_lm.data.corpus import Dataset, make_loader
from spmd_lm.models.language_model import ModelInput
from spmd_lm.parallel.trees import Tree, from_paths, tree_add
from spmd_lm.step.program import Program

ROWS = 128  # of text, as in the paper
Grams = dict[str, np.ndarray]
"""X'X, float64 [inputs, inputs], by the path in a block of the matrix whose inputs X [tokens, inputs] are."""


@contextmanager
def float64() -> Iterator[None]:
    """jax with float64, and with exact float32 products, until the end of a `with`."""
    before = jax.config.read("jax_enable_x64")
    try:
        jax.config.update("jax_enable_x64", True)
        with jax.default_matmul_precision("highest"):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _calibrating(config: RunConfig, devices: int, platform: str) -> RunConfig:
    dtype = "float32" if platform == "tpu" else "float64"
    precision: dict[str, str | None] = dict.fromkeys(("params", "compute", "reduce"), dtype)
    precision |= {"frozen": None, "fake_quant": "none", "logits": "float32", "loss_scale": "none"}
    parallel = Parallel(model=config.parallel.model, partitioner="manual", prefetch="off", collective_matmul="off")
    parallel = parallel.model_copy(update={"model_across_hosts": config.parallel.model_across_hosts})
    changed = config.model_copy(
        update={
            "parallel": parallel,
            "precision": config.precision.model_copy(update=precision),
            "model": config.model.model_copy(update={"attention": "chunked"}),
            "remat": config.remat.model_copy(update={"policy": "none"}),
        }
    )
    shards = max(devices // parallel.model, 1)
    step = math.lcm(shards, config.objective.rows_per_example)
    rows = -(-ROWS // step) * step
    train, each = config.train.model_copy(update={"batch": rows}), {"microbatches": rows // shards}  # one row at a time
    return changed.model_copy(update={"train": train, "parallel": parallel.model_copy(update=each)})


class Calibration:
    """The first rows of a run's training data, on their way through its layers.  For use within `float64`."""

    def __init__(self, config: RunConfig, corpus: Dataset, embedding: Mapping[str, np.ndarray]):
        """embedding: its canonical parameters, by path."""
        devices = jax.devices()
        self.program = Program(_calibrating(config, len(devices), devices[0].platform), trains=False)
        plan, self.dtype = self.program.plan, jnp.dtype(self.program.config.precision.compute)
        self.batch: Batch = make_loader(self.program.config, corpus, "training").batch(0, self.program.batch_shardings)
        like = self.program.model.embed_params(plan.shapes)
        params = self._placed(embedding, like, self.program.model.embed_params(plan.param_specs), plan.from_canonical)

        def embed(params: Tree, batch: Batch) -> jax.Array:
            return lax.map(lambda microbatch: self.program.model.embed(params, ModelInput(microbatch)), batch)

        specs = self.program.model.embed_params(plan.param_specs), plan.batch_specs
        self._places = [self._place(place) for place in range(self.program.model.period.layers)]
        self.x = jax.jit(plan.shard_map(embed, specs, plan.row_spec))(params, self.batch)

    def run(self, layer: int, params: Mapping[str, np.ndarray]) -> tuple[jax.Array, Grams]:
        """A layer's output, and Grams of its matrices.  params: its parameters, by path in a block."""
        index, place = divmod(layer, self.program.model.period.layers)
        names, specs, run = self._places[place]
        x, grams = run(self._placed(params, names, specs), self.x, self.batch, jnp.int32(index))
        return x, {path: np.asarray(gram, np.float64) for path, gram in jax.device_get(grams).items()}

    def _placed(
        self, params: Mapping[str, np.ndarray], like: Tree, specs: Tree, fit: Callable[[Tree], Tree] = lambda x: x
    ) -> Tree:
        shapes = jax.tree.map(lambda _: 0, like, is_leaf=is_dim_names)
        tree = from_paths({path: x.astype(self.dtype) for path, x in params.items()}, shapes)
        return jax.device_put(fit(tree), self.program.plan.sharding(specs))

    def _place(self, place: int) -> tuple[Tree, Tree, Callable[..., tuple[jax.Array, dict[str, jax.Array]]]]:
        """Of the layers at this place in their period: dimension names, PartitionSpecs, and the function
        (parameters, x, batch, index of the period) -> (x, Grams)."""
        model, plan = self.program.model, self.program.plan
        names = model.period.trees(plan.names["blocks"])[place]
        names = jax.tree.map(lambda names: names[1:], names, is_leaf=is_dim_names)
        specs = jax.tree.map(plan.param_rules.spec, names, is_leaf=is_dim_names)

        leaves = jax.tree_util.tree_leaves_with_path(names, is_leaf=is_dim_names)
        inputs = {jax.tree_util.keystr(path, simple=True, separator="."): names[-1] for path, names in leaves}

        def of_microbatch(params: Tree, index: jax.Array, x: jax.Array, batch: Batch):
            grams: dict[str, jax.Array] = {}

            def show(path: str, x: jax.Array) -> None:
                if model.matrices[path] and (axes := active_axes(inputs[path])):
                    x = lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)
                x = jnp.where(_counted(batch)[..., None], x, 0).reshape(-1, x.shape[-1])
                grams[path] = grams.get(path, 0) + x.T @ x

            x, _ = model.block(params, x, ModelInput(batch), index, place, show)
            return grams, x

        def run(params: Tree, x: jax.Array, batch: Batch, index: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            of_each = functools.partial(of_microbatch, params, index)
            first = jax.eval_shape(of_each, *jax.tree.map(lambda leaf: leaf[0], (x, batch)))[0]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

            def add(total: dict[str, jax.Array], inputs: tuple[jax.Array, Batch]):
                grams, x = of_each(*inputs)
                return tree_add(total, grams), x

            grams, x = lax.scan(add, zeros, (x, batch))
            return x, plan.psum_batch(grams)

        step = plan.shard_map(run, (specs, plan.row_spec, plan.batch_specs, P()), (plan.row_spec, P()))
        return names, specs, jax.jit(step)


def _counted(batch: Batch) -> jax.Array:
    """True for tokens [rows, time] that are no padding, in rows that do not only fill up the shards."""
    if batch.segments is None:  # positions count up, but for padding
        real = (batch.positions > 0) | (jnp.arange(batch.tokens.shape[-1]) == 0)
    else:
        real = batch.segments > 0
    return real & (batch.sample_ids < ROWS)[:, None]
