"""The collectives that a train step must send, by the papers' formulas.

Bytes are what each device sends in one step on a ring of n: for an all-reduce of S bytes 2S(n-1)/n, for an all-gather
to or a reduce-scatter from S bytes S(n-1)/n.  Sources: tensor parallelism arXiv:1909.08053, section 3; sequence
parallelism arXiv:2205.05198, section 4.2; ZeRO arXiv:1910.02054, section 7; pipelines arXiv:2104.04473, section 4.1,
and arXiv:2211.05953.  In the formulas there are L layers and m microbatches; A is the bytes of one microbatch's
activations on a device, sequences x context x width; P is the number of parameters.  In a pipeline L and P are those of
one stage.

Stages of a pipeline send different amounts: rows are means over the stages.  A permute of S bytes counts S for every
device, even where the first or the last stage has no neighbour to send to."""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax

from spmd_lm.analysis.memory import activation_bytes, at_least_float32, dtype_bytes, tokens_per_device
from spmd_lm.analysis.ring import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER, wire_bytes
from spmd_lm.axes import BATCH_AXES, DATA, MESH_AXES, MODEL, PIPE, DimNames, is_dim_names
from spmd_lm.config.schema import ExtractiveQA, RunConfig
from spmd_lm.parallel.pipeline.schedule import make_schedule, schedule_table
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import SHARD

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpectedCollective:
    """All collectives of one kind, over the same mesh axes, for one part of the step.

    count: collectives in a step, one per array.  bytes: on the wire, per device and step.  repeated: bytes of them that
    backward sends again; where layers are unrolled a CPU's compiler may merge these with the first."""

    kind: str
    axes: Axes
    part: str
    dtype: str
    count: float
    bytes: float
    formula: str
    repeated: float = 0.0


def expected_collectives(config: RunConfig, plan: Plan) -> list[ExpectedCollective]:
    """Those of one train step under `plan`.  Axes of one device have none."""
    step = _Step(config, plan, RunCounts.from_config(config, plan))
    sources = (_pipeline, _embedding, _blocks, _head, _zero, _gradient_sums, _scalars)
    return [row for source in sources for row in source(step)]


@dataclasses.dataclass(frozen=True)
class RunCounts:
    """How often a device runs each part of a step, the mean over the stages of a pipeline.

    layers: layers of a stage, chunk_layers of which form a chunk and run in one loop.  forward_passes: layers run
    forward alone, saving only the chunk's input.  layer_passes: layers run forward with backward right after.
    embedding, embedding_grad, head: microbatches run through each.  messages: sends to neighbours, one per tick and
    direction, and received those that carry an activation or a gradient.  chunk_gathers, chunk_scatters: how often a
    breadth-first schedule starts on another chunk, and completes a chunk's gradients."""

    layers: int
    chunk_layers: int
    forward_passes: float
    layer_passes: float
    embedding: float
    embedding_grad: float
    head: float
    received: float = 0
    messages: int = 0
    breadth_first: bool = False
    chunk_gathers: float = 0
    chunk_scatters: float = 0

    @classmethod
    def from_config(cls, config: RunConfig, plan: Plan) -> "RunCounts":
        p, m = config.parallel, config.parallel.microbatches
        stages = plan.layout.pipe
        layers, chunk_layers = config.model.layers // stages, config.layers_per_chunk
        if stages == 1:
            return cls(layers, chunk_layers, 0, m * layers, m, m, m)
        table = schedule_table(make_schedule(p.schedule, stages, m, config.chunks))
        mean = {name: float(times.mean()) for name, times in table.runs(p.run_idle_stages).items()}
        breadth_first = p.schedule == "breadth_first"
        # Otherwise what goes to the head runs forward only as the beginning of its backward pass.
        skipped = 0 if breadth_first or p.run_idle_stages else mean["forward_to_head"]
        return cls(
            layers,
            chunk_layers,
            forward_passes=(mean["forward_active"] - skipped) * chunk_layers,
            layer_passes=mean["backward_active"] * chunk_layers,
            embedding=mean["forward_from_embedding"],
            embedding_grad=m * mean["embedding_of_all"] if breadth_first else mean["backward_from_embedding"],
            head=m * mean["head_of_all"] if breadth_first else mean["backward_to_head"],
            received=mean["forward_receives"] + mean["backward_receives"],
            messages=sum(table.ticks.values()),
            breadth_first=breadth_first,
            chunk_gathers=mean["forward_loads_chunk"] + mean["backward_loads_chunk"],
            chunk_scatters=mean["backward_last_of_chunk"],
        )


