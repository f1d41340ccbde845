"""Collectives that a train step must send, by the papers' formulas.

Bytes are those that a device sends in a step on a ring of n: for an all-reduce of S bytes 2S(n-1)/n, for an all-gather
to or a reduce-scatter from S bytes S(n-1)/n.  Sources: tensor parallelism arXiv:1909.08053, section 3; sequence
parallelism arXiv:2205.05198, section 4.2; ZeRO arXiv:1910.02054, section 7; pipelines arXiv:2104.04473, section 4.1,
and arXiv:2211.05953.  In the formulas there are L layers and m microbatches; A is the bytes of one microbatch's
activations on a device, sequences x context x width; P is the number of parameters; L and P are one stage's.

Rows are means over pipeline stages.  A permute of S bytes counts S for every device, even where the first or the last
stage has no neighbour to send to."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from spmd_lm.axes import MESH_AXES, PIPE, TOKEN_AXES
from spmd_lm.config.layers import layer_path
from spmd_lm.config.schema import ExtractiveQA, RunConfig
from spmd_lm.cost_model import context_collectives, expert_collectives
from spmd_lm.cost_model.counted_step import ExpectedCollective, Step, Unneeded
from spmd_lm.cost_model.layer_trace import Sent, has_own_block, trace_layers
from spmd_lm.cost_model.sizes import at_least_float32, dtype_bytes, wire_itemsize
from spmd_lm.cost_model.trained_head import trains_before_logits
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE, REDUCE_SCATTER, wire_bytes
from spmd_lm.parallel.plan import Plan


def expected_collectives(config: RunConfig, plan: Plan) -> list[ExpectedCollective]:
    """Collectives of one train step under `plan`; none over axes of one device."""
    step = Step(config, plan)
    over_model = (_embedding, _blocks, _head) if plan.layout.model > 1 else ()
    sources = (
        _stage_sends,
        *over_model,
        expert_collectives.experts,
        context_collectives.over_context,
        _zero,
        _gradient_sums,
        _scalars,
    )
    return [row for source in sources for row in source(step)]


def _stage_sends(step: Step) -> Iterator[ExpectedCollective]:
    """Sends between stages.  Without sequence parallelism each device of `model` sends a slice of the activations, and
    the receiving stage gathers them."""
    n, sequence = step.plan.layout.model, step.plan.sequence
    if not step.runs.stage_sends:
        return
    slices = n if sequence or step.config.model.context // step.plan.layout.context % n == 0 else 1
    formula = "A, a tick and direction" if slices == 1 else f"A/{slices}, a tick and direction"
    sent = step.compute, step.tokens * step.config.model.width / slices
    yield step.row(COLLECTIVE_PERMUTE, (PIPE,), "messages", sent, step.runs.stage_sends, formula)
    if slices > 1 and not sequence:
        formula, received = "A, where one arrives", step.runs.received
        yield step.row(ALL_GATHER, step.model_axes, "messages", step.activations, received, formula)


def _embedding(step: Step) -> Iterator[ExpectedCollective]:
    """Sum over vocabulary shards, forward; gather of its sharded gradient, backward."""
    runs, a = step.runs, step.activations
    # A pipeline does not save the sum: a norm after the embedding needs it again in backward.
    again = runs.embedding_grad if step.config.model.norm == "post" and runs.stage_sends else 0
    yield from step.reductions("embedding", runs.embedding + again, "m: A forward")
    if step.plan.sequence and step.plan.trains("embedding", "tokens"):
        yield step.row(ALL_GATHER, step.model_axes, "embedding", a, runs.embedding_grad, "m: A backward")


class _BranchRuns(NamedTuple):
    """A device's reductions and gathers of one A in a branch, per step, and how many of each backward repeats."""

    reductions: float
    gathers: float
    repeated: float
    gathered_again: float


