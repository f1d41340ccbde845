"""What a step of GPT must send, kind by kind, as the papers' formulas say.

Bytes are those that each device sends in one step on a ring of n: an all-reduce of S bytes 2S(n-1)/n, an all-gather or
reduce-scatter to or from S bytes S(n-1)/n.  Sources: tensor parallelism arXiv:1909.08053, section 3; sequence
parallelism arXiv:2205.05198, section 4.2; ZeRO arXiv:1910.02054, section 7.  In the formulas L layers, m microbatches,
A = sequences x context x width bytes of activations on a device in one microbatch, P the parameters' elements."""

import dataclasses
import math
from collections.abc import Iterator

import jax

from spmd_lm.axes import BATCH_AXES, DATA, MODEL, Names, is_names
from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.plan import Plan
from spmd_lm.parallel.zero import SHARD

AR, AG, RS = "all-reduce", "all-gather", "reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind that theory asks for.  axes: of the mesh.  count: arrays, of all runs in a step.  bytes:
    on the wire, per device and step.  repeated: bytes of them that backward sends again; a CPU's compiler may merge
    them with the first, where no loop keeps the two apart."""

    kind: str
    axes: tuple[str, ...]
    part: str
    dtype: str
    count: int
    bytes: float
    formula: str
    repeated: float = 0.0


def wire(kind: str, full: float, n: int) -> float:
    """Bytes that one device sends.  full: bytes of the gathered or unreduced array."""
    return full * (n - 1) / n * (2 if kind == AR else 1)


def size(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def rows(config: RunConfig, plan: Plan) -> list[Row]:
    """Of one train step under `plan`; what one device alone would need not to send is not in it."""
    kinds = (_model, _weights, _sums, _scalars)
    return [row for rows_of in kinds for row in rows_of(config, plan)]


def _model(config: RunConfig, plan: Plan) -> Iterator[Row]:
    """What tensor and sequence parallelism send over `model`."""
    n, c, m, compute = plan.layout.model, config.model, config.parallel.microbatches, config.precision.compute
    if n == 1:
        return
    layers, tokens = c.layers, config.train.batch // m // plan.layout.batch_shards * c.context
    a = tokens * c.width * size(compute)

    def row(kind, part, count, formula, full=a, dtype=compute, repeated=0) -> Row:
        one = m * wire(kind, full, n)
        return Row(kind, (MODEL,), part, dtype, m * count, count * one, formula, repeated * one)

    again = config.remat.policy == "full"  # what ends the attention branch is made again; what ends the MLP is not
    per_layer = "5Lm" if again else "4Lm"
    if not plan.sequence:
        yield row(AR, "embedding", 1, "m: A forward")
        formula = f"{per_layer}: A, 2 forward, 2 backward a layer"
        yield row(AR, "blocks", (4 + again) * layers, formula, repeated=again * layers)
        yield row(AR, "head", 1, "m: A backward")
    else:
        yield row(RS, "embedding", 1, "m: A forward")
        yield row(AG, "embedding", 1, "m: A backward")
        formula = f"{per_layer}: A, 2 forward, 2 backward a layer"
        yield row(RS, "blocks", (4 + again) * layers, formula, repeated=again * layers)
        formula = "6Lm: A, 2 forward, 2 backward, and 2 of what was not saved whole"
        yield row(AG, "blocks", 6 * layers, formula, repeated=2 * layers)
        yield row(AG, "head", 1, "m: A forward")
        yield row(RS, "head", 1, "m: A backward")
    wide = jax.numpy.promote_types(compute, "float32").name
    yield row(AR, "head", 3, "3m: maximum, normaliser and target's logit of each token", tokens * size(wide), wide)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A parameter.  elements: of it, whole over `data`, on one device of `model`.  uses: in how many places of a step,
    which is how many gradients it gets."""

    names: Names
    layered: bool
    elements: int
    uses: int

    @property
    def matrix(self) -> bool:
        return SHARD in self.names


