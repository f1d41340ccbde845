"""Where the bytes of a device go, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is of the phase in which a step holds most,
with activations by formula (arXiv:2205.05198, table 2, in the dtypes and with the kernels of this program); the
compiler's peak is within a tenth of the sum on a TPU."""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding

from spmd_lm.config.schema import Remat, RunConfig
from spmd_lm.ops import cross_entropy
from spmd_lm.parallel.pipeline.schedule import make_schedule
from spmd_lm.parallel.pipeline.schedule_table import schedule_table
from spmd_lm.parallel.plan import Plan, Tree, padded_vocab


def bytes_of(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def per_device(plan: Plan, shapes: Tree, specs: Tree, dtype: str) -> int:
    """Bytes that one device holds of arrays of these shapes under these specs."""
    size = lambda x, spec: math.prod(NamedSharding(plan.mesh, spec).shard_shape(x.shape))  # noqa: E731
    return sum(jax.tree.leaves(jax.tree.map(size, shapes, specs))) * bytes_of(dtype)


def block_bytes(config: RunConfig, plan: Plan, kernel: str) -> float:
    """Bytes per token and layer that the backward pass finds saved on a device."""
    m, t, size = config.model, plan.layout.model, bytes_of(config.precision.compute)
    stream = 1 / t if plan.sequence else 1  # each device's share of what lies between the branches
    remat = config.remat_policy
    if remat.policy == "block":  # the input of each remat block, and all of one of them
        no_remat = config.model_copy(update={"remat": Remat()})
        size_, inside = remat.layers_per_block, block_bytes(no_remat, plan, kernel)
        return m.width * stream * size / size_ + inside * size_ / config.layers_per_chunk
    if remat.recomputes_layer:
        return m.width * stream * size * remat.saved_streams
    whole = 4 * m.width * stream * size  # the stream twice, and both norms' results
    # q, k, v, and what attention gives; the MLP's hidden layer on both sides of its activation, and what gates it
    hidden = 3 if m.activation == "swiglu" else 2
    split = (2 * m.width + 2 * m.kv_width + hidden * m.mlp_dim) / t * size
    masks = 2 * m.width * stream if m.dropout else 0  # a byte each, at the branches' ends
    seen = 0.75 if m.causal else 1  # two blocks of queries: the first sees half of the keys
    scores = 2 * size + (size + 1 if m.attention_dropout else 0)  # before and after softmax; dropped ones, and a mask
    if kernel != "xla" or remat.recomputes_attention:
        scores = 0
    return whole + split + masks + scores * seen * m.heads * m.context / t


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """Of the parts of a step on one device, in the compute dtype where nothing else is said.

    layer: one layer's weights, whole.  ends: what has no layers, whole; table: the embedding's of it.  held: the
    weights that are there in every phase.  added: sums of gradients, in the parameters' dtype.  shards: all gradients
    as they are kept, in the dtype in which they are reduced.  wide: how much larger float32, or wider, is.  stream: a
    microbatch's residual stream.  saved: what backward finds saved of the layers that run in one loop.  logits: of one
    chunk, in float32 or wider.  work: the MLP's hidden layer and its gradient; the stream, where it is made whole."""

    layer: int
    ends: int
    table: int
    held: int
    added: int
    shards: int
    wide: int
    stream: int
    saved: int
    logits: int
    work: int

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, kernel: str) -> "_Bytes":
        c, p, t = config, config.precision, plan.layout.model
        layers = c.model.layers_kept // plan.layout.pipe
        early = plan.zero.scatters_in_loop
        width_of, widest = bytes_of(p.compute), max(bytes_of("float32"), bytes_of(p.compute))

        of = lambda specs, dtype: {  # noqa: E731
            name: per_device(plan, plan.placed_shapes[name], specs[name], dtype) for name in plan.placed_shapes
        }
        whole, shards = of(plan.gathered_specs, p.compute), of(plan.param_specs, p.compute)
        low = p.compute != p.params
        copied = low or plan.zero.stage > 0  # else the parameters themselves serve
        held = shards["blocks"] * low if plan.zero.gathers_in_loop else whole["blocks"] * copied
        added = sum(of(plan.param_specs, p.params).values()) if early else sum(whole.values()) * widest // width_of
        tokens = c.train.batch // c.parallel.microbatches // plan.layout.batch_shards * c.model.context
        vocab = padded_vocab(c.model.vocab, t) // t if c.objective.of_tokens else 0
        work = tokens * (2 * c.model.mlp_dim / t + (3 * c.model.width if plan.sequence else 0)) * width_of
        return cls(
            layer=whole["blocks"] // layers,
            ends=(whole["embedding"] + whole["head"]) * copied,
            table=whole["embedding"],
            held=held,
            added=added,
            shards=sum(of(plan.param_specs, p.reduce).values()) if early else sum(whole.values()),
            wide=widest // width_of,
            stream=tokens * c.model.width * width_of // (t if plan.sequence else 1),
            saved=int(tokens * c.layers_per_chunk * block_bytes(c, plan, kernel)),
            logits=min(tokens * vocab * widest, cross_entropy.CHUNK_BYTES),
            work=int(work),
        )


