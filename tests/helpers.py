"""Small runs of the whole program, each layout compiled once per process, and how their results are compared."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from spmd_lm.active_rules import AxisRules, use_axis_rules
from spmd_lm.axes import MESH_AXES, MODEL, is_dim_names
from spmd_lm.batch import Batch, abstract_batch
from spmd_lm.config.data_sections import packs_documents
from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.mesh import Layout, make_mesh
from spmd_lm.parallel.rules import Rules
from spmd_lm.parallel.trees import subset_of
from spmd_lm.step.program import Program
from spmd_lm.step.state import TrainState
from tests import reference

Tree = Any

# 61 tokens: no degree of `model` divides them.  The gradients' norm is 0.9 and more, so that clip cuts every step.
TREE = {
    "model": {"layers": 2, "width": 32, "heads": 8, "context": 16, "vocab": 61, "dropout": 0.2},
    "data": {"source": "synthetic"},
    "parallel": {"data": 1},
    "precision": {"params": "float64", "compute": "float64", "reduce": "float64"},
    "optim": {"lr": 1e-2, "min_lr": 1e-3, "warmup": 2, "clip": 0.5},
    "train": {"steps": 10, "batch": 16, "seed": 3},
}
FLOAT32 = dict.fromkeys(("params", "compute", "reduce"), "float32")


def make_config(**sections: dict) -> RunConfig:
    """The run of TREE with these keys of these sections changed; float64, on one device, unless they say otherwise."""
    return RunConfig.model_validate({name: TREE.get(name, {}) | sections.get(name, {}) for name in TREE | sections})


ORIGINAL_BERT = {"kind": "bert", "norm": "post", "token_types": 2}
"""BERT as it was first published."""

FILES = {"source": "task", "path": "train", "validation_path": "dev"}  # never opened
TASKS = {
    "classification": {"objective": {"kind": "classification", "classes": 2}, "data": FILES | {"task": "sst2"}},
    "multiple choice": {"objective": {"kind": "multiple_choice", "choices": 4}, "data": FILES | {"task": "race"}},
    "span": {
        "objective": {"kind": "span"},
        "data": FILES | {"task": "squad"},
        "optim": {"eps": 1e-6},  # what is added to all of a row moves no softmax: gradients that are rounding alone
    },
}
"""Fine-tuning objectives, as sections of a run."""

LAYOUTS = {
    "one": {"data": 1},
    "data8": {"data": 8},
    "data4-model2": {"data": 4, "model": 2},
    "data2-model4": {"data": 2, "model": 4},
    "model8": {"data": 1, "model": 8},
    "replica2-data2-model2": {"replica": 2, "data": 2, "model": 2},
    "data8-zero1": {"data": 8, "zero": 1},
    "data8-zero3": {"data": 8, "zero": 3},
    "data4-model2-zero2": {"data": 4, "model": 2, "zero": 2},
    "data2-model4-zero3": {"data": 2, "model": 4, "zero": 3},
    "replica2-data4-zero3": {"replica": 2, "data": 4, "zero": 3},
    "data4-model2-sequence": {"data": 4, "model": 2, "sequence": True},
    "model8-sequence": {"data": 1, "model": 8, "sequence": True},
    "data2-model4-sequence-zero1": {"data": 2, "model": 4, "sequence": True, "zero": 1},
    "replica2-data2-model2-sequence-zero3": {"replica": 2, "data": 2, "model": 2, "sequence": True, "zero": 3},
    "data4-zero3-once": {"data": 4, "zero": 3, "reduce_once": True},
    "data4-zero2-once": {"data": 4, "zero": 2, "reduce_once": True},
}


def diagonals(rows: Iterable[str], columns: Iterable[str], every: int) -> Iterator[tuple[str, str]]:
    """One pair of a product in `every`: each row meets a share of the columns, and each column of the rows."""
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        if (i - j) % every == 0:
            yield row, column


def run_of(layout: str, microbatches: int = 1, form: str = "scan", remat: str = "none", **sections: dict) -> RunConfig:
    """The run of TREE under a layout, its layers in one of the forms 'scan' and 'unrolled'."""
    model = {"scan": form == "scan"} | sections.pop("model", {})
    parallel = LAYOUTS[layout] | {"microbatches": microbatches}
    return make_config(parallel=parallel, model=model, remat={"policy": remat}, **sections)


def partitioned(config: RunConfig, partitioner: str) -> RunConfig:
    """`config` with its collectives written out (manual) or inserted by XLA (types)."""
    parallel = config.parallel.model_copy(update={"partitioner": partitioner})
    return config.model_copy(update={"parallel": parallel})


def degrees(config: RunConfig) -> Layout:
    return Layout(**{axis: getattr(config.parallel, axis) for axis in MESH_AXES})


@functools.cache
def program(config: RunConfig) -> Program:
    """The program on the layout's number of devices.  Float64 programs need the fixture x64 wherever they are used."""
    return Program(config, jax.devices()[: degrees(config).devices])


