"""Collectives that a train step must send, by the papers' formulas.

Bytes are those that a device sends in a step on a ring of n: for an all-reduce of S bytes 2S(n-1)/n, for an all-gather
to or a reduce-scatter from S bytes S(n-1)/n.  Sources: tensor parallelism arXiv:1909.08053, section 3; sequence
parallelism arXiv:2205.05198, section 4.2; ZeRO arXiv:1910.02054, section 7; pipelines arXiv:2104.04473, section 4.1,
and arXiv:2211.05953.  In the formulas there are L layers and m microbatches; A is the bytes of one microbatch's
activations on a device, sequences x context x width; P is the number of parameters; L and P are one stage's.

Rows are means over pipeline stages.  A permute of S bytes counts S for every device, even where the first or the last
stage has no neighbour to send to."""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from spmd_lm.axes import MESH_AXES, MODEL, PIPE, TOKEN_AXES
from spmd_lm.config.layers import layer_path
from spmd_lm.config.schema import ExtractiveQA, RunConfig
from spmd_lm.cost_model.layer_trace import Sent, has_own_block, trace_layers
from spmd_lm.cost_model.sizes import at_least_float32, dtype_bytes, tokens_per_device, wire_itemsize
from spmd_lm.cost_model.trained_head import trains_before_logits
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER, wire_bytes
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


def expected_collectives(config: RunConfig, plan: Plan) -> list[ExpectedCollective]:
    """Collectives of one train step under `plan`; none over axes of one device."""
    step = _Step(config, plan)
    over_model = (_embedding, _blocks, _head) if plan.layout.model > 1 else ()
    sources = (_stage_sends, *over_model, _zero, _gradient_sums, _scalars)
    return [row for source in sources for row in source(step)]


class _Runs(NamedTuple):
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


