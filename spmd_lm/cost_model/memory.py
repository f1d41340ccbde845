"""Memory per device, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is that of the phase in which a step holds
most: `benchmarks/predictions.py` compares the sum with compilers' peaks, for random models, layouts and topologies."""

from typing import NamedTuple

from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.activations import LayerActivations, at_least_float32, dtype_bytes, tokens_per_device
from spmd_lm.cost_model.compilers import COMPILER_OF_PLATFORM
from spmd_lm.ops import cross_entropy
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Plan, padded_vocab


def table(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Bytes per device of each thing that a step holds in its fullest phase."""
    return state(config, plan) | fullest_phase(config, plan).rows


def state(config: RunConfig, plan: Plan) -> dict[str, int]:
    """The rows of `table` that outlive a step."""
    params = plan.elements_per_device() * dtype_bytes(config.precision.params)
    return {"parameters": params, config.optim.moments: config.optim.num_moments * params}


class _Sizes:
    """Bytes on one device, in the compute dtype unless another is named; weights are unsharded over `data`."""

    def __init__(self, config: RunConfig, plan: Plan):
        m, p, shards = config.model, config.precision, plan.layout.model
        self.compiler = compiler = COMPILER_OF_PLATFORM[plan.platform]
        size, wide = dtype_bytes(p.compute), dtype_bytes(at_least_float32(p.compute))
        self.widening = wide // size  # how many times larger float32, or a wider compute dtype, is
        cast = p.compute != p.params
        copied = cast or plan.zero.stage > 0  # otherwise the parameters themselves serve
        parts = {part: plan.elements_per_device(part, gathered=True) * size for part in plan.shapes}

        # weights
        self.layers = m.unique_layers // plan.layout.pipe  # of which one stage has weights
        self.layer = parts["blocks"] // self.layers  # the weights of one
        # What is gathered ahead, for one layer; its gradients are scattered as much later.
        ahead = sum(plan.elements_per_device("blocks", key, gathered=True) for key in plan.prefetch)
        self.ahead = ahead * size // self.layers
        self.embedding = parts["embedding"]
        self.rest = parts["embedding"] + parts["head"] if copied else 0  # the weights of embedding and head
        self.resident = parts["blocks"] if copied else 0  # layers' weights that are present in every phase
        if plan.zero.gathers_on_use:
            self.resident = cast * plan.elements_per_device("blocks") * size
            self.resident *= plan.layout.pipe > 1 or not compiler.casts_layers
        elif compiler.wide and plan.layout.pipe == 1:
            self.resident *= self.widening

        # gradients
        scatters = plan.zero.scatters_in_backward
        sharded, unsharded = plan.elements_per_device(), sum(parts.values())
        # The sum over microbatches, in the parameters' dtype or float32.
        self.accumulated = sharded * dtype_bytes(p.params) if scatters else unsharded * self.widening
        # Those of one microbatch, or of the step, at its end; scattered ones in the dtype in which they are reduced.
        self.gradients = sharded * dtype_bytes(p.reduce) if scatters else unsharded
        # Those of the layers of one remat block, before they join the other shards.
        in_block = config.remat_policy.layers_per_remat_block if config.remat_policy.policy == "block" else 0
        self.remat_block = plan.elements_per_device("blocks") * dtype_bytes(p.reduce) * in_block // self.layers
        self.head_gradient = self.embedding * self.widening  # added up over chunks of logits, in at least float32
        # The embedding's gradient is in at least float32, and then rounded to the compute dtype; or both it and the
        # head's are in another layout before they are scattered.
        self.rounding = self.embedding + self.head_gradient
        if scatters and compiler.sums_overlap and not plan.zero.gathers_on_use:
            self.rounding = 4 * self.head_gradient

        # activations
        tokens, layer = tokens_per_device(config, plan.layout), LayerActivations(config, plan, compiler)
        self.stream = int(tokens * layer.stream)  # one microbatch's
        self.saved = int(tokens * config.layers_per_chunk * layer.saved)  # in the layers that run in one loop
        self.workspace = int(tokens * layer.workspace) + compiler.kernel_workspace
        # The logits of one chunk of cross-entropy and their gradient; later the gradient to scatter, in another layout.
        vocab = padded_vocab(m.vocab, shards) // shards if config.objective.predicts_tokens else 0
        logits = min(tokens * vocab * wide, cross_entropy.CHUNK_BYTES)
        self.head_workspace = max(2 * logits, self.head_gradient * scatters)


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
CHUNK = "the scatter of a chunk's gradients"


def fullest_phase(config: RunConfig, plan: Plan) -> Phase:
    sizes = _Sizes(config, plan)
    if plan.layout.pipe == 1:
        phases = _phases(config, plan, sizes)
    elif config.parallel.schedule == "breadth_first":
        phases = _breadth_first_phases(config, plan, sizes)
    else:
        phases = _pipeline_phases(config, plan, sizes)
    return max(phases, key=lambda phase: sum(phase.rows.values()))


def _phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    accumulates = config.parallel.microbatches > 1
    accumulated = sizes.accumulated if accumulates else 0
    gradients = sizes.gradients + accumulated
    at_the_end = sizes.resident + (sizes.rest if accumulates else 0)
    in_blocks = sizes.resident + (sizes.layer + sizes.ahead if plan.zero.gathers_on_use else sizes.rest)
    if plan.zero.gathers_on_use and sizes.compiler.sums_overlap:
        in_blocks += at_the_end
    return [
        Phase(HEAD, sizes.resident + sizes.rest, sizes.head_gradient + accumulated, sizes.saved, sizes.head_workspace),
        Phase(BLOCKS, in_blocks, gradients + _unreduced(plan, sizes), sizes.saved, sizes.workspace),
        Phase(EMBEDDING, at_the_end, gradients, 0, sizes.rounding),
    ]


def _unreduced(plan: Plan, sizes: _Sizes) -> int:
    """Gradients in backward through the blocks, besides those that are complete."""
    unreduced = sizes.layer + sizes.ahead if plan.zero.scatters_in_backward else 0
    if sizes.compiler.wide:  # the head's gradient, and the zeros to which the embedding's will be added
        return unreduced + 2 * sizes.head_gradient - sizes.embedding
    if not sizes.compiler.sums_overlap:
        return unreduced
    unreduced += sizes.head_gradient
    if plan.zero.gathers_on_use:
        return unreduced + sizes.remat_block + sizes.head_gradient // plan.layout.data
    if plan.zero.scatters_in_backward:  # a layer's, until it is scattered
        return unreduced + sizes.layer * sizes.widening
    return unreduced + sizes.head_gradient - sizes.embedding  # the zeros to which the head's is added


def _pipeline_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    """With several stages, whose buffers of inputs and cotangents exist in every tick."""
    weights, buffers = _pipeline_weights(config, plan, sizes), _pipeline_buffers(config, plan) * sizes.stream
    gradients = sizes.accumulated + sizes.head_gradient
    in_use = sizes.layer + sizes.ahead if plan.zero.gather_per == "layer" else 0
    unreduced = sizes.layer + sizes.ahead
    if sizes.compiler.sums_overlap and plan.zero.scatters_in_backward and not plan.zero.gathers_on_use:
        unreduced += sizes.layer * sizes.widening
    saved = buffers + sizes.saved
    return [
        Phase(HEAD, weights, gradients, saved, sizes.head_workspace),
        Phase(BLOCKS, weights + in_use, sizes.accumulated + unreduced, saved, sizes.workspace),
        Phase(EMBEDDING, weights, sizes.accumulated, buffers, sizes.rounding),
    ]


def _breadth_first_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    """Embedding and head run apart from the layers, for all microbatches.  Where ZeRO scatters per chunk, a chunk's
    gradients are summed over all microbatches first, into nothing else."""
    weights, buffers = _pipeline_weights(config, plan, sizes), _pipeline_buffers(config, plan) * sizes.stream
    of_all = config.parallel.microbatches * sizes.stream
    gradients, in_scatter = sizes.accumulated + sizes.layer + sizes.ahead, sizes.accumulated
    if plan.zero.scatter_per == "chunk":
        chunk = sizes.layer * config.layers_per_chunk
        if plan.zero.gathers_on_use or config.chunks > 1 or not sizes.compiler.reuses_chunk:
            weights += chunk * (2 if plan.prefetch_chunks else 1)
        gradients = chunk * sizes.widening
        in_scatter = gradients + sizes.gradients
        if config.chunks > 1 or sizes.compiler.sums_overlap:  # the shards are there before the only chunk's end
            gradients = in_scatter
    return [
        Phase(HEAD, weights, sizes.head_gradient, buffers + of_all, sizes.head_workspace),
        Phase(BLOCKS, weights, gradients, buffers + of_all + sizes.saved, sizes.workspace),
        Phase(CHUNK, weights, in_scatter, buffers + of_all, 0),
        Phase(EMBEDDING, sizes.rest, sizes.accumulated, of_all, sizes.rounding),
    ]


def _pipeline_buffers(config: RunConfig, plan: Plan) -> int:
    """Residual streams that a stage holds between its tasks, and two messages."""
    p = config.parallel
    counts = schedule_counts(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
    return counts.input_slots + counts.output_grad_slots + 2


def _pipeline_weights(config: RunConfig, plan: Plan, sizes: _Sizes) -> int:
    """Those of every tick; a slice of them, the chunk of the task; and what a compiler widens ahead of the loop."""
    widening = sizes.widening if sizes.compiler.wide else 0
    weights = sizes.resident + sizes.rest
    if config.chunks == 1:
        return weights + sizes.resident * widening
    if plan.zero.gathers_on_use or plan.zero.scatter_per == "chunk":
        return weights
    return weights + sizes.resident // config.chunks * (widening or 1)