def _row(weights: int, gradients: int, activations: int, work: int) -> dict[str, int]:
    return {"weights": weights, "gradients": gradients, "activations": activations, "working set": work}


def _phases(config: RunConfig, plan: Plan, kernel: str) -> dict[str, dict[str, int]]:
    """Bytes per device beside the state, where a step may hold most: in the head, in backward through the blocks, and
    in the embedding's gradient."""
    b, accumulating, early = (
        _Bytes.of(config, plan, kernel),
        config.parallel.microbatches > 1,
        plan.zero.scatters_in_loop,
    )
    one_by_one, added = plan.zero.gathers_in_loop, b.added * accumulating
    return {
        "the head": _row(b.held + b.ends, b.table + added, b.saved, 2 * b.logits),
        "backward through the blocks": _row(
            b.held + (b.layer if one_by_one else b.ends), b.shards + added + b.layer * early, b.saved, b.work
        ),
        "the embedding's gradient": _row(  # a copy of it in float32 or wider, and what that is rounded to
            b.held + b.ends * accumulating, b.shards + added, 0, b.table * (1 + b.wide)
        ),
    }


def _pipeline_phases(config: RunConfig, plan: Plan, kernel: str) -> dict[str, dict[str, int]]:
    """The same with several stages, whose ticks hold all slots for what waits to go on."""
    p, b, early = config.parallel, _Bytes.of(config, plan, kernel), plan.zero.scatters_in_loop
    table = schedule_table(make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks))
    breadth_first = p.schedule == "breadth_first"
    chunk = b.layer * config.layers_per_chunk if breadth_first and early else 0
    slots = (table.input_slots + table.grad_slots + 2 + breadth_first * p.microbatches) * b.stream
    held, layerwise = b.held + b.ends, b.layer if plan.zero.gathers_in_loop and not chunk else 0
    # Of a chunk all microbatches are added up before anything is scattered: shards are not added to.
    made = b.shards + chunk * b.wide if chunk else b.added + b.layer
    if breadth_first:  # both ends are done apart from the layers
        edges = p.microbatches * b.stream
        head = _row(held + chunk, b.table * b.wide, slots, 2 * b.logits)
        embedding = _row(b.ends, b.added, edges, b.table * (1 + b.wide))
    else:
        head = _row(held, b.added + b.table, slots + b.saved, 2 * b.logits)
        embedding = _row(held, b.added, slots, b.table * (1 + b.wide))
    return {
        "the head": head,
        "backward through the blocks": _row(held + chunk + layerwise, made, slots + b.saved, b.work),
        "the embedding's gradient": embedding,
    }


def phases_of(config: RunConfig, plan: Plan, kernel: str) -> dict[str, dict[str, int]]:
    return (_pipeline_phases if plan.layout.pipe > 1 else _phases)(config, plan, kernel)


def fullest(config: RunConfig, plan: Plan, kernel: str) -> str:
    """The phase of a step in which it holds most."""
    phases = phases_of(config, plan, kernel)
    return max(phases, key=lambda phase: sum(phases[phase].values()))


def table(config: RunConfig, plan: Plan, kernel: str) -> dict[str, int]:
    """Bytes per device of each thing that a step holds in its fullest phase; STATE of them from step to step."""
    state = per_device(plan, plan.placed_shapes, plan.param_specs, config.precision.params)
    most = phases_of(config, plan, kernel)[fullest(config, plan, kernel)]
    return {"parameters": state, "adam moments": 2 * state} | most


STATE = ("parameters", "adam moments")
"""The rows of `table` that outlive a step."""