@dataclasses.dataclass(frozen=True)
class _Array:
    """What a collective sends: bytes of the gathered or unreduced array."""

    dtype: str
    bytes: float


@dataclasses.dataclass(frozen=True)
class _Step:
    """What all sources of collectives read."""

    config: RunConfig
    plan: Plan
    runs: RunCounts

    @functools.cached_property
    def activations(self) -> _Array:
        return _Array(self.config.precision.compute, activation_bytes(self.config, self.plan))

    def row(
        self, kind: str, axes: Axes, part: str, array: _Array, count: float, formula: str, repeated: float = 0.0
    ) -> ExpectedCollective:
        """`count` collectives of `array` over `axes`, of which backward repeats `repeated`."""
        bytes_ = wire_bytes(kind, array.bytes, math.prod(self.plan.sizes[axis] for axis in axes))
        return ExpectedCollective(kind, axes, part, array.dtype, count, count * bytes_, formula, repeated * bytes_)


# --- pipeline ---------------------------------------------------------------------------------------------------------


def _pipeline(step: _Step) -> Iterator[ExpectedCollective]:
    """Messages between stages.  Without sequence parallelism each device of `model` sends a slice of the activations,
    which the receiving stage gathers."""
    n, runs, a = step.plan.layout.model, step.runs, step.activations
    if not runs.messages:
        return
    slices = n if step.plan.sequence or step.config.model.context % n == 0 else 1
    formula = "A, a tick and direction" if slices == 1 else f"A/{slices}, a tick and direction"
    message = _Array(a.dtype, a.bytes / slices)
    yield step.row(COLLECTIVE_PERMUTE, (PIPE,), "messages", message, runs.messages, formula)
    if slices > 1 and not step.plan.sequence:
        yield step.row(ALL_GATHER, (MODEL,), "messages", a, runs.received, "A, where one arrives")


# --- tensor and sequence parallelism, over `model` --------------------------------------------------------------------


def _embedding(step: _Step) -> Iterator[ExpectedCollective]:
    """The sum over vocabulary shards, forward; the gather of its sharded gradient, backward."""
    runs, a = step.runs, step.activations
    if step.plan.layout.model == 1:
        return
    forward = runs.embedding
    if step.config.model.norm == "post" and runs.messages:
        # The norm after the embedding needs the sum again in backward: a pipeline does not save it.
        forward += runs.embedding_grad
    if not step.plan.sequence:
        yield step.row(ALL_REDUCE, (MODEL,), "embedding", a, forward, "m: A forward")
    else:
        yield step.row(REDUCE_SCATTER, (MODEL,), "embedding", a, forward, "m: A forward")
        yield step.row(ALL_GATHER, (MODEL,), "embedding", a, runs.embedding_grad, "m: A backward")


def _blocks(step: _Step) -> Iterator[ExpectedCollective]:
    """Megatron's f and g: two reductions forward and two backward per layer, and what remat repeats."""
    runs, a, remat = step.runs, step.activations, step.config.remat_policy
    if step.plan.layout.model == 1:
        return
    repeated = remat.repeated_reductions
    reductions = (4 + repeated) * runs.layer_passes + 2 * runs.forward_passes
    gathers = (6 + remat.repeated_gathers) * runs.layer_passes + 2 * runs.forward_passes
    if runs.breadth_first and not step.config.scan_layers:
        # The output of a stage's last layer serves the head alone, which has used it long before.
        unneeded = runs.layer_passes / runs.chunk_layers
        reductions -= (1 + repeated) * unneeded
        gathers -= remat.unneeded_gathers * unneeded
    ahead = ", and 2 ahead of it" if runs.forward_passes else ""
    formula = f"{4 + repeated:g}Lm: A, 2 forward, 2 backward a layer{ahead}"
    again = repeated * runs.layer_passes
    if not step.plan.sequence:
        yield step.row(ALL_REDUCE, (MODEL,), "blocks", a, reductions, formula, again)
    else:
        yield step.row(REDUCE_SCATTER, (MODEL,), "blocks", a, reductions, formula, again)
        formula = f"6Lm: A, 2 forward, 2 backward, and 2 of what was not saved whole{ahead}"
        yield step.row(ALL_GATHER, (MODEL,), "blocks", a, gathers, formula, 2 * runs.layer_passes)