def _runs(config: RunConfig, plan: Plan) -> _Runs:
    p, m, chunk_layers = config.parallel, config.parallel.microbatches, config.layers_per_chunk
    embedding_trains = plan.trains("embedding")
    if plan.layout.pipe == 1:
        passes = m * config.model.layers
        if not plan.trains_below_head:
            return _Runs(forward_passes=passes, layer_passes=0, embedding=m, embedding_grad=0, head=m)
        return _Runs(0, passes, m, m * embedding_trains, m)
    counts = schedule_counts(p.schedule, plan.layout.pipe, m, config.chunks)
    if p.run_idle_stages:  # both branches run in every tick
        counts = counts.with_idle_stages()
    breadth_first = p.schedule == "breadth_first"
    # Otherwise a chunk before the head runs forward only at the beginning of its backward pass.
    skipped = 0 if breadth_first or p.run_idle_stages else counts.last
    runs = _Runs(
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


class _Unneeded(NamedTuple):
    """Reductions and gathers of a branch's streams, and keys of matrices, that backward does not need."""

    reductions: int = 0
    gathers: int = 0
    weights: tuple[str, ...] = ()


class _Step:
    """Quantities that all sources of collectives read."""

    def __init__(self, config: RunConfig, plan: Plan):
        self.config, self.plan, self.runs = config, plan, _runs(config, plan)
        self.compute, self.accum_dtype = config.precision.compute, at_least_float32(config.precision.compute)
        self.layers = config.model.layers // plan.layout.pipe
        self.tokens = tokens_per_device(config, plan.layout)
        # One microbatch's residual stream with the whole sequence: A.
        self.activations = self.compute, self.tokens * config.model.width
        # Share of a chunk's layers outside of loops: all if unrolled; with prefetch the last period, or both of two, as
        # XLA unrolls a loop of one iteration; and those of a period that is cut short.
        layers, period = config.layers_per_chunk, len(config.model.kinds)
        outside = layers % period + period * bool(plan.prefetch)
        self.unrolled = 1.0 if not plan.scan or (plan.prefetch and layers // period == 2) else outside / layers
        self.model_axes = plan.active_axes(MODEL)

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

    def gathers_again(self, branch: str) -> bool:
        """True if backward gathers the branch's saved shards of input again: for gradients of the matrices that read
        it, or to recompute the layer."""
        trains = any(self.plan.reads_input("blocks", branch, key) for key in _COLUMN[branch])
        return trains or self.config.remat.policy in ("full", "offload", "residual", "block")

    @functools.cached_property
    def unneeded(self) -> dict[str, "_Unneeded"]:
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
            branch: _Unneeded(1, not trained, _COLUMN[branch] if trained else (*_COLUMN[branch], row))
            for branch, before, trained, row in branches
            if not before
        }

    def shares(self, axes: Axes) -> Iterator[tuple[str, float]]:
        """(mesh axis, share of the array), one after the other, of a scatter; a gather takes them in reverse."""
        share = 1.0
        for axis in axes:
            yield axis, share
            share /= self.plan.sizes[axis]


def _stage_sends(step: _Step) -> Iterator[ExpectedCollective]:
    """Sends between stages.  Without sequence parallelism each device of `model` sends a slice of the activations, and
    the receiving stage gathers them."""
    n, sequence = step.plan.layout.model, step.plan.sequence
    if not step.runs.stage_sends:
        return
    slices = n if sequence or step.config.model.context % n == 0 else 1
    formula = "A, a tick and direction" if slices == 1 else f"A/{slices}, a tick and direction"
    sent = step.compute, step.tokens * step.config.model.width / slices
    yield step.row(COLLECTIVE_PERMUTE, (PIPE,), "messages", sent, step.runs.stage_sends, formula)
    if slices > 1 and not sequence:
        formula, received = "A, where one arrives", step.runs.received
        yield step.row(ALL_GATHER, step.model_axes, "messages", step.activations, received, formula)


def _embedding(step: _Step) -> Iterator[ExpectedCollective]:
    """Sum over vocabulary shards, forward; gather of its sharded gradient, backward."""
    runs, a = step.runs, step.activations
    # A pipeline does not save the sum: a norm after the embedding needs it again in backward.
    again = runs.embedding_grad if step.config.model.norm == "post" and runs.stage_sends else 0
    yield from step.reductions("embedding", runs.embedding + again, "m: A forward")
    if step.plan.sequence and step.plan.trains("embedding", "tokens"):
        yield step.row(ALL_GATHER, step.model_axes, "embedding", a, runs.embedding_grad, "m: A backward")


_COLUMN = {"attention": ("query", "key", "value"), "mlp": ("up", "gate")}
"""Column-parallel matrices of each branch."""


class _BranchRuns(NamedTuple):
    """A device's reductions and gathers of one A in a branch, per step, and how many of each backward repeats."""

    reductions: float
    gathers: float
    repeated: float
    gathered_again: float


def _runs_of_branches(step: _Step) -> dict[str, _BranchRuns]:
    """Counts of Megatron's f and g: in each branch a reduction forward and one backward per layer, and remat's."""
    config, runs, remat = step.config, step.runs, step.config.remat_policy
    repeated = remat.repeated_reductions(scan=step.plan.scan)
    again = {"attention": min(1, repeated), "mlp": max(0, repeated - 1)}
    outputs = 0.0  # a stage's last layer's, read by the head alone, long before backward
    if runs.stage_sends and config.parallel.schedule == "breadth_first" and not step.plan.scan:
        outputs = runs.layer_passes / config.layers_per_chunk
    dropped = {  # reductions and gathers of such an output
        "attention": (again["attention"], remat.unneeded_gathers // 2),
        "mlp": (1 + again["mlp"], min(1, remat.unneeded_gathers)),
    }
    gathers_again = {branch: step.gathers_again(branch) for branch in dropped}
    unneeded = {branch: step.unneeded.get(branch, _Unneeded()) for branch in dropped}
    return {
        branch: _BranchRuns(
            (2 + again[branch]) * runs.layer_passes
            + runs.forward_passes
            - reductions * outputs
            - unneeded[branch].reductions * config.parallel.microbatches,
            (2 + gathers_again[branch] + remat.repeated_gathers / 2) * runs.layer_passes
            + runs.forward_passes
            - gathers * outputs
            - unneeded[branch].gathers * config.parallel.microbatches,
            again[branch] * runs.layer_passes,
            gathers_again[branch] * runs.layer_passes,
        )
        for branch, (reductions, gathers) in dropped.items()
    }


def _own_blocks(step: _Step) -> Iterator[ExpectedCollective]:
    """Collectives of the user's block, by its trace."""
    runs, rows = step.runs, step.tokens // step.config.model.context
    counts = Counter[Sent]()
    for _, share, traced in trace_layers(step.config, step.plan, fused=False):
        backward = runs.layer_passes
        for passes, sent in ((runs.forward_passes + backward, traced.forward.sent), (backward, traced.backward.sent)):
            counts.update({each: share * passes * count for each, count in sent.items() if passes})
    for (kind, axes, dtype, elements), count in counts.items():
        yield step.row(kind, axes, "blocks", (dtype, elements * rows), count, "as the block's code sends it")


def _blocks(step: _Step) -> Iterator[ExpectedCollective]:
    if has_own_block(step.config):
        yield from _own_blocks(step)
        return
    branches, overlapped = _runs_of_branches(step), step.plan.collective_matmul
    for rows, chosen in (
        (_collective_matmuls, [runs for branch, runs in branches.items() if branch in overlapped]),
        (_plain_branches, [runs for branch, runs in branches.items() if branch not in overlapped]),
    ):
        if chosen:
            yield from rows(step, len(chosen), _BranchRuns(*map(sum, zip(*chosen, strict=True))))


def _plain_branches(step: _Step, branches: int, runs: _BranchRuns) -> Iterator[ExpectedCollective]:
    passes = step.runs.layer_passes
    ahead = f", and {branches} ahead of it" if step.runs.forward_passes else ""
    a_layer = 2 * branches + (runs.repeated / passes if passes else 0)
    formula = f"{a_layer:g}Lm: A, {branches} forward, {branches} backward a layer{ahead}"
    again = runs.repeated * step.unrolled
    yield from step.reductions("blocks", runs.reductions, formula, again)
    if step.plan.sequence:
        not_saved = round(runs.gathered_again / passes) if passes else 0
        formula = f"{2 * branches + not_saved}Lm: A, {branches} forward, {branches} backward"
        formula += f", and {not_saved} of what was not saved whole" * (not_saved > 0) + ahead
        again = runs.gathered_again * step.unrolled
        yield step.row(ALL_GATHER, step.model_axes, "blocks", step.activations, runs.gathers, formula, again)


def _collective_matmuls(step: _Step, branches: int, runs: _BranchRuns) -> Iterator[ExpectedCollective]:
    """Permutes round the ring: a reduction adds up the shards of one A on their way, a gather passes them on."""
    n, (dtype, elements) = step.plan.layout.model, step.activations
    passed, again = runs.reductions, runs.repeated
    if step.plan.sequence:
        passed, again = passed + runs.gathers, again + runs.gathered_again
    sends, again = (n - 1) * passed, (n - 1) * again * step.unrolled
    formula = f"A/{n}, {n - 1} for each that is gathered or reduced"
    yield step.row(COLLECTIVE_PERMUTE, step.model_axes, "blocks", (dtype, elements / n), sends, formula, again)
    if not step.plan.sequence:
        formula, again = "A, what was reduced", runs.repeated * step.unrolled
        yield step.row(ALL_GATHER, step.model_axes, "blocks", step.activations, runs.reductions, formula, again)


def _head(step: _Step) -> Iterator[ExpectedCollective]:
    """Collectives of the objective's heads, and of cross-entropy over vocabulary shards."""
    objective, sequence, runs, dtype = step.config.objective, step.plan.sequence, step.runs.head, step.accum_dtype
    if sequence and objective.has_sequence_label:
        yield step.row(ALL_REDUCE, step.model_axes, "head", (dtype, 1), runs, "m: a number, of the first token")
    if sequence and isinstance(objective, ExtractiveQA):
        logits = step.compute, 2 * step.tokens
        yield step.row(ALL_GATHER, step.model_axes, "head", logits, runs, "m: two numbers of each token")
    if objective.predicts_tokens:
        if sequence:
            yield step.row(ALL_GATHER, step.model_axes, "head", step.activations, runs, "m: A forward")
        if trains_before_logits(step.plan):
            yield from step.reductions("head", runs, "m: A backward")
        formula = "3m: maximum, normaliser and target's logit of each token"
        yield step.row(ALL_REDUCE, step.model_axes, "head", (dtype, step.tokens), 3 * runs, formula)


class _Transfers(NamedTuple):
    """Counts of ZeRO's gathers of weights, or scatters of gradients, in one step.

    layers: layers sent.
    per_stack: collectives for each array of the layers.
    repeated: layers that backward sends again outside of a loop.
    rest: sends of the embedding's and the head's arrays, by use; None: once.
    unused: layers whose matrix is not sent, by its path."""

    formula: str
    layers: float
    per_stack: float
    repeated: float = 0
    rest: dict[str, float] | None = None
    unused: Mapping[tuple[str, ...], float] = MappingProxyType({})


def _zero(step: _Step) -> Iterator[ExpectedCollective]:
    """ZeRO's collectives, one mesh axis after the other, each of the shard that the one before leaves."""
    config, plan, precision = step.config, step.plan, step.config.precision
    if not plan.zero.stage:
        return
    tied_table = ("embedding", "tokens") if config.objective.ties_embeddings(config.model) else None
    matrices = [each for each in plan.parameters if plan.zero_axes(each.sharded_names)]
    shares = {each.path: dict(step.shares(plan.zero_axes(each.sharded_names))) for each in matrices}
    # Parts of a step that use each; all contribute to its gradient.
    uses_of = {each.path: ("embedding", "head") if each.path == tied_table else each.path[:1] for each in matrices}
    shapes, all_layers = {each.path: each.shape for each in matrices}, config.model.unique_layers
    gathered, scattered = (defaultdict[str, dict[tuple[str, ...], int]](dict) for _ in range(2))
    for each in matrices:
        for dtype, elements in plan.gathered_arrays(each, precision.compute).items():
            gathered[dtype][each.path] = elements
        for dtype, elements in plan.scattered_arrays(each, precision.reduce).items() if each.trained else ():
            scattered[dtype][each.path] = elements
    scatter = ALL_TO_ALL if plan.scatter_codec else REDUCE_SCATTER
    for axis in dict.fromkeys(axis for each in shares.values() for axis in each):
        gathers = _Transfers("P, once", step.layers, per_stack=1)
        gathers = gathers if axis == plan.ring_of_hosts else _weight_gathers(step)
        kinds = [(ALL_GATHER, "weights", dtype, sizes, gathers) for dtype, sizes in gathered.items()]
        scatters = _gradient_scatters(step)
        kinds += [(scatter, "gradients", dtype, sizes, scatters) for dtype, sizes in scattered.items()]
        for kind, part, dtype, sizes, transfers in kinds:
            count = sent = repeated = 0.0
            for path, elements in sizes.items():
                if (share := shares[path].get(axis)) is None:
                    continue
                bytes_ = wire_bytes(kind, elements * share * wire_itemsize(dtype), plan.sizes[axis])
                if (uses := uses_of[path]) == ("blocks",):
                    # A stack holds the layers of one place in the period.
                    (place, of_layer), in_stack = layer_path(path), shapes[path][0]
                    count += transfers.per_stack * (in_stack / all_layers if transfers.per_stack > 1 else 1)
                    unused = transfers.unused.get(of_layer, 0) if place == 0 else 0
                    sent += (transfers.layers / step.layers - unused / in_stack) * bytes_
                    repeated += transfers.repeated / step.layers * bytes_
                else:
                    times = sum(transfers.rest[use] for use in uses) if transfers.rest else 1
                    count += times
                    sent += times * bytes_
            yield ExpectedCollective(kind, (axis,), part, dtype, count, sent, transfers.formula, repeated)


def _weight_gathers(step: _Step) -> _Transfers:
    config, runs, remat_blocks = step.config, step.runs, step.config.remat_policy.policy == "block"
    layers = runs.forward_passes + runs.layer_passes
    match step.plan.zero.gather_per:
        case "chunk":
            layers = runs.chunk_gathers * config.layers_per_chunk
            return _Transfers("2P - P/chunks: a chunk once forward, once backward", layers, layers)
        case "layer" if runs.stage_sends and config.layers_per_chunk == 1:
            return _Transfers("2Pm of the layers, ahead and for backward", layers, layers)
        case "layer":
            # Backward gathers each layer again, and once more where a whole remat block runs again before it.
            again = (1 + remat_blocks) * runs.layer_passes
            times = bool(runs.forward_passes) + (2 + remat_blocks) * bool(runs.layer_passes)
            unused: dict[tuple[str, ...], float] = {
                ("blocks", branch, key): config.parallel.microbatches
                for branch, unneeded in step.unneeded.items()
                for key in unneeded.weights
                # A loop gathers prefetched matrices all the same: all of a period's first layer.
                if step.unrolled == 1 or (branch not in step.plan.prefetch and len(config.model.kinds) == 1)
            }
            formula, layers = f"{times}Pm of the layers, one by one", layers + again
            return _Transfers(formula, layers, layers, again * step.unrolled, unused=unused)
    return _Transfers("P, once", step.layers, per_stack=1)


def _gradient_scatters(step: _Step) -> _Transfers:
    config, runs, model = step.config, step.runs, step.config.model
    sharing = model.layers // model.unique_layers  # layers with one set of weights: each contributes to its gradient
    twice = "; a tied table twice" if config.objective.ties_embeddings(model) else ""
    rest = {"embedding": runs.embedding_grad, "head": runs.head}
    match step.plan.zero.scatter_per:
        case "chunk":
            layers = runs.chunk_scatters * config.layers_per_chunk
            rest = {use: times / config.parallel.microbatches for use, times in rest.items()}
            return _Transfers(f"P, chunk by chunk{twice}", layers * sharing, layers, rest=rest)
        case "layer":
            return _Transfers(f"Pm, layer by layer{twice}", runs.layer_passes * sharing, runs.layer_passes, rest=rest)
    return _Transfers("P, once", step.layers, step.layers // sharing)


def _gradient_sums(step: _Step) -> Iterator[ExpectedCollective]:
    """All-reduces of gradients over their Plan.grad_reduce_axes, once per step: of all arrays without ZeRO; with it of
    vectors, and of shards over other axes than `data`."""
    plan, dtype = step.plan, step.config.precision.reduce
    formula = "what is not scattered, once" if plan.zero.stage else "P, once"
    for axes, sizes in sorted(plan.summed_gradients.items()):
        devices = math.prod(plan.sizes[axis] for axis in axes)
        sent = wire_bytes(ALL_REDUCE, sum(sizes) * dtype_bytes(dtype), devices)
        yield ExpectedCollective(ALL_REDUCE, axes, "gradients", dtype, len(sizes), sent, formula)


def _scalars(step: _Step) -> Iterator[ExpectedCollective]:
    """Scalars of a step: losses and their weights, the gradients' norm, and under dynamic loss scaling their
    finiteness."""
    plan, precision, objective = step.plan, step.config.precision, step.config.objective
    losses = 1 + (objective.predicts_tokens and objective.has_sequence_label)
    scalars = [
        (plan.active_axes(*TOKEN_AXES), step.accum_dtype, 2 * losses, "losses and weights"),
        (plan.active_axes(PIPE), step.accum_dtype, losses, "losses"),
    ]
    norm_dtype = at_least_float32(precision.params)
    scalars += [(axes, norm_dtype, 1, "norm of the gradients") for axes in plan.gradient_axes]
    if precision.loss_scale == "dynamic":
        scalars.append((plan.active_axes(*MESH_AXES), "int32", 1, "gradients are finite"))
    for axes, dtype, count, formula in scalars:
        if axes:
            yield step.row(ALL_REDUCE, axes, "scalars", (dtype, 1), count, formula)
