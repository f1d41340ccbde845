"""A train step, counted: how often a device runs its parts, and the sizes of what they send.  The sources of expected
collectives read it."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from spmd_lm.axes import MODEL
from spmd_lm.config.mlp import MoE
from spmd_lm.config.schema import Model, RunConfig
from spmd_lm.cost_model.layer_trace import has_own_block
from spmd_lm.cost_model.sizes import at_least_float32, dtype_bytes, rows_per_device, shares_of_kinds, tokens_per_device
from spmd_lm.cost_model.wire import ALL_REDUCE, REDUCE_SCATTER, wire_bytes
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Plan

Axes = tuple[str, ...]
Array = tuple[str, float]
"""Dtype and elements of a collective's array, gathered or unreduced."""


@dataclasses.dataclass(frozen=True)
class ExpectedCollective:
    """Collectives of one kind, over the same mesh axes, for one part of the step.

    count: collectives in a step, one per array.
    bytes: bytes on the wire, per device and step.
    repeated: bytes that backward sends again outside of a loop over layers; a CPU's compiler may merge them."""

    kind: str
    axes: Axes
    part: str
    dtype: str
    count: float
    bytes: float
    formula: str
    repeated: float = 0.0


class Runs(NamedTuple):
    """Execution counts of a step's parts on a device, the mean over pipeline stages.

    forward_passes: layers run forward alone, saving at most the chunk's input.
    layer_passes: layers run forward with backward right after.
    embedding, embedding_grad, head: microbatches that run it.
    stage_sends: sends to neighbours, one per tick and direction.
    received: sends that carry an activation or a gradient.
    chunk_gathers, chunk_scatters: chunks that a breadth-first schedule starts, and whose gradients it completes."""

    forward_passes: float
    layer_passes: float
    embedding: float
    embedding_grad: float
    head: float
    received: float = 0
    stage_sends: int = 0
    chunk_gathers: float = 0
    chunk_scatters: float = 0


def layer_passes(config: RunConfig, plan: Plan) -> tuple[float, float]:
    """Layers run in a step, the mean over stages: forward alone, and forward with backward."""
    runs = _runs(config, plan)
    return runs.forward_passes, runs.layer_passes


def _runs(config: RunConfig, plan: Plan) -> Runs:
    p, m, chunk_layers = config.parallel, config.parallel.microbatches, config.layers_per_chunk
    embedding_trains = plan.trains("embedding")
    if plan.layout.pipe == 1:
        passes = m * config.model.layers
        if not plan.trains_below_head:
            return Runs(forward_passes=passes, layer_passes=0, embedding=m, embedding_grad=0, head=m)
        return Runs(0, passes, m, m * embedding_trains, m)
    counts = schedule_counts(p.schedule, plan.layout.pipe, m, config.chunks)
    if p.run_idle_stages:  # both branches run in every tick
        counts = counts.with_idle_stages()
    breadth_first = p.schedule == "breadth_first"
    # Otherwise a chunk before the head runs forward only at the beginning of its backward pass.
    skipped = 0 if breadth_first or p.run_idle_stages else counts.last
    runs = Runs(
        forward_passes=(counts.active - skipped) * chunk_layers,
        layer_passes=counts.active * chunk_layers,
        embedding=counts.first,
        embedding_grad=embedding_trains * (m * counts.per_step if breadth_first else counts.first),
        head=m * counts.per_step if breadth_first else counts.last,
        received=counts.received,
        stage_sends=2 * counts.ticks,
        chunk_gathers=counts.new_chunks,
        chunk_scatters=counts.chunk_ends,
    )
    if plan.trains_below_head or not breadth_first:
        return runs
    loads = counts.ticks if p.run_idle_stages else config.chunks
    received, sends = counts.received / 2, counts.ticks
    return runs._replace(layer_passes=0, received=received, stage_sends=sends, chunk_gathers=loads, chunk_scatters=0)


COLUMN = {"attention": ("query", "key", "value"), "mlp": ("up", "gate")}
"""Column-parallel matrices of each branch."""


class Unneeded(NamedTuple):
    """Reductions and gathers of a branch's streams, and keys of matrices, that backward does not need."""

    reductions: int = 0
    gathers: int = 0
    weights: tuple[str, ...] = ()


class LayersWithExperts(NamedTuple):
    """Layers of one kind.  share: of all layers.  model: as if all layers were of this kind."""

    share: float
    model: Model
    moe: MoE