def _head(step: _Step) -> Iterator[ExpectedCollective]:
    """What the objective's heads send, and cross-entropy over vocabulary shards."""
    config, sequence, a, runs = step.config, step.plan.sequence, step.activations, step.runs.head
    if step.plan.layout.model == 1:
        return
    compute, wide = config.precision.compute, at_least_float32(config.precision.compute)
    tokens = tokens_per_device(config, step.plan)
    if sequence and config.objective.has_sequence_label:
        number = _Array(wide, dtype_bytes(wide))
        yield step.row(ALL_REDUCE, (MODEL,), "head", number, runs, "m: a number, of the first token")
    if sequence and isinstance(config.objective, ExtractiveQA):
        logits = _Array(compute, 2 * tokens * dtype_bytes(compute))
        yield step.row(ALL_GATHER, (MODEL,), "head", logits, runs, "m: two numbers of each token")
    if config.objective.predicts_tokens:
        if sequence:
            yield step.row(ALL_GATHER, (MODEL,), "head", a, runs, "m: A forward")
        yield step.row(REDUCE_SCATTER if sequence else ALL_REDUCE, (MODEL,), "head", a, runs, "m: A backward")
        per_token = _Array(wide, tokens * dtype_bytes(wide))
        formula = "3m: maximum, normaliser and target's logit of each token"
        yield step.row(ALL_REDUCE, (MODEL,), "head", per_token, 3 * runs, formula)


# --- data parallelism -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """elements: on one device of `model` and `pipe`, unsharded over `data`.  uses: the parts of a step that use it;
    each contributes to its gradient."""

    names: DimNames
    stacked: bool
    elements: int
    uses: tuple[str, ...]

    @property
    def is_matrix(self) -> bool:
        """Whether ZeRO shards it."""
        return SHARD in self.names


def _parameters(step: _Step) -> list[_Parameter]:
    config, plan = step.config, step.plan
    tied_table = ("embedding", "tokens") if config.objective.ties_embeddings(config.model) else None
    leaves = jax.tree_util.tree_leaves_with_path(plan.sharded_names, is_leaf=is_dim_names)
    parameters = []
    for (path, names), shape in zip(leaves, jax.tree.leaves(plan.placed_shapes), strict=True):
        keys = tuple(key.key for key in path)
        axes = {axis for name in names for axis in plan.param_rules.axes(name)} & {MODEL, PIPE}
        elements = math.prod(shape.shape) // math.prod(plan.sizes[axis] for axis in axes)
        uses = ("embedding", "head") if keys == tied_table else (keys[0],)
        parameters.append(_Parameter(names, keys[0] == "blocks", elements, uses))
    return parameters


@dataclasses.dataclass(frozen=True)
class _Transfers:
    """How often ZeRO gathers weights, or scatters gradients, in one step.

    layers: layers that are sent, and `repeated` those of them that are sent again.  per_stack: collectives for each
    array of the layers.  ends: times that the arrays of the embedding and the head are sent, by use; None is once."""

    formula: str
    layers: float
    per_stack: float
    repeated: float = 0
    ends: dict[str, float] | None = None


def _zero(step: _Step) -> Iterator[ExpectedCollective]:
    """ZeRO's collectives, one mesh axis of `data` after the other; each leaves the next a shard to send."""
    plan, precision = step.plan, step.config.precision
    if not plan.zero.stage:
        return
    matrices = [parameter for parameter in _parameters(step) if parameter.is_matrix]
    weights, gradients = _weight_gathers(step), _gradient_scatters(step)
    share = 1.0
    for axis in plan.nontrivial_axes(DATA):
        for kind, part, dtype, transfers in (
            (ALL_GATHER, "weights", precision.compute, weights),
            (REDUCE_SCATTER, "gradients", precision.reduce, gradients),
        ):
            count = sent = repeated = 0.0
            for matrix in matrices:
                bytes_ = wire_bytes(kind, matrix.elements * share * dtype_bytes(dtype), plan.sizes[axis])
                if matrix.stacked:
                    count += transfers.per_stack
                    sent += transfers.layers / step.runs.layers * bytes_
                    repeated += transfers.repeated / step.runs.layers * bytes_
                else:
                    times = sum(transfers.ends[use] for use in matrix.uses) if transfers.ends else 1
                    count += times
                    sent += times * bytes_
            yield ExpectedCollective(kind, (axis,), part, dtype, count, sent, transfers.formula, repeated)
        share /= plan.sizes[axis]


