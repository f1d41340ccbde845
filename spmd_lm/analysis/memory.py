"""Memory per device, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is that of the phase in which a step holds
most, with activations by formula (arXiv:2205.05198, table 2, in the dtypes and with the kernels of this program); on a
TPU the compiler's peak is within a tenth of the sum."""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding

from spmd_lm.config.schema import Remat, RunConfig
from spmd_lm.ops import cross_entropy
from spmd_lm.parallel.pipeline.schedule import make_schedule, schedule_table
from spmd_lm.parallel.plan import Plan, Tree, padded_vocab


def table(config: RunConfig, plan: Plan, kernel: str) -> dict[str, int]:
    """Bytes per device of each thing that a step holds in its fullest phase."""
    return state(config, plan) | fullest_phase(config, plan, kernel).rows


def state(config: RunConfig, plan: Plan) -> dict[str, int]:
    """The rows of `table` that outlive a step."""
    params = bytes_per_device(plan, plan.placed_shapes, plan.param_specs, config.precision.params)
    return {"parameters": params, config.optim.moments: config.optim.num_moments * params}


def dtype_bytes(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def at_least_float32(dtype: str) -> str:
    return jax.numpy.promote_types(dtype, "float32").name


def tokens_per_device(config: RunConfig, plan: Plan) -> int:
    """Tokens of one microbatch on a device, with the whole sequence."""
    return config.train.batch // config.parallel.microbatches // plan.layout.batch_shards * config.model.context


def activation_bytes(config: RunConfig, plan: Plan) -> int:
    """One microbatch's residual stream on a device, with the whole sequence."""
    return tokens_per_device(config, plan) * config.model.width * dtype_bytes(config.precision.compute)


def bytes_per_device(plan: Plan, shapes: Tree, specs: Tree, dtype: str) -> int:
    """Bytes that one device holds of arrays of these shapes under these PartitionSpecs."""

    def shard_size(x: jax.ShapeDtypeStruct, spec: jax.sharding.PartitionSpec) -> int:
        return math.prod(NamedSharding(plan.mesh, spec).shard_shape(x.shape))

    return sum(jax.tree.leaves(jax.tree.map(shard_size, shapes, specs))) * dtype_bytes(dtype)


def saved_bytes_per_token(config: RunConfig, plan: Plan, kernel: str) -> float:
    """Bytes per token and layer that forward saves for backward on a device."""
    m, shards, size = config.model, plan.layout.model, dtype_bytes(config.precision.compute)
    width = m.width * (1 / shards if plan.sequence else 1)  # of the residual stream
    remat = config.remat_policy
    if remat.policy == "block":  # the input of each remat block, and everything inside one of them
        inside = saved_bytes_per_token(config.model_copy(update={"remat": Remat()}), plan, kernel)
        return width * size / remat.layers_per_block + inside * remat.layers_per_block / config.layers_per_chunk
    if remat.recomputes_layer:
        return width * size * remat.saved_streams
    streams = 4 * width * size  # both branches' inputs, and both norms' outputs
    # q, k, v and attention's output; the MLP's hidden layer before and after the activation, and what gates it
    hidden = 3 if m.activation == "swiglu" else 2
    sharded = (2 * m.width + 2 * m.kv_width + hidden * m.mlp_dim) / shards * size
    masks = 2 * width if m.dropout else 0  # one byte per element, at the end of each branch
    if kernel != "xla" or remat.recomputes_attention:
        return streams + sharded + masks
    scores = 2 * size  # before and after softmax
    if m.attention_dropout:
        scores += size + 1  # after dropout, and its mask
    visible = 0.75 if m.causal else 1  # queries run in two blocks: the first sees half of the keys
    return streams + sharded + masks + scores * visible * m.heads * m.context / shards


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes on one device, in the compute dtype unless another is named; weights are unsharded over `data`.

    layer: one layer's weights.  embedding: its weights.  ends: the weights of embedding and head, 0 where the
    parameters themselves serve.  resident: layers' weights that are present in every phase.  accumulated: the sum of
    gradients over microbatches, in the parameters' dtype or float32.  gradients: those of a step at its end, in the
    dtype in which they are reduced.  widening: how many times larger float32, or a wider compute dtype, is.  stream:
    one microbatch's residual stream.  saved: what forward saves in the layers that run in one loop.  logits: of one
    chunk of cross-entropy, at least float32.  workspace: the MLP's hidden layer and its gradient, and where the
    sequence is sharded the gathered stream."""

    layer: int
    embedding: int
    ends: int
    resident: int
    accumulated: int
    gradients: int
    widening: int
    stream: int
    saved: int
    logits: int
    workspace: int

    @classmethod
    def from_config(cls, config: RunConfig, plan: Plan, kernel: str) -> "_Sizes":
        m, p, shards = config.model, config.precision, plan.layout.model
        size, wide = dtype_bytes(p.compute), dtype_bytes(at_least_float32(p.compute))

        def by_module(specs: Tree, dtype: str) -> dict[str, int]:
            shapes = plan.placed_shapes
            return {name: bytes_per_device(plan, shapes[name], specs[name], dtype) for name in shapes}

        def sharded(dtype: str) -> int:
            return sum(by_module(plan.param_specs, dtype).values())

        gathered = by_module(plan.gathered_specs, p.compute)
        cast = p.compute != p.params
        copied = cast or plan.zero.stage > 0  # otherwise the parameters themselves serve
        resident = gathered["blocks"] if copied else 0
        if plan.zero.gathers_in_loop:
            resident = by_module(plan.param_specs, p.compute)["blocks"] if cast else 0
        unsharded = sum(gathered.values())
        scatters_in_loop = plan.zero.scatters_in_loop
        tokens = tokens_per_device(config, plan)
        vocab = padded_vocab(m.vocab, shards) // shards if config.objective.predicts_tokens else 0
        return cls(
            layer=gathered["blocks"] // (m.unique_layers // plan.layout.pipe),
            embedding=gathered["embedding"],
            ends=gathered["embedding"] + gathered["head"] if copied else 0,
            resident=resident,
            accumulated=sharded(p.params) if scatters_in_loop else unsharded * wide // size,
            gradients=sharded(p.reduce) if scatters_in_loop else unsharded,
            widening=wide // size,
            stream=activation_bytes(config, plan) // (shards if plan.sequence else 1),
            saved=int(tokens * config.layers_per_chunk * saved_bytes_per_token(config, plan, kernel)),
            logits=min(tokens * vocab * wide, cross_entropy.CHUNK_BYTES),
            workspace=int(tokens * (2 * m.mlp_dim / shards + (3 * m.width if plan.sequence else 0)) * size),
        )


@dataclasses.dataclass(frozen=True)
class Phase:
    """Bytes per device, apart from the state, at a point of a step where it may hold most."""

    name: str
    weights: int
    gradients: int
    activations: int
    workspace: int

    @property
    def rows(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "activations": self.activations,
            "working set": self.workspace,
        }


HEAD, BLOCKS, EMBEDDING = "the head", "backward through the blocks", "the embedding's gradient"


def phases(config: RunConfig, plan: Plan, kernel: str) -> list[Phase]:
    sizes = _Sizes.from_config(config, plan, kernel)
    return _pipeline_phases(config, plan, sizes) if plan.layout.pipe > 1 else _phases(config, plan, sizes)


def fullest_phase(config: RunConfig, plan: Plan, kernel: str) -> Phase:
    return max(phases(config, plan, kernel), key=lambda phase: sum(phase.rows.values()))


def _phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    accumulates = config.parallel.microbatches > 1
    accumulated = sizes.accumulated if accumulates else 0
    gradients = sizes.gradients + accumulated
    in_backward = sizes.resident + (sizes.layer if plan.zero.gathers_in_loop else sizes.ends)
    unscattered = sizes.layer if plan.zero.scatters_in_loop else 0
    at_the_end = sizes.resident + (sizes.ends if accumulates else 0)
    # The embedding's gradient is in at least float32, and then rounded to the compute dtype.
    rounding = sizes.embedding * (1 + sizes.widening)
    return [
        Phase(HEAD, sizes.resident + sizes.ends, sizes.embedding + accumulated, sizes.saved, 2 * sizes.logits),
        Phase(BLOCKS, in_backward, gradients + unscattered, sizes.saved, sizes.workspace),
        Phase(EMBEDDING, at_the_end, gradients, 0, rounding),
    ]


def _pipeline_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    """With several stages, whose buffers of inputs and cotangents exist in every tick."""
    p = config.parallel
    table = schedule_table(make_schedule(p.schedule, plan.layout.pipe, p.microbatches, config.chunks))
    breadth_first = p.schedule == "breadth_first"
    buffers = (table.input_slots + table.grad_slots + 2 + (p.microbatches if breadth_first else 0)) * sizes.stream
    weights, layer_gradients = sizes.resident + sizes.ends, sizes.accumulated + sizes.layer
    chunk = 0
    if plan.zero.scatter == "chunk":
        # A chunk's gradients are summed over all microbatches before they are scattered, into nothing else.
        chunk = sizes.layer * config.layers_per_chunk
        layer_gradients = sizes.gradients + chunk * sizes.widening
    layer = sizes.layer if plan.zero.gather == "layer" else 0
    rounding = sizes.embedding * (1 + sizes.widening)
    if breadth_first:  # embedding and head run apart from the layers
        edges = p.microbatches * sizes.stream
        head = Phase(HEAD, weights + chunk, sizes.embedding * sizes.widening, buffers, 2 * sizes.logits)
        embedding = Phase(EMBEDDING, sizes.ends, sizes.accumulated, edges, rounding)
    else:
        gradients = sizes.accumulated + sizes.embedding
        head = Phase(HEAD, weights, gradients, buffers + sizes.saved, 2 * sizes.logits)
        embedding = Phase(EMBEDDING, weights, sizes.accumulated, buffers, rounding)
    blocks = Phase(BLOCKS, weights + chunk + layer, layer_gradients, buffers + sizes.saved, sizes.workspace)
    return [head, blocks, embedding]
