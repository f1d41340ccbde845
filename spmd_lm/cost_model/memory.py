"""Memory per device, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is that of the phase in which a step holds
most, with activations by formula (arXiv:2205.05198, table 2, in the dtypes and with the kernels of this program); on a
TPU the compiler's peak is within a tenth of the sum."""

import functools
from typing import NamedTuple

import jax

from spmd_lm.config.attention_kernels import choose_kernel
from spmd_lm.config.schema import Remat, RunConfig
from spmd_lm.ops import cross_entropy
from spmd_lm.parallel.mesh import Layout
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Plan, padded_vocab

VISIBLE_SCORES = 0.75
"""Of a causal model's scores, those that XLA's attention computes: queries run in two blocks, of which the first sees
half of the keys."""


def table(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Bytes per device of each thing that a step holds in its fullest phase."""
    return state(config, plan) | fullest_phase(config, plan).rows


def state(config: RunConfig, plan: Plan) -> dict[str, int]:
    """The rows of `table` that outlive a step."""
    params = plan.elements_per_device() * dtype_bytes(config.precision.params)
    return {"parameters": params, config.optim.moments: config.optim.num_moments * params}


@functools.cache
def dtype_bytes(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


@functools.cache
def at_least_float32(dtype: str) -> str:
    return jax.numpy.promote_types(dtype, "float32").name


def tokens_per_device(config: RunConfig, layout: Layout) -> int:
    """Tokens of one microbatch on a device, with the whole sequence."""
    return config.train.batch // config.parallel.microbatches // layout.batch_shards * config.model.context


def stream_bytes(config: RunConfig, plan: Plan) -> int:
    """One microbatch's residual stream on a device."""
    size = tokens_per_device(config, plan.layout) * config.model.width * dtype_bytes(config.precision.compute)
    return size // (plan.layout.model if plan.sequence else 1)


def saved_bytes_per_token(config: RunConfig, plan: Plan) -> float:
    """Bytes per token and layer that forward saves for backward on a device."""
    m, shards, size = config.model, plan.layout.model, dtype_bytes(config.precision.compute)
    width = m.width * (1 / shards if plan.sequence else 1)  # of the residual stream
    remat = config.remat_policy
    if remat.policy == "block":  # the input of each remat block, and everything inside one of them
        inside = saved_bytes_per_token(config.model_copy(update={"remat": Remat()}), plan)
        return (
            width * size / remat.layers_per_remat_block
            + inside * remat.layers_per_remat_block / config.layers_per_chunk
        )
    if remat.recomputes_layer:
        return width * size * remat.saved_streams
    streams = 4 * width * size  # both branches' inputs, and both norms' outputs
    # q, k, v and attention's output; the MLP's hidden layer before and after the activation, and what gates it
    hidden = 3 if m.activation == "swiglu" else 2
    sharded = (2 * m.width + 2 * m.kv_width + hidden * m.mlp_dim) / shards * size
    masks = 2 * width if m.dropout else 0  # one byte per element, at the end of each branch
    if choose_kernel(config, plan.platform).kernel != "xla" or remat.recomputes_attention:
        return streams + sharded + masks
    # Scores before and after softmax; and after dropout, with its mask.
    scores = 2 * size + (size + 1 if m.attention_dropout else 0)
    visible = VISIBLE_SCORES if m.causal else 1
    return streams + sharded + masks + scores * visible * m.heads * m.context / shards


class _Sizes:
    """Bytes on one device, in the compute dtype unless another is named; weights are unsharded over `data`."""

    def __init__(self, config: RunConfig, plan: Plan):
        m, p, shards = config.model, config.precision, plan.layout.model
        size, wide = dtype_bytes(p.compute), dtype_bytes(at_least_float32(p.compute))
        scatters_in_backward = plan.zero.scatters_in_backward
        cast = p.compute != p.params
        copied = cast or plan.zero.stage > 0  # otherwise the parameters themselves serve
        parts = {part: plan.elements_per_device(part, gathered=True) * size for part in plan.shapes}

        self.layers = m.unique_layers // plan.layout.pipe  # of which one stage has weights
        self.layer = parts["blocks"] // self.layers  # the weights of one
        # What is gathered ahead, for one layer; its gradients are scattered as much later.
        ahead = sum(plan.elements_per_device("blocks", key, gathered=True) for key in plan.prefetch)
        self.ahead = ahead * size // self.layers
        self.embedding = parts["embedding"]  # its weights
        self.rest = parts["embedding"] + parts["head"] if copied else 0  # the weights of embedding and head
        self.resident = parts["blocks"] if copied else 0  # layers' weights that are present in every phase
        if plan.zero.gathers_on_use:
            self.resident = cast * plan.elements_per_device("blocks") * size
        self.widening = wide // size  # how many times larger float32, or a wider compute dtype, is
        # The embedding's gradient is in at least float32, and then rounded to the compute dtype.
        self.rounding = self.embedding * (1 + self.widening)
        sharded, unsharded = plan.elements_per_device(), sum(parts.values())
        # The sum of gradients over microbatches, in the parameters' dtype or float32.
        self.accumulated = sharded * dtype_bytes(p.params) if scatters_in_backward else unsharded * self.widening
        # The gradients of a step at its end, in the dtype in which they are reduced.
        self.gradients = sharded * dtype_bytes(p.reduce) if scatters_in_backward else unsharded
        # What forward saves in the layers that run in one loop.
        tokens = tokens_per_device(config, plan.layout)
        self.saved = int(tokens * config.layers_per_chunk * saved_bytes_per_token(config, plan))
        # The logits of one chunk of cross-entropy, at least float32.
        vocab = padded_vocab(m.vocab, shards) // shards if config.objective.predicts_tokens else 0
        self.logits = min(tokens * vocab * wide, cross_entropy.CHUNK_BYTES)
        # The MLP's hidden layer and its gradient, and where the sequence is sharded the gathered stream.
        self.workspace = int(tokens * (2 * m.mlp_dim / shards + (3 * m.width if plan.sequence else 0)) * size)


class Phase(NamedTuple):
    """Bytes per device, apart from the state, at a point of a step where it may hold most."""

    name: str
    weights: int
    gradients: int
    activations: int
    workspace: int

    @property
    def rows(self) -> dict[str, int]:
        return dict(zip(("weights", "gradients", "activations", "working set"), self[1:], strict=True))


HEAD, BLOCKS, EMBEDDING = "the head", "backward through the blocks", "the embedding's gradient"


def fullest_phase(config: RunConfig, plan: Plan) -> Phase:
    phases = _pipeline_phases if plan.layout.pipe > 1 else _phases
    return max(phases(config, plan, _Sizes(config, plan)), key=lambda phase: sum(phase.rows.values()))


def _phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    accumulates = config.parallel.microbatches > 1
    accumulated = sizes.accumulated if accumulates else 0
    gradients = sizes.gradients + accumulated
    in_backward = sizes.resident + (sizes.layer + sizes.ahead if plan.zero.gathers_on_use else sizes.rest)
    unscattered = sizes.layer + sizes.ahead if plan.zero.scatters_in_backward else 0
    at_the_end = sizes.resident + (sizes.rest if accumulates else 0)
    return [
        Phase(HEAD, sizes.resident + sizes.rest, sizes.embedding + accumulated, sizes.saved, 2 * sizes.logits),
        Phase(BLOCKS, in_backward, gradients + unscattered, sizes.saved, sizes.workspace),
        Phase(EMBEDDING, at_the_end, gradients, 0, sizes.rounding),
    ]


def _pipeline_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    """With several stages, whose buffers of inputs and cotangents exist in every tick."""
    p = config.parallel
    counts = schedule_counts(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
    breadth_first, stream = p.schedule == "breadth_first", stream_bytes(config, plan)
    buffers = (counts.input_slots + counts.output_grad_slots + 2 + (p.microbatches if breadth_first else 0)) * stream
    weights, layer_gradients = sizes.resident + sizes.rest, sizes.accumulated + sizes.layer + sizes.ahead
    chunk = 0
    if plan.zero.scatter_per == "chunk":
        # A chunk's gradients are summed over all microbatches before they are scattered, into nothing else.
        chunk = sizes.layer * config.layers_per_chunk
        layer_gradients = sizes.gradients + chunk * sizes.widening
    chunks = chunk * (2 if plan.prefetch_chunks else 1)
    layer = sizes.layer + sizes.ahead if plan.zero.gather_per == "layer" else 0
    if breadth_first:  # embedding and head run apart from the layers
        head = Phase(HEAD, weights + chunks, sizes.embedding * sizes.widening, buffers, 2 * sizes.logits)
        embedding = Phase(EMBEDDING, sizes.rest, sizes.accumulated, p.microbatches * stream, sizes.rounding)
    else:
        head = Phase(HEAD, weights, sizes.accumulated + sizes.embedding, buffers + sizes.saved, 2 * sizes.logits)
        embedding = Phase(EMBEDDING, weights, sizes.accumulated, buffers, sizes.rounding)
    blocks = Phase(BLOCKS, weights + chunks + layer, layer_gradients, buffers + sizes.saved, sizes.workspace)
    return [head, blocks, embedding]