class Step:
    """Quantities that all sources of collectives read."""

    def __init__(self, config: RunConfig, plan: Plan):
        self.config, self.plan, self.runs = config, plan, _runs(config, plan)
        self.compute, self.accum_dtype = config.precision.compute, at_least_float32(config.precision.compute)
        self.layers = config.model.layers // plan.layout.pipe
        self.rows, self.tokens = rows_per_device(config, plan.layout), tokens_per_device(config, plan.layout)
        # One microbatch's residual stream with the whole sequence: A.
        self.activations = self.compute, self.tokens * config.model.width
        # Share of a chunk's layers outside of loops: all if unrolled; with prefetch the last period, or both of two, as
        # XLA unrolls a loop of one iteration; and those of a period that is cut short.
        layers, period = config.layers_per_chunk, len(config.model.kinds)
        outside = layers % period + period * bool(plan.prefetch)
        self.unrolled = 1.0 if not plan.scan or (plan.prefetch and layers // period == 2) else outside / layers
        self.model_axes = plan.active_axes(MODEL)
        kinds = zip(shares_of_kinds(config), config.model.of_each_kind, strict=True)
        with_experts = [LayersWithExperts(share, like, like.moe) for share, like in kinds if like.moe]
        self.experts = () if has_own_block(config) else tuple(with_experts)
        self.recomputes_layer = config.remat.policy in ("full", "offload", "residual", "block")

    @property
    def unread_outputs(self) -> float:
        """Outputs of a stage's last layer that the head alone reads, long before backward: those of an unrolled
        breadth-first pipeline."""
        if not self.runs.stage_sends or self.config.parallel.schedule != "breadth_first" or self.plan.scan:
            return 0.0
        return self.runs.layer_passes / self.config.layers_per_chunk

    def row(
        self, kind: str, axes: Axes, part: str, array: Array, count: float, formula: str, repeated: float = 0
    ) -> ExpectedCollective:
        """`count` collectives of `array` over `axes`; backward repeats `repeated` of them outside of a loop."""
        dtype, elements = array
        bytes_ = wire_bytes(kind, elements * dtype_bytes(dtype), math.prod(self.plan.sizes[axis] for axis in axes))
        return ExpectedCollective(kind, axes, part, dtype, count, count * bytes_, formula, repeated * bytes_)

    def reductions(self, part: str, count: float, formula: str, repeated: float = 0) -> Iterator[ExpectedCollective]:
        """`count` sums of A over `model`: all-reduces; if the sequence is sharded reduce-scatters, one mesh axis after
        the other, each of the shard that the one before leaves."""
        if not self.plan.sequence:
            yield self.row(ALL_REDUCE, self.model_axes, part, self.activations, count, formula, repeated)
            return
        dtype, elements = self.activations
        for axis, share in self.shares(self.model_axes):
            yield self.row(REDUCE_SCATTER, (axis,), part, (dtype, elements * share), count, formula, repeated)

    def gathers_again(self, branch: str) -> float:
        """Share of the layers where backward gathers the branch's saved shards of input again: for gradients of the
        matrices that read it, or to recompute the layer.  Experts read, and save, what is whole."""
        trains = any(self.plan.reads_input("blocks", branch, key) for key in COLUMN[branch])
        again = trains or self.recomputes_layer
        with_experts = sum(each.share for each in self.experts) if branch == "mlp" else 0
        return (1 - with_experts) * again + with_experts * self.config.remat_policy.recomputes_layer

    @functools.cached_property
    def unneeded(self) -> dict[str, Unneeded]:
        """Collectives by branch that backward through the first layer does not need, as nothing below is trained.  A
        loop over layers, and a pipeline, run them all the same."""
        plan = self.plan
        in_a_loop = plan.layout.pipe > 1 or (plan.scan and not plan.prefetch)
        if has_own_block(self.config) or plan.trains("embedding") or in_a_loop or not self.runs.layer_passes:
            return {}
        first = [key for key in plan.names["blocks"] if key.startswith("0_")]  # where layers are of several kinds
        m, trains = self.config.model, functools.partial(plan.trains, "blocks", *first)
        norm_first = m.norm != "post"
        before_attention = norm_first and trains("norm1")
        first_branch = any(map(trains, ("attention", "norm1", "post_norm1"))) and not m.parallel_branches
        before_mlp = first_branch or (norm_first and trains("norm2"))
        branches = (
            ("attention", before_attention, trains("attention"), "out"),
            ("mlp", before_mlp, trains("norm2") or trains("mlp"), "down"),
        )
        return {
            branch: Unneeded(1, not trained, COLUMN[branch] if trained else (*COLUMN[branch], row))
            for branch, before, trained, row in branches
            if not before
        }

    def shares(self, axes: Axes) -> Iterator[tuple[str, float]]:
        """(mesh axis, share of the array), one after the other, of a scatter; a gather takes them in reverse."""
        share = 1.0
        for axis in axes:
            yield axis, share
            share /= self.plan.sizes[axis]