def _weight_gathers(step: _Step) -> _Transfers:
    runs, remat_blocks = step.runs, step.config.remat_policy.policy == "block"
    layers = runs.forward_passes + runs.layer_passes
    match step.plan.zero.gather:
        case "chunk":
            layers = runs.chunk_gathers * runs.chunk_layers
            return _Transfers("2P - P/chunks: a chunk once forward, once backward", layers, layers)
        case "layer" if runs.messages and runs.chunk_layers == 1:
            return _Transfers("2Pm of the layers, ahead and for backward", layers, layers)
        case "layer":
            # Backward gathers each layer again, and once more where a whole remat block runs again before it.
            repeated = (1 + remat_blocks) * runs.layer_passes
            times = 2 + bool(runs.forward_passes) + remat_blocks
            return _Transfers(f"{times}Pm of the layers, one by one", layers + repeated, layers + repeated, repeated)
    return _Transfers("P, once", runs.layers, per_stack=1)


def _gradient_scatters(step: _Step) -> _Transfers:
    config, runs = step.config, step.runs
    # Layers that share one set of weights: each contributes to its gradient.
    sharing = config.model.layers // config.model.unique_layers
    twice = "; a tied table twice" if config.objective.ties_embeddings(config.model) else ""
    ends = {"embedding": runs.embedding_grad, "head": runs.head}
    match step.plan.zero.scatter:
        case "chunk":
            layers = runs.chunk_scatters * runs.chunk_layers
            ends = {use: times / config.parallel.microbatches for use, times in ends.items()}
            return _Transfers(f"P, chunk by chunk{twice}", layers * sharing, layers, ends=ends)
        case "layer":
            layers = runs.layer_passes
            return _Transfers(f"Pm, layer by layer{twice}", layers * sharing, layers, ends=ends)
    return _Transfers("P, once", runs.layers, runs.layers // sharing)


def _gradient_sums(step: _Step) -> Iterator[ExpectedCollective]:
    """All-reduces of gradients, once per step: of all gradients without ZeRO; with it of vectors, and of shards over
    replicas; over `model` where each device has seen only its part of a sequence."""
    plan, reduce = step.plan, step.config.precision.reduce
    parameters = _parameters(step)
    formula = "what is not scattered, once" if plan.zero.stage else "P, once"
    for axes in sorted({plan.grad_reduce_axes(parameter.names) for parameter in parameters} - {()}):
        all_reduced = [parameter for parameter in parameters if plan.grad_reduce_axes(parameter.names) == axes]
        elements = sum(each.elements / (plan.layout.data if each.is_matrix else 1) for each in all_reduced)
        devices = math.prod(plan.sizes[axis] for axis in axes)
        sent = wire_bytes(ALL_REDUCE, elements * dtype_bytes(reduce), devices)
        yield ExpectedCollective(ALL_REDUCE, axes, "gradients", reduce, len(all_reduced), sent, formula)


def _scalars(step: _Step) -> Iterator[ExpectedCollective]:
    """A few bytes per step: losses and the weights they are averaged with, the gradients' norm, and under dynamic loss
    scaling whether the gradients are finite."""
    config, plan = step.config, step.plan
    losses = 1 + (config.objective.predicts_tokens and config.objective.has_sequence_label)

    def scalar(axes: Axes, dtype: str, count: int, formula: str) -> ExpectedCollective:
        return step.row(ALL_REDUCE, axes, "scalars", _Array(dtype, dtype_bytes(dtype)), count, formula)

    wide = at_least_float32(config.precision.compute)
    if batch_axes := plan.nontrivial_axes(*BATCH_AXES):
        yield scalar(batch_axes, wide, 2 * losses, "losses and weights")
    if pipe_axes := plan.nontrivial_axes(PIPE):
        yield scalar(pipe_axes, wide, losses, "losses")
    shardings = set()
    for names in jax.tree.leaves(plan.sharded_names, is_leaf=is_dim_names):
        shardings.add(plan.nontrivial_axes(*(axis for name in names for axis in plan.param_rules.axes(name))))
    for axes in sorted(shardings - {()}):
        yield scalar(axes, at_least_float32(config.precision.params), 1, "norm of the gradients")
    if config.precision.loss_scale == "dynamic" and (all_axes := plan.nontrivial_axes(*MESH_AXES)):
        yield scalar(all_axes, "int32", 1, "gradients are finite")