def host_batch(config: RunConfig, step: int) -> Batch:
    """Random tokens of uneven weights, a fifth of them 0; leaves [rows, time].  A masked model's rows have padding, two
    token types and labels; a fine-tuning batch has labels only; rows of packed data have several documents."""
    rows, time, r = config.train.batch, config.model.context, np.random.default_rng(step)
    tokens = r.integers(0, config.model.vocab, (rows, time + 1), dtype=np.int32)
    weights = np.maximum(r.uniform(-0.25, 1, (rows, time)), 0).astype(np.float32)
    positions = np.broadcast_to(np.arange(time, dtype=np.int32), (rows, time))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, None, np.arange(rows, dtype=np.int32))
    if config.objective.kind == "causal_lm":
        return packed(batch, r.random((rows, time)) < 0.2) if packs_documents(config.data) else batch
    real = positions < r.integers(time // 2, time + 1, (rows, 1))
    masked = dataclasses.replace(
        batch,
        loss_weights=weights * real,
        segments=np.int32(real),
        token_type_ids=np.int32(positions >= time // 3) if config.model.token_types else None,
        labels=r.integers(0, 2, rows, dtype=np.int32),
        label_weights=r.uniform(0.5, 1, rows).astype(np.float32),
        end_positions=r.integers(0, time // 2, rows, dtype=np.int32),
    )
    # One question's rows have one label, counted once.
    if (group := config.objective.rows_per_example) > 1:
        label_weights = masked.label_weights * (np.arange(rows) % group == 0)
        masked = dataclasses.replace(masked, labels=masked.labels.repeat(group)[:rows], label_weights=label_weights)
    wanted = abstract_batch(config)
    return Batch(**{name: value if getattr(wanted, name) is not None else None for name, value in vars(masked).items()})


def packed(batch: Batch, starts: np.ndarray) -> Batch:
    """Rows of documents that begin where `starts` is true, and at the first token."""
    starts = starts | (batch.positions == 0)
    first = np.maximum.accumulate(np.where(starts, batch.positions, 0), axis=1)
    segments = starts.cumsum(1, dtype=np.int32)
    return dataclasses.replace(batch, segments=segments, positions=(batch.positions - first).astype(np.int32))


def device_batch(p: Program, step: int) -> Batch:
    microbatches = p.config.parallel.microbatches

    def fold(x):
        return x.reshape(microbatches, -1, *x.shape[1:])

    return jax.tree.map(jax.device_put, jax.tree.map(fold, host_batch(p.config, step)), p.batch_shardings)


def canonical(p: Program, state: TrainState) -> TrainState:
    """The state on the host, unpadded, layers in order; made without the package's own conversion."""
    c = p.config.parallel
    chunks = c.chunks if c.pipe > 1 else 1

    def in_order(stack):
        n = len(stack) // (c.pipe * chunks)
        return stack[[(i // n % c.pipe * chunks + i // (n * c.pipe)) * n + i % n for i in range(len(stack))]]

    def cut(x, to):
        return np.asarray(x)[tuple(map(slice, to.shape))]

    def ordered(tree: Tree) -> Tree:
        tree = jax.tree.map(cut, tree, subset_of(p.plan.shapes, tree))
        return tree | {"blocks": jax.tree.map(in_order, tree["blocks"])}

    return jax.tree.map(np.asarray, state).map_params(ordered)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """first, last: canonical states on the host.  losses, norms, rates, dropped choices of experts: of each step."""

    first: TrainState
    last: TrainState
    losses: np.ndarray
    norms: np.ndarray
    rates: np.ndarray
    dropped: np.ndarray


STEPS = 3


@functools.cache
def trained(config: RunConfig) -> Outcome:
    return train_steps(program(config))


def train_steps(p: Program) -> Outcome:
    state = p.init()
    first, metrics = canonical(p, state), []
    for step in range(STEPS):
        state, figures = p.step(state, device_batch(p, step))
        assert_replicated(figures)
        metrics.append([float(figures.get(name, 0)) for name in ("loss", "grad_norm", "lr", "dropped_tokens")])
    return Outcome(first, canonical(p, state), *np.transpose(metrics))


def assert_replicated(tree: Tree) -> None:
    """Asserts equal arrays on all devices: each process reads those of its first device alone."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert leaf.is_fully_replicated and len(copies) == 1, jax.tree_util.keystr(path)


def alone(config: RunConfig) -> RunConfig:
    """The run on one device, without remat."""
    one = make_config()
    return config.model_copy(update={"parallel": one.parallel, "remat": one.remat})


def assert_same_run(got: Outcome, want: Outcome) -> None:
    """To rounding, in float64."""
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-12)
    np.testing.assert_array_equal(got.dropped, want.dropped)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-12)
    assert_states_close(got.last, want.last, 1e-11)


@functools.cache
def trained_reference(config: RunConfig) -> Outcome:
    """The reference's run in float64; only the first weights are the package's, and they are one device's."""
    one = config.model_copy(update={"parallel": make_config().parallel})
    first = canonical(program(one), program(one).init())
    params = jax.tree.map(np.float64, first.params)
    mu = nu = jax.tree.map(np.zeros_like, params)
    metrics = []

    @jax.jit
    def gradients(params, step, b: Batch):
        dropout = reference.Dropout((config.train.seed, step), b.sample_ids)
        return jax.value_and_grad(reference.loss_and_dropped, has_aux=True)(params, config, b, dropout)

    for step in range(STEPS):
        (loss, dropped), grads = gradients(params, step, host_batch(config, step))
        params, mu, nu, norm = reference.adamw(config.optim, config.train.steps, step, params, mu, nu, grads)
        rate = reference.learning_rate(config.optim, config.train.steps, step)
        metrics.append([float(loss), norm, rate, float(dropped)])
    mu, nu = (reference.trained_part(config.optim.freeze.split(), params, moment) for moment in (mu, nu))
    last = TrainState(np.int32(STEPS), params, optax.ScaleByAdamState(np.int32(STEPS), mu, nu))
    return Outcome(first, last, *np.transpose(metrics))


def assert_close(got: Tree, want: Tree, tolerance: float) -> None:
    """Compares leaf by leaf, relative to the leaf's largest entry.

    A leaf below 1e-6 of its tree's largest is rounding (the gradient of a key's bias is zero in exact arithmetic): it
    must be so small on both sides."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        size, name = np.abs(b).max(), jax.tree_util.keystr(path)
        if size > 1e-6 * largest:
            assert np.abs(a - b).max() <= tolerance * size, name
        else:
            assert np.abs(a).max() <= 1e-6 * largest, name


def param_trees(state: TrainState) -> tuple[Tree, Tree, Tree]:
    """Parameters, and Adam's first and second moments."""
    return state.params, state.opt_state.mu, state.opt_state.nu


def assert_states_close(got: TrainState, want: TrainState, tolerance: float) -> None:
    """Parameters and moments, leaf by leaf."""
    for ours, theirs in zip(param_trees(got), param_trees(want), strict=True):
        assert_close(ours, theirs, tolerance)


def assert_equal(got: Tree, want: Tree) -> None:
    """Compares bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def over_model(f, model: int, ins: Tree, outs: Tree):
    """`f`, compiled for `model` devices between which heads, mlp and vocab are split.  ins, outs: trees of names."""
    if model == 1:
        return jax.jit(lambda *args: f(*args))  # a new function: jit does not see the axis_rules it was traced under
    names = ("batch", "time", "sequence", "position", "width", "heads", "mlp", "vocab")
    split = {name: (MODEL,) if name in ("heads", "mlp", "vocab") else () for name in names}
    axis_rules = AxisRules(split, {MODEL: model})

    def specs(tree):
        return jax.tree.map(Rules(split).spec, tree, is_leaf=is_dim_names)

    def run(*args):
        with use_axis_rules(axis_rules):
            return f(*args)

    mesh = make_mesh(Layout(model=model), jax.devices()[:model])
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs(ins), out_specs=specs(outs), check_vma=False))


def relative(a, b) -> float:
    """The largest difference of two arrays, as a share of the second's largest entry."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())


def shard_bytes(tree: Tree) -> int:
    """Bytes that the first device really holds of a tree of arrays."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def shard_elements(tree: Tree) -> int:
    """Entries that each device holds of a tree of arrays, or of descriptions of them."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))
