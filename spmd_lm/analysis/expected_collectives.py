"""What a step must send, kind by kind, as the papers' formulas say.

Bytes are those that each device sends in one step on a ring of n: an all-reduce of S bytes 2S(n-1)/n, an all-gather or
reduce-scatter to or from S bytes S(n-1)/n.  Sources: tensor parallelism arXiv:1909.08053, section 3; sequence
parallelism arXiv:2205.05198, section 4.2; ZeRO arXiv:1910.02054, section 7; pipelines arXiv:2104.04473, section 4.1,
and arXiv:2211.05953.  In the formulas L layers, m microbatches, A = sequences x context x width bytes of activations on
a device in one microbatch, P the parameters' elements; with a pipeline L and P are those of a stage.

Stages of a pipeline differ in what they send: rows are the mean over them.  A permute of S bytes counts S for every
device, also where the first stage or the last has nobody to send to."""

import dataclasses
import math
from collections.abc import Iterator

import jax

from spmd_lm.axes import BATCH_AXES, DATA, MESH_AXES, MODEL, PIPE, DimNames, is_dim_names
from spmd_lm.config.schema import RunConfig, Span
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.parallel.pipeline.schedule_table import schedule_table
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import SHARD

AR, AG, RS, PERMUTE = "all-reduce", "all-gather", "reduce-scatter", "collective-permute"


@dataclasses.dataclass(frozen=True)
class ExpectedCollective:
    """Collectives of one kind that theory asks for.  axes: of the mesh.  count: runs in a step, array by array.  bytes:
    on the wire, per device and step.  repeated: bytes of them that backward sends again; a CPU's compiler may merge
    them with the first, where no loop keeps the two apart."""

    kind: str
    axes: tuple[str, ...]
    part: str
    dtype: str
    count: float
    bytes: float
    formula: str
    repeated: float = 0.0


def wire(kind: str, full: float, n: int) -> float:
    """Bytes that one device sends.  full: bytes of the gathered or unreduced array."""
    return full * (n - 1) / n * (2 if kind == AR else 1)