def _leaves(config: RunConfig, plan: Plan) -> list[_Leaf]:
    kept = jax.tree_util.tree_leaves_with_path(plan.kept, is_leaf=is_names)
    split = lambda names: any(MODEL in plan.parameters.axes(name) for name in names)  # noqa: E731
    tied = ("embedding", "tokens") if config.model.tie_embeddings else None  # the embedding's and the head's
    leaves = []
    for (path, names), leaf in zip(kept, jax.tree.leaves(plan.placed_shapes), strict=True):
        path = tuple(key.key for key in path)
        elements = math.prod(leaf.shape) // (plan.layout.model if split(names) else 1)
        leaves.append(_Leaf(names, path[0] == "blocks", elements, uses=2 if path == tied else 1))
    return leaves


def _weights(config: RunConfig, plan: Plan) -> Iterator[Row]:
    """What ZeRO gathers and scatters, ring by ring; each ring leaves the next a shard to pass on."""
    if not plan.zero:
        return
    p, m, layers = config.precision, config.parallel.microbatches, config.model.layers
    once = config.parallel.reduce_once
    matrices = [leaf for leaf in _leaves(config, plan) if leaf.matrix]
    early, layerwise = plan.zero > 1 and not once, plan.zero == 3 and not once
    turns = lambda leaf: m * leaf.uses if early else 1  # noqa: E731
    share = 1.0
    for ring in plan.live(DATA):
        n = plan.sizes[ring]
        sent = lambda kind, leaf, dtype, n=n, share=share: wire(kind, leaf.elements * share * size(dtype), n)  # noqa: E731
        passes = lambda leaf: 2 * m if layerwise and leaf.layered else 1  # noqa: E731
        pieces = lambda leaf, apart: layers if apart and leaf.layered else 1  # noqa: E731
        yield Row(
            AG,
            (ring,),
            "weights",
            p.compute,
            sum(passes(leaf) * pieces(leaf, layerwise) for leaf in matrices),
            sum(passes(leaf) * sent(AG, leaf, p.compute) for leaf in matrices),
            "2Pm of the layers, one by one" if layerwise else "P, once",
            repeated=sum((passes(leaf) - 1) * sent(AG, leaf, p.compute) for leaf in matrices),
        )
        yield Row(
            RS,
            (ring,),
            "gradients",
            p.reduce,
            sum(turns(leaf) * pieces(leaf, early) for leaf in matrices),
            sum(turns(leaf) * sent(RS, leaf, p.reduce) for leaf in matrices),
            "Pm, layer by layer; a tied table twice" if early else "P, once",
        )
        share /= n


def _sums(config: RunConfig, plan: Plan) -> Iterator[Row]:
    """Gradients that are all-reduced, once a step: all of them without ZeRO; else vectors, and shards over replicas;
    and what a split sequence has touched in parts."""
    reduce = config.precision.reduce
    leaves = _leaves(config, plan)
    for axes in sorted({plan.unsummed(leaf.names) for leaf in leaves} - {()}):
        here = [leaf for leaf in leaves if plan.unsummed(leaf.names) == axes]
        full = sum(leaf.elements / (plan.layout.data if leaf.matrix else 1) for leaf in here) * size(reduce)
        sent = wire(AR, full, math.prod(plan.sizes[axis] for axis in axes))
        formula = "what is not scattered, once" if plan.zero else "P, once"
        yield Row(AR, axes, "gradients", reduce, len(here), sent, formula)


def _scalars(config: RunConfig, plan: Plan) -> Iterator[Row]:
    """The loss, the weight it is a mean over, and the gradients' norm: a few bytes, sent once."""
    wide = jax.numpy.promote_types(config.precision.compute, "float32").name
    master = jax.numpy.promote_types(config.precision.params, "float32").name
    if batch := plan.live(*BATCH_AXES):
        n = plan.layout.batch_shards
        yield Row(AR, batch, "scalars", wide, 2, 2 * wire(AR, size(wide), n), "loss and weight")
    kept = jax.tree.leaves(plan.kept, is_leaf=is_names)
    splits = {plan.live(*(axis for name in names for axis in plan.parameters.axes(name))) for names in kept}
    for axes in sorted(splits - {()}):
        n = math.prod(plan.sizes[axis] for axis in axes)
        yield Row(AR, axes, "scalars", master, 1, wire(AR, size(master), n), "norm of the gradients")