def _runs_of_branches(step: Step) -> dict[str, _BranchRuns]:
    """Counts of Megatron's f and g: in each branch a reduction forward and one backward per layer, and remat's."""
    config, runs, remat = step.config, step.runs, step.config.remat_policy
    repeated = remat.repeated_reductions(scan=step.plan.scan)
    again = {"attention": min(1, repeated), "mlp": max(0, repeated - 1)}
    outputs = step.unread_outputs
    dropped = {  # reductions and gathers of each of these
        "attention": (again["attention"], remat.unneeded_gathers // 2),
        "mlp": (1 + again["mlp"], min(1, remat.unneeded_gathers)),
    }
    gathers_again = {branch: step.gathers_again(branch) for branch in dropped}
    unneeded = {branch: step.unneeded.get(branch, Unneeded()) for branch in dropped}
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


def _own_blocks(step: Step) -> Iterator[ExpectedCollective]:
    """Collectives of the user's block, by its trace."""
    runs = step.runs
    counts = Counter[Sent]()
    for _, share, traced in trace_layers(step.config, step.plan, kernel="xla"):
        backward = runs.layer_passes
        for passes, sent in ((runs.forward_passes + backward, traced.forward.sent), (backward, traced.backward.sent)):
            counts.update({each: share * passes * count for each, count in sent.items() if passes})
    for (kind, axes, dtype, elements), count in counts.items():
        yield step.row(kind, axes, "blocks", (dtype, elements * step.rows), count, "as the block's code sends it")


def _blocks(step: Step) -> Iterator[ExpectedCollective]:
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


def _plain_branches(step: Step, branches: int, runs: _BranchRuns) -> Iterator[ExpectedCollective]:
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


def _collective_matmuls(step: Step, branches: int, runs: _BranchRuns) -> Iterator[ExpectedCollective]:
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


def _head(step: Step) -> Iterator[ExpectedCollective]:
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


def _zero(step: Step) -> Iterator[ExpectedCollective]:
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


def _weight_gathers(step: Step) -> _Transfers:
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


def _gradient_scatters(step: Step) -> _Transfers:
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


def _gradient_sums(step: Step) -> Iterator[ExpectedCollective]:
    """All-reduces of gradients over their Plan.grad_reduce_axes, once per step: of all arrays without ZeRO; with it of
    vectors, and of shards over other axes than `data`."""
    plan, dtype = step.plan, step.config.precision.reduce
    formula = "what is not scattered, once" if plan.zero.stage else "P, once"
    for axes, sizes in sorted(plan.summed_gradients.items()):
        devices = math.prod(plan.sizes[axis] for axis in axes)
        sent = wire_bytes(ALL_REDUCE, sum(sizes) * dtype_bytes(dtype), devices)
        yield ExpectedCollective(ALL_REDUCE, axes, "gradients", dtype, len(sizes), sent, formula)


def _scalars(step: Step) -> Iterator[ExpectedCollective]:
    """Scalars of a step: losses and their weights, the gradients' norm, and under dynamic loss scaling their
    finiteness."""
    plan, precision, objective = step.plan, step.config.precision, step.config.objective
    weights = 1 + (objective.predicts_tokens and objective.has_sequence_label)
    losses = weights + bool(step.experts) * expert_collectives.LOSSES
    scalars = [
        (plan.active_axes(*TOKEN_AXES), step.accum_dtype, losses + weights, "losses and weights"),
        (plan.active_axes(PIPE), step.accum_dtype, losses, "losses"),
    ]
    norm_dtype = at_least_float32(precision.params)
    scalars += [(axes, norm_dtype, 1, "norm of the gradients") for axes in plan.gradient_axes]
    if precision.loss_scale == "dynamic":
        scalars.append((plan.active_axes(*MESH_AXES), "int32", 1, "gradients are finite"))
    for axes, dtype, count, formula in scalars:
        if axes:
            yield step.row(ALL_REDUCE, axes, "scalars", (dtype, 1), count, formula)
    for axes in filter(None, (plan.active_axes(*TOKEN_AXES), plan.active_axes(PIPE))):
        for size in expert_collectives.statistics(step):
            yield step.row(ALL_REDUCE, axes, "scalars", (step.accum_dtype, size), 1, "counts of tokens")
