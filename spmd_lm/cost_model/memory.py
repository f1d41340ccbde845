"""Memory per device, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is that of the phase in which a step holds
most: `benchmarks/predictions.py` compares the sum with compilers' peaks, for random models, layouts and topologies."""

from typing import NamedTuple

from spmd_lm.config.adapters import numbers_per_element
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import logit_chunks
from spmd_lm.cost_model.activations import at_least_float32, dtype_bytes, layer_activations, tokens_per_device
from spmd_lm.cost_model.compilers import COMPILER_OF_PLATFORM
from spmd_lm.cost_model.expected_collectives import layer_passes
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.trained_head import trains_table
from spmd_lm.ops import cross_entropy
from spmd_lm.own_optimizer import moments_per_parameter
from spmd_lm.parallel.padding import padded_vocab
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Parameter, Plan
from spmd_lm.runtime.gpu_memory import ALLOCATED_BY_DEFAULT


def table(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Bytes per device of each thing that a step holds in its fullest phase."""
    return state(config, plan) | fullest_phase(config, plan).rows


def state(config: RunConfig, plan: Plan) -> dict[str, int]:
    """The rows of `table` that outlive a step."""
    params = plan.bytes_per_device(None)
    trained = plan.elements_per_device(trained=True) * dtype_bytes(config.precision.params)
    return {"parameters": params, config.optim.moments: moments_per_parameter(config.optim) * trained}


STREAMS_ON_CHIP = 5
"""A TPU's compiler places arrays on the chip where its memory holds this many unsharded residual streams."""
TOKENS_OF_UNROLLED_SUMS = 4096
"""Most tokens of a microbatch of which a GPU's compiler holds sums over `model`, not what they are added to."""


class _Sizes:
    """Bytes on one device, in the compute dtype unless another is named; weights are unsharded over `data`."""

    def __init__(self, config: RunConfig, plan: Plan):
        p = config.precision
        self.config, self.plan, self.compiler = config, plan, COMPILER_OF_PLATFORM[plan.platform]
        self.itemsize, self.wide = dtype_bytes(p.compute), dtype_bytes(at_least_float32(p.compute))
        self.widening = self.wide // self.itemsize  # how many times larger float32, or a wider compute dtype, is
        self.parts, self.trained_parts = (
            {part: plan.bytes_per_device(p.compute, part, gathered=True, trained=each) for part in plan.shapes}
            for each in (False, True)
        )
        self.embedding = self.parts["embedding"]
        self._weights()
        self._gradients()
        self._activations()
        self._embedding_and_head()

    def _weights(self) -> None:
        plan, compiler, p = self.plan, self.compiler, self.config.precision
        cast = self.config.precision.compute != self.config.precision.params
        self.layers = self.config.model.unique_layers // plan.layout.pipe  # of which one stage has weights
        self.layer = self.parts["blocks"] // self.layers  # the weights of one
        # What is gathered ahead, for one layer; its gradients are scattered as much later.
        ahead = sum(plan.bytes_per_device(p.compute, "blocks", key, gathered=True) for key in plan.prefetch)
        self.period = period = len(self.config.model.kinds) if plan.prefetch else 1  # layers gathered at a time
        # Weights gathered at a time, and those gathered ahead.
        self.in_use = period * (self.layer + ahead // self.layers)
        # Gradients of one layer before they are scattered, and with what is scattered a layer later.
        ahead = sum(plan.elements_per_device("blocks", key, gathered=True, trained=True) for key in plan.prefetch)
        self.layer_gradients = self.trained_parts["blocks"] // self.layers
        self.unscattered = period * (self.layer_gradients + ahead * self.itemsize // self.layers)
        stacks = [each.gathered_elements for each in plan.parameters if each.path[0] == "blocks"]
        self.largest_stack = max(stacks) * self.itemsize  # the weights of all layers in one array
        self.widens_weights = compiler.wide and self.widening > 1
        self.rest = self._copies("embedding", "head")
        self.resident = self._copies("blocks")  # present in every phase
        if plan.zero.gathers_on_use:
            self.resident = self._copy_of_shards() if cast else 0
        elif self.widens_weights and plan.layout.pipe == 1:  # those of a pipeline are widened in _pipeline_weights
            self.resident *= self.widening

    def _copies(self, *parts: str) -> int:
        """Of the weights of these parts that are gathered or cast; others are the parameters themselves."""
        compute = self.config.precision.compute

        def is_copied(each: Parameter) -> bool:
            cast = not each.coded and (self.widens_weights or each.dtype != compute)
            return cast or each.gathered_elements != each.elements

        return sum(
            each.gathered_elements * dtype_bytes(each.dtype if each.coded else compute)
            for each in self.plan.parameters
            if each.path[0] in parts and is_copied(each)
        )

    def _copy_of_shards(self) -> int:
        """Of the layers' weights that ZeRO-3 gathers: all of them, cast before a loop; or where layers are cast one by
        one, as they are, those of a chunk, or of all chunks in the layout in which chunks are gathered."""
        p, chunks = self.config.precision, self.config.chunks
        if not self.compiler.casts_layers:
            return self.plan.bytes_per_device(p.compute, "blocks")
        uncast = self.plan.bytes_per_device(None, "blocks")
        if self.plan.zero.gather_per == "chunk":
            return uncast
        return uncast // chunks if chunks > 1 else 0

    def _gradients(self) -> None:
        plan, p, remat = self.plan, self.config.precision, self.config.remat_policy
        scatters = plan.zero.scatters_in_backward
        sharded, unsharded = plan.elements_per_device(trained=True), sum(self.trained_parts.values())
        # The sum over microbatches, in the parameters' dtype or float32.
        self.accumulated = sharded * dtype_bytes(p.params) if scatters else unsharded * self.widening
        # Those of one microbatch, or of the step, at its end; scattered ones in the dtype in which they are reduced.
        self.gradients = sharded * dtype_bytes(p.reduce) if scatters else unsharded
        # What the parameters' dtype takes beyond that, if a step has one microbatch.
        single = scatters and self.config.parallel.microbatches == 1
        self.widened_shards = sharded * dtype_bytes(p.params) - self.gradients if single else 0
        # Of the layers of one remat block: weights, and the shards of their gradients before they join the others.
        in_block = remat.layers_per_remat_block if remat.policy == "block" else 0
        self.remat_block_weights = self.layer * in_block
        self.remat_block_gradients = (
            plan.elements_per_device("blocks", trained=True) * dtype_bytes(p.reduce) * in_block // self.layers
        )
        self.of_layer = self.unscattered if scatters else 0
        # Whether gradients are converted to a wider dtype before devices sum them.
        self.widens_sums = dtype_bytes(p.reduce) > self.itemsize
        # Whether a layer's gradients, widened, are still there when those of the next layer are made.
        overlap = self.compiler.sums_overlap and not plan.zero.gathers_on_use
        self.scatters_late = scatters and overlap and self.widens_sums

    def _activations(self) -> None:
        config, plan = self.config, self.plan
        tokens, layer = tokens_per_device(config, plan.layout), layer_activations(config, plan, self.compiler)
        self.backward = layer_passes(config, plan)[1] > 0  # else layers run forward alone, and save nothing
        self.stream = int(tokens * layer.stream)  # one microbatch's
        self.hidden = int(tokens * layer.hidden)
        self.saved = int(tokens * config.layers_per_chunk * layer.saved) * self.backward  # in the layers of one loop
        self.unrolled = 0  # what unrolled layers hold besides when their backward begins
        if (
            self.backward
            and not plan.scan
            and (n := plan.layout.model) > 1
            and (plan.sequence or tokens <= TOKENS_OF_UNROLLED_SUMS)
        ):
            streams = self.compiler.unrolled_gathers * n if plan.sequence else self.compiler.unrolled_sums
            self.unrolled = int(streams * self.stream) * config.layers_per_chunk
        on_chip = self._on_chip()

        def in_hbm(per_token: float) -> int:
            return max(0, int(tokens * per_token) - on_chip)

        decoded = self.compiler.decoded * self._largest_decoded()
        self.workspace = in_hbm(layer.workspace) + self.compiler.kernel_workspace + decoded
        self.attention_workspace = in_hbm(layer.attention_workspace)
        forward_workspace = in_hbm(layer.forward_workspace if self.backward else layer.forward_alone)
        self.forward_workspace = forward_workspace + decoded

    def _largest_decoded(self) -> int:
        """The largest matrix of a layer that is in few bits, in float32."""
        coded = [each for each in self.plan.parameters if each.coded]
        numbers = [each.gathered_elements * numbers_per_element(each.path[-1], each.dtype) for each in coded]
        return dtype_bytes("float32") * max(numbers, default=0) // self.layers

    def _on_chip(self) -> int:
        """About what a TPU's compiler keeps of a layer's working set on the chip, not in HBM: half of the memory there,
        where arrays are small beside it."""
        hardware = find_hardware(self.plan.device_kind)
        scratchpad = hardware.scratchpad if hardware else 0
        unsharded = self.stream * (self.plan.layout.model if self.plan.sequence else 1)
        return scratchpad // 2 if STREAMS_ON_CHIP * unsharded <= scratchpad else 0

    def _embedding_and_head(self) -> None:
        """Gradients of the embedding and the head, and what is held beside each in its phase."""
        config, plan, compiler = self.config, self.plan, self.compiler
        # The embedding's is added up over tokens, in at least float32; the head's over chunks of logits, in the wider
        # of the compute and the reduce dtype.
        sum_itemsize = self.wide if compiler.wide else max(self.itemsize, dtype_bytes(config.precision.reduce))
        embedding = self.embedding * plan.trains("embedding")
        self.table = self.embedding * trains_table(config, plan)
        self.wide_embedding = embedding * self.widening
        self.head_gradient = self.table // self.itemsize * sum_itemsize
        # Beside each: its copy in the layout in which it is scattered, where backward scatters.  With stages, and on a
        # CPU, the embedding's is held rounded, not copied.  Otherwise a TPU, and a GPU that does not scatter, hold the
        # head's rounded to the compute dtype, where that is narrower.
        to_scatter = self.head_gradient if plan.zero.scatters_in_backward else 0
        rounded = self.table if self.widens_sums else 0
        if plan.layout.pipe > 1 or compiler.wide:
            beside_embedding, beside_head = embedding, to_scatter
        else:
            beside_embedding = to_scatter
            beside_head = to_scatter if compiler.sums_overlap and to_scatter else rounded
        self.embedding_workspace = self.wide_embedding + beside_embedding
        self.beside_head = beside_head
        # Before that, one chunk of cross-entropy's logits, and their gradient.
        shards = plan.layout.model
        vocab = padded_vocab(config.model.vocab, shards) // shards if config.objective.predicts_tokens else 0
        self.logit = vocab * self.wide  # those of one token
        logits = min(tokens_per_device(config, plan.layout) * self.logit, cross_entropy.CHUNK_BYTES)
        self.head_workspace = self.head_workspace_of(logits)

    def head_workspace_of(self, logits: int) -> int:
        """Beside the head's gradient, with so many bytes of logits at a time."""
        return max(int(self.compiler.logits * logits), self.beside_head)


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


GATHER = "the gather of weights"
FORWARD, HEAD = "forward through the last layer", "the head"
BLOCKS, ATTENTION, EMBEDDING = "backward through the blocks", "attention's backward", "the embedding's gradient"
CHUNK, REPLICAS = "the scatter of a chunk's gradients", "the sum of gradients over replicas"


def fullest_phase(config: RunConfig, plan: Plan) -> Phase:
    sizes = _Sizes(config, plan)
    phases = _all_phases(config, plan, sizes)
    if tokens := _tokens_per_chunk(config, plan, sizes, phases):
        of_head = sizes.head_workspace_of(tokens * sizes.logit)
        phases = [each._replace(workspace=of_head) if each.name == HEAD else each for each in phases]
    return _fullest(phases)


def tokens_per_chunk(config: RunConfig, plan: Plan) -> int | None:
    """Tokens whose logits a GPU's step computes at a time, if cross-entropy is to take more than it does by itself."""
    sizes = _Sizes(config, plan)
    return _tokens_per_chunk(config, plan, sizes, _all_phases(config, plan, sizes))


def _tokens_per_chunk(config: RunConfig, plan: Plan, sizes: _Sizes, phases: list[Phase]) -> int | None:
    hardware, tokens = find_hardware(plan.device_kind), tokens_per_device(config, plan.layout)
    few = tokens * sizes.logit <= cross_entropy.CHUNK_BYTES  # or none
    if plan.platform != "gpu" or few or hardware is None or hardware.memory is None:
        return None
    peak = sum(state(config, plan).values()) + sum(_fullest(phases).rows.values())
    # Not of what XLA_PYTHON_CLIENT_MEM_FRACTION allows: processes that differ in it would run other programs.
    free = (ALLOCATED_BY_DEFAULT * hardware.memory.size - peak) / sizes.compiler.logits
    each = logit_chunks.tokens_per_chunk(tokens, sizes.logit, peak, free)
    return each if each and each * sizes.logit > cross_entropy.CHUNK_BYTES else None


def _fullest(phases: list[Phase]) -> Phase:
    return max(phases, key=lambda phase: sum(phase.rows.values()))


def _all_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    if plan.layout.pipe == 1:
        phases = _phases(config, plan, sizes)
    elif config.parallel.schedule == "breadth_first":
        phases = _breadth_first_phases(config, plan, sizes)
    else:
        phases = _pipeline_phases(config, plan, sizes)
    if plan.layout.replica > 1 and sizes.compiler.copies_replicas:
        added_up = config.parallel.microbatches > 1 or plan.layout.pipe > 1
        addends = sizes.accumulated if added_up else sizes.gradients
        if plan.zero.scatter_per == "step":  # over `data` first, onto shards
            addends = plan.elements_per_device(trained=True) * dtype_bytes(config.precision.params)
        phases.append(Phase(REPLICAS, 0, 2 * addends, 0, 0))
    absent = () if sizes.backward else (BLOCKS, ATTENTION, CHUNK)
    absent = absent if plan.trains("embedding") else (*absent, EMBEDDING)
    return [phase for phase in phases if phase.name not in absent]


def _phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    accumulates = config.parallel.microbatches > 1
    accumulated = sizes.accumulated if accumulates else 0
    gradients = in_blocks_gradients = sizes.gradients + accumulated
    if _unstacks(config, plan, sizes):  # gradients appear as what layers saved is freed
        in_blocks_gradients = accumulated + sizes.table + (0 if accumulates else sizes.layer_gradients)
    keeps = accumulates or sizes.compiler.keeps_weights  # after their last use
    keeps_rest = keeps
    in_blocks, at_the_end = sizes.resident, sizes.resident if keeps else 0
    if plan.zero.gathers_on_use:
        in_blocks += sizes.in_use
        keeps_rest = accumulates and sizes.compiler.sums_overlap  # gathered once, for all microbatches
    in_blocks += sizes.rest if keeps_rest else 0
    at_the_end += sizes.rest if accumulates else 0
    weights = sizes.resident + sizes.rest
    # With prefetch, backward runs the last layer before its loop and the first one after it.  During the loop a GPU has
    # freed what the last one saved, and recomputes the first one ahead of its turn.
    layers_apart = sizes.compiler.sums_overlap and bool(plan.prefetch)
    workspace = sizes.workspace + (sizes.hidden if layers_apart and config.remat_policy.recomputes_layer else 0)
    saved_in_loop = (
        sizes.saved + sizes.unrolled - (sizes.period * sizes.saved // config.model.layers if layers_apart else 0)
    )
    forward_weights = weights + (sizes.in_use if plan.zero.gathers_on_use else 0)
    head_zeros = sizes.head_gradient if config.objective.predicts_tokens else 0  # there from the start
    phases = [
        Phase(FORWARD, forward_weights, head_zeros + accumulated, sizes.saved, sizes.forward_workspace),
        Phase(HEAD, weights, sizes.head_gradient + accumulated, sizes.saved, sizes.head_workspace),
        Phase(BLOCKS, in_blocks, in_blocks_gradients + _unreduced(plan, sizes), saved_in_loop, workspace),
        # The layer's weights' gradients are not made yet.
        Phase(ATTENTION, in_blocks, in_blocks_gradients, sizes.saved, sizes.attention_workspace),
        Phase(EMBEDDING, at_the_end, gradients, 0, sizes.embedding_workspace),
    ]
    if plan.zero.gather_per == "step" and sizes.compiler.sums_overlap:
        # The last stack in two layouts; and zeros: for the sum over microbatches, or for the head's gradient and for
        # what a loop over layers will save.
        zeros = head_zeros if sizes.widens_sums else 0
        then = (accumulated, 0) if accumulates else (zeros, sizes.saved if plan.scan else 0)
        phases.append(Phase(GATHER, weights + sizes.largest_stack, *then, 0))
    return phases


def _unstacks(config: RunConfig, plan: Plan, sizes: _Sizes) -> bool:
    """Whether the matrices of layers are unstacked, so that products add their gradients to the sums."""
    stacked = plan.scan or config.remat_policy.layers_per_remat_block > 1 or config.model.share_layers
    stacked = stacked or plan.zero.scatters_in_backward
    return sizes.compiler.sums_overlap and not stacked


def _unreduced(plan: Plan, sizes: _Sizes) -> int:
    """Gradients in backward through the blocks, besides those that are complete: a layer's that are to be scattered,
    and the head's; and copies of a remat block's weights and gradients."""
    compiler, scatters = sizes.compiler, plan.zero.scatters_in_backward
    if compiler.sums_overlap:
        return _unreduced_where_sums_overlap(plan, sizes)
    head = sizes.head_gradient - sizes.table  # among the complete ones, in the compute dtype
    if compiler.wide:
        return sizes.of_layer + (head if sizes.widens_sums else 0)
    copies = 2 * sizes.remat_block_weights
    if not scatters:  # the head's is rounded to the compute dtype after the blocks
        return head + copies
    if plan.zero.gathers_on_use:  # gradients of one branch take the place of its gathered weights
        return sizes.of_layer // 2 + copies
    return sizes.of_layer * (sizes.widening if sizes.widens_sums else 1) + sizes.widened_shards + copies


def _unreduced_where_sums_overlap(plan: Plan, sizes: _Sizes) -> int:
    """`_unreduced`, where a remat block's weights are sliced from stacks, unless they are gathered layer by layer."""
    zero, copies = plan.zero, sizes.remat_block_gradients
    if not zero.scatters_in_backward:
        copies = sizes.remat_block_weights  # as large as their gradients
    if zero.gathers_on_use:
        # Gradients of a branch take the place of its gathered weights, unless they are widened and sent a layer later.
        of_layer = sizes.of_layer if sizes.widens_sums and plan.prefetch else sizes.of_layer // 2
        return of_layer + sizes.head_gradient // plan.layout.zero_shards + copies
    copies += sizes.remat_block_weights
    if sizes.scatters_late:  # half of the layer before, widened
        return sizes.of_layer + sizes.layer_gradients * sizes.widening // 2 + copies
    return sizes.of_layer + (sizes.head_gradient - sizes.table) + copies


def _pipeline_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    """With several stages, whose buffers of inputs and cotangents exist in every tick.  Zeros for the head's gradient
    are made in the head's conditional, after forward."""
    weights = _pipeline_weights(config, plan, sizes) + sizes.rest
    buffers = _pipeline_buffers(config, plan) * sizes.stream
    gradients = sizes.accumulated + sizes.head_gradient
    in_use = sizes.in_use if plan.zero.gather_per == "layer" else 0
    unreduced = sizes.unscattered
    if sizes.scatters_late:
        unreduced += sizes.layer_gradients * sizes.widening
    saved = buffers + sizes.saved
    return [
        Phase(HEAD, weights, gradients, saved, sizes.head_workspace),
        Phase(BLOCKS, weights + in_use, sizes.accumulated + unreduced, saved, sizes.workspace),
        Phase(ATTENTION, weights + in_use, sizes.accumulated, saved, sizes.attention_workspace),
        Phase(EMBEDDING, weights, sizes.accumulated, buffers, sizes.embedding_workspace),
    ]


def _breadth_first_phases(config: RunConfig, plan: Plan, sizes: _Sizes) -> list[Phase]:
    """Embedding and head run apart from the layers, for all microbatches.  Where ZeRO scatters per chunk, a chunk's
    gradients are summed over all microbatches first, into nothing else."""
    weights, buffers = _pipeline_weights(config, plan, sizes), _pipeline_buffers(config, plan) * sizes.stream
    of_all = config.parallel.microbatches * sizes.stream
    copied, slice_of_layer, gradients = 0, 0, sizes.accumulated
    in_scatter = gradients
    if sizes.compiler.sums_overlap:
        gradients += sizes.unscattered
    if plan.zero.scatter_per == "chunk":
        of_chunk, copied = _chunk_weights(config, plan, sizes)
        weights += of_chunk
        gradients, in_scatter = _chunk_gradients(config, plan, sizes)
        if sizes.compiler.rounds_stacks:
            slice_of_layer = sizes.layer_gradients * (sizes.widening if sizes.widens_sums else 1)
    saved = buffers + of_all + sizes.saved
    copied_in_scatter = copied if sizes.compiler.sums_overlap else 0  # a TPU has freed it by then
    return [
        # The head's weights are gathered, or cast, in its conditional.
        Phase(HEAD, weights + copied + sizes.rest, sizes.wide_embedding, buffers + of_all, sizes.head_workspace),
        Phase(BLOCKS, weights + copied, gradients, saved, sizes.workspace),
        Phase(ATTENTION, weights, gradients, saved, sizes.attention_workspace),
        Phase(CHUNK, weights + copied_in_scatter, in_scatter, buffers + of_all, slice_of_layer),
        Phase(EMBEDDING, sizes.rest, sizes.accumulated, of_all, sizes.embedding_workspace),
    ]


def _chunk_weights(config: RunConfig, plan: Plan, sizes: _Sizes) -> tuple[int, int]:
    """Weights of a chunk that stay through its backward, with the next chunk's where that is gathered ahead; and a copy
    of them in the layout that products read, which is gone before attention's backward."""
    chunk = sizes.layer * config.layers_per_chunk
    reuses = sizes.compiler.reuses_chunk and config.chunks == 1
    if plan.prefetch_chunks:
        return 2 * chunk, 0
    if not plan.zero.gathers_on_use:
        return (_copied_attention(plan, sizes) if reuses else chunk), 0
    if reuses and config.parallel.microbatches == 1:
        return chunk + _copied_attention(plan, sizes), 0
    return chunk, chunk if reuses or sizes.compiler.sums_overlap else 0


def _copied_attention(plan: Plan, sizes: _Sizes) -> int:
    """Half of the query, key and value matrices: about every second compiled step copies them."""
    keys = ("query", "key", "value")
    compute = sizes.config.precision.compute
    return sum(plan.bytes_per_device(compute, "blocks", "attention", key, gathered=True) for key in keys) // 2


def _chunk_gradients(config: RunConfig, plan: Plan, sizes: _Sizes) -> tuple[int, int]:
    """Gradients during a chunk's backward, and while its sum over microbatches is scattered."""
    chunk, overlap = sizes.layer_gradients * config.layers_per_chunk, sizes.compiler.sums_overlap
    of_chunk = chunk * sizes.widening
    # A GPU holds the step's shards as they are added up, whatever devices sum in.
    in_backward = in_scatter = of_chunk + (sizes.accumulated if overlap else sizes.gradients)
    several = config.chunks > 1  # then a chunk has shards of its own, before they join the others
    if several and (overlap or sizes.widens_sums):
        in_scatter += of_chunk // plan.layout.zero_shards
    if sizes.compiler.rounds_stacks and sizes.widening > 1 and not sizes.widens_sums:  # and rounded, with shards
        in_scatter += chunk + (chunk // plan.layout.zero_shards if several else 0)
    return in_backward, in_scatter


def _pipeline_buffers(config: RunConfig, plan: Plan) -> int:
    """Residual streams that a stage holds between its tasks, and two messages."""
    p = config.parallel
    counts = schedule_counts(p.schedule, plan.layout.pipe, p.microbatches, config.chunks)
    return counts.input_slots + counts.output_grad_slots + 2


def _pipeline_weights(config: RunConfig, plan: Plan, sizes: _Sizes) -> int:
    """Layers' weights of every tick; and a slice of them, the chunk of the task, or what a compiler widens ahead of the
    loop."""
    weights = sizes.resident
    if config.chunks == 1:
        return weights + (sizes.resident * sizes.widening if sizes.widens_weights else 0)
    if plan.zero.gathers_on_use or plan.zero.scatter_per == "chunk":
        return weights
    return weights + sizes.resident // config.chunks * (sizes.widening if sizes.widens_weights else 1)