def size(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def expected_collectives(config: RunConfig, plan: Plan) -> list[ExpectedCollective]:
    """Of one train step under `plan`; what one device alone would need not to send is not in it."""
    work = Work.of(config, plan)
    kinds = (_messages, _model, _weights, _sums, _scalars)
    return [row for rows_of in kinds for row in rows_of(config, plan, work)]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device does in a step, the mean over the stages of a pipeline.

    layers: of a stage.  together: of them, those that run in one loop.  ahead: passes of a layer forward that keep
    nothing but what enters the chunk.  passes: of a layer forward and at once backward.  embedding, unembedding, head:
    of microbatches, the second the embedding's gradient.  arrivals, ticks: of activations and gradients.  fetches,
    completes: of a chunk's layers, where they serve all microbatches (breadth_first)."""

    layers: int
    together: int
    ahead: float
    passes: float
    embedding: float
    unembedding: float
    head: float
    arrivals: float = 0
    ticks: int = 0
    breadth_first: bool = False
    fetches: float = 0
    completes: float = 0

    @classmethod
    def of(cls, config: RunConfig, plan: Plan) -> "Work":
        p, m = config.parallel, config.parallel.microbatches
        stages = plan.layout.pipe
        layers, together = config.model.layers // stages, config.layers_per_chunk
        if stages == 1:
            return cls(layers, together, 0, m * layers, m, m, m)
        table = schedule_table(make_schedule(p.schedule, stages, m, config.chunks))
        mean = {name: float(times.mean()) for name, times in table.runs(p.run_idle_stages).items()}
        breadth_first = p.schedule == "breadth_first"
        idle = 0 if breadth_first or p.run_idle_stages else mean["forward_to_head"]
        return cls(
            layers,
            together,
            ahead=(mean["forward_active"] - idle) * together,
            passes=mean["backward_active"] * together,
            embedding=mean["forward_from_embedding"],
            unembedding=m * mean["embedding_of_all"] if breadth_first else mean["backward_from_embedding"],
            head=m * mean["head_of_all"] if breadth_first else mean["backward_to_head"],
            arrivals=mean["forward_receives"] + mean["backward_receives"],
            ticks=sum(table.ticks.values()),
            breadth_first=breadth_first,
            fetches=mean["forward_loads_chunk"] + mean["backward_loads_chunk"],
            completes=mean["backward_last_of_chunk"],
        )


def activation_bytes(config: RunConfig, plan: Plan) -> int:
    """A: of one microbatch, on a device, whole."""
    tokens = config.train.batch // config.parallel.microbatches // plan.layout.batch_shards * config.model.context
    return tokens * config.model.width * size(config.precision.compute)


def _messages(config: RunConfig, plan: Plan, work: Work) -> Iterator[ExpectedCollective]:
    """What stages tell each other: one device's part of an activation, in every tick and each direction."""
    n, compute, a = plan.layout.model, config.precision.compute, activation_bytes(config, plan)
    if not work.ticks:
        return
    parts = n if plan.sequence or config.model.context % n == 0 else 1
    formula = "A, a tick and direction" if parts == 1 else f"A/{parts}, a tick and direction"
    yield ExpectedCollective(PERMUTE, (PIPE,), "messages", compute, work.ticks, work.ticks * a / parts, formula)
    if parts > 1 and not plan.sequence:
        sent = work.arrivals * wire(AG, a, n)
        yield ExpectedCollective(AG, (MODEL,), "messages", compute, work.arrivals, sent, "A, where one arrives")


def _model(config: RunConfig, plan: Plan, work: Work) -> Iterator[ExpectedCollective]:
    """What tensor and sequence parallelism send over `model`."""
    n, c, compute, a = plan.layout.model, config.model, config.precision.compute, activation_bytes(config, plan)
    if n == 1:
        return

    def row(kind, part, count, formula, full=a, dtype=compute, repeated=0.0) -> ExpectedCollective:
        return ExpectedCollective(
            kind, (MODEL,), part, dtype, count, count * wire(kind, full, n), formula, repeated * wire(kind, full, n)
        )

    wide = jax.numpy.promote_types(compute, "float32").name
    remat = config.remat_policy
    again = remat.repeated_reductions
    sums = (4 + again) * work.passes + 2 * work.ahead
    gathers = (6 + remat.repeated_gathers) * work.passes + 2 * work.ahead
    if work.breadth_first and not config.scan_layers:  # what ends a chunk serves the head alone, long before
        unused = work.passes / work.together
        sums, gathers = sums - (1 + again) * unused, gathers - remat.unneeded_gathers * unused
    ahead = ", and 2 ahead of it" if work.ahead else ""
    each = f"{4 + again:g}Lm: A, 2 forward, 2 backward a layer{ahead}"
    repeated = again * work.passes
    # A norm behind the embedding needs its sum again where a pipeline keeps none.
    embedding = work.embedding + (work.unembedding if c.norm == "post" and work.ticks else 0)
    if not plan.sequence:
        yield row(AR, "embedding", embedding, "m: A forward")
        yield row(AR, "blocks", sums, each, repeated=repeated)
    else:
        yield row(RS, "embedding", embedding, "m: A forward")
        yield row(AG, "embedding", work.unembedding, "m: A backward")
        yield row(RS, "blocks", sums, each, repeated=repeated)
        formula = f"6Lm: A, 2 forward, 2 backward, and 2 of what was not saved whole{ahead}"
        yield row(AG, "blocks", gathers, formula, repeated=2 * work.passes)
    tokens = a // c.width // size(compute)
    if plan.sequence and config.objective.of_rows:
        yield row(AR, "head", work.head, "m: a number, of the first token", size(wide), wide)
    if plan.sequence and isinstance(config.objective, Span):
        yield row(AG, "head", work.head, "m: two numbers of each token", 2 * tokens * size(compute))
    if config.objective.of_tokens:
        if plan.sequence:
            yield row(AG, "head", work.head, "m: A forward")
        yield row(RS if plan.sequence else AR, "head", work.head, "m: A backward")
        formula = "3m: maximum, normaliser and target's logit of each token"
        yield row(AR, "head", 3 * work.head, formula, tokens * size(wide), wide)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter.  elements: of it, whole over `data`, on one device of `model` and `pipe`.  uses: the places where a
    step uses it, each of which gives it a gradient."""

    names: DimNames
    layered: bool
    elements: int
    uses: tuple[str, ...]

    @property
    def matrix(self) -> bool:
        return SHARD in self.names


def _leaves(config: RunConfig, plan: Plan) -> list[_Leaf]:
    kept = jax.tree_util.tree_leaves_with_path(plan.sharded_names, is_leaf=is_dim_names)
    leaves = []
    for (path, names), leaf in zip(kept, jax.tree.leaves(plan.placed_shapes), strict=True):
        place, *name = (key.key for key in path)
        on = {axis for name in names for axis in plan.param_rules.axes(name)} & {MODEL, PIPE}
        elements = math.prod(leaf.shape) // math.prod(plan.sizes[axis] for axis in on)
        tied = config.objective.ties(config.model) and (place, *name) == ("embedding", "tokens")
        uses = ("embedding", "head") if tied else (place,)
        leaves.append(_Leaf(names, place == "blocks", elements, uses))
    return leaves


def _weights(config: RunConfig, plan: Plan, work: Work) -> Iterator[ExpectedCollective]:
    """What ZeRO gathers and scatters, ring by ring; each ring leaves the next a shard to pass on."""
    if not plan.zero.stage:
        return
    p, early, layerwise = config.precision, plan.zero.scatters_in_loop, plan.zero.gathers_in_loop
    grouped = config.remat_policy.policy == "block"
    gathers, again, told = _gathers(work, grouped) if layerwise else (work.layers, 0, "P, once")
    scatters = (work.completes * work.together if work.breadth_first else work.passes) if early else work.layers
    sharing = config.model.layers // config.model.layers_kept  # layers that each layer's weights serve
    ends = {"embedding": work.unembedding, "head": work.head}
    if work.breadth_first:  # for all microbatches at once
        ends = {name: times / config.parallel.microbatches for name, times in ends.items()}
    # A stack is one array where it goes as a whole, and as many as there are runs where it goes layer by layer.
    of_stack = {
        AG: (gathers, gathers if layerwise else 1),
        RS: (scatters * sharing, scatters) if early else (scatters, scatters // sharing),
    }
    matrices = [leaf for leaf in _leaves(config, plan) if leaf.matrix]

    def row(ring: str, kind: str, part: str, dtype: str, formula: str, share: float) -> ExpectedCollective:
        count = sent = repeated = 0.0
        for leaf in matrices:
            one = wire(kind, leaf.elements * share * size(dtype), plan.sizes[ring])
            if leaf.layered:
                layers, pieces = of_stack[kind]
                times, twice = layers / work.layers, again / work.layers if kind == AG else 0
            else:
                times = pieces = sum(ends[use] for use in leaf.uses) if early and kind == RS else 1
                twice = 0
            count, sent, repeated = count + pieces, sent + times * one, repeated + twice * one
        return ExpectedCollective(kind, (ring,), part, dtype, count, sent, formula, repeated)

    each = "chunk by chunk" if work.breadth_first else "layer by layer"
    twice = "; a tied table twice" if config.objective.ties(config.model) else ""
    back = f"P{'' if work.breadth_first else 'm'}, {each}{twice}" if early else "P, once"
    share = 1.0
    for ring in plan.nontrivial_axes(DATA):
        yield row(ring, AG, "weights", p.compute, told, share)
        yield row(ring, RS, "gradients", p.reduce, back, share)
        share /= plan.sizes[ring]


def _gathers(work: Work, grouped: bool) -> tuple[float, float, str]:
    """Of layers one by one under ZeRO-3: how many, how many of them again in backward, and a formula.  grouped: whether
    layers run again in groups before each goes back."""
    if work.breadth_first:
        return work.fetches * work.together, 0, "2P - P/chunks: a chunk once forward, once backward"
    if work.ticks and work.together == 1:
        return work.ahead + work.passes, 0, "2Pm of the layers, ahead and for backward"
    times = 2 + bool(work.ahead) + grouped
    again = (1 + grouped) * work.passes
    return work.ahead + work.passes + again, again, f"{times}Pm of the layers, one by one"


def _sums(config: RunConfig, plan: Plan, work: Work) -> Iterator[ExpectedCollective]:
    """Gradients that are all-reduced, once a step: all of them without ZeRO; else vectors, and shards over replicas;
    and what a split sequence has touched in parts."""
    reduce = config.precision.reduce
    leaves = _leaves(config, plan)
    for axes in sorted({plan.grad_reduce_axes(leaf.names) for leaf in leaves} - {()}):
        here = [leaf for leaf in leaves if plan.grad_reduce_axes(leaf.names) == axes]
        full = sum(leaf.elements / (plan.layout.data if leaf.matrix else 1) for leaf in here) * size(reduce)
        sent = wire(AR, full, math.prod(plan.sizes[axis] for axis in axes))
        formula = "what is not scattered, once" if plan.zero.stage else "P, once"
        yield ExpectedCollective(AR, axes, "gradients", reduce, len(here), sent, formula)


def _scalars(config: RunConfig, plan: Plan, work: Work) -> Iterator[ExpectedCollective]:
    """Losses, the weights they are means over, the gradients' norm, and with a scale whether they are finite: a few
    bytes, sent once."""
    losses = 1 + (config.objective.of_tokens and config.objective.of_rows)
    wide = jax.numpy.promote_types(config.precision.compute, "float32").name
    master = jax.numpy.promote_types(config.precision.params, "float32").name
    if batch := plan.nontrivial_axes(*BATCH_AXES):
        n = plan.layout.batch_shards
        yield ExpectedCollective(
            AR, batch, "scalars", wide, 2 * losses, 2 * losses * wire(AR, size(wide), n), "losses and weights"
        )
    if stages := plan.nontrivial_axes(PIPE):
        yield ExpectedCollective(
            AR, stages, "scalars", wide, losses, losses * wire(AR, size(wide), plan.layout.pipe), "losses"
        )
    kept = jax.tree.leaves(plan.sharded_names, is_leaf=is_dim_names)
    splits = {plan.nontrivial_axes(*(axis for name in names for axis in plan.param_rules.axes(name))) for names in kept}
    for axes in sorted(splits - {()}):
        n = math.prod(plan.sizes[axis] for axis in axes)
        yield ExpectedCollective(AR, axes, "scalars", master, 1, wire(AR, size(master), n), "norm of the gradients")
    if config.precision.loss_scale == "dynamic" and (every := plan.nontrivial_axes(*MESH_AXES)):
        n = math.prod(plan.sizes[axis] for axis in every)
        yield ExpectedCollective(AR, every, "scalars", "int32", 1, wire(AR, size("int32"), n), "gradients are finite")
