"""Memory per device, before anything runs.

State is exact: it is what the compiled step takes as arguments.  The rest is the most that a step holds at one of a few
points: weights and gradients follow from the layout, activations from a layer's trace, and the compiler's share from
the traits in `Compiler`.  `benchmarks/predictions.py` compares the sum with compilers' peaks, for random models,
layouts and topologies."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from spmd_lm.config.adapters import numbers_per_element
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model import logit_chunks
from spmd_lm.cost_model.counted_step import layer_passes
from spmd_lm.cost_model.hardware import find_hardware
from spmd_lm.cost_model.layer_trace import trace_layers
from spmd_lm.cost_model.sizes import at_least_float32, dtype_bytes, rows_per_device, stream_bytes, tokens_per_device
from spmd_lm.cost_model.trained_head import trains_table
from spmd_lm.ops import cross_entropy
from spmd_lm.own_optimizer import bytes_of_moments
from spmd_lm.parallel.groups import can_offload, groups_of, offloaded_parameters, weight_dtype
from spmd_lm.parallel.padding import padded_vocab
from spmd_lm.parallel.pipeline.schedule_counts import schedule_counts
from spmd_lm.parallel.plan import Parameter, Plan
from spmd_lm.runtime.gpu_memory import ALLOCATED_BY_DEFAULT

MIB = 2**20


class Compiler(NamedTuple):
    """Traits of XLA's compiler for a platform that determine what a step holds.

    logits: number of arrays as large as a chunk of logits that cross-entropy holds.
    computes_in_float32: bfloat16 is computed as float32, and activations and the weights of a loop are held so.
    casts_layers: sharded weights are cast layer by layer as they are gathered, not all of them before the loop.
    adds_in_products: matmuls add unrolled layers' gradients to sums, which grow as saved activations are freed.
    lanes: the last dimension of an array that is split into heads is padded to a multiple of it.
    offloads: it tells a host's memory from its devices'.
    libraries: bytes of workspace that matmuls may use.
    decoded: number of float32 copies of the largest quantized matrix that its matmul holds.
    exchanged: number of float32 copies of the largest gradient that its scatter in codes holds."""

    logits: float = 1.0
    computes_in_float32: bool = False
    casts_layers: bool = False
    adds_in_products: bool = False
    lanes: int = 1
    offloads: bool = True
    libraries: int = 0
    decoded: int = 0
    exchanged: int = 0


COMPILERS = {
    "tpu": Compiler(lanes=128, decoded=2, exchanged=2),
    "gpu": Compiler(logits=1.5, casts_layers=True, adds_in_products=True, libraries=64 * MIB),
    "cpu": Compiler(logits=2, computes_in_float32=True, casts_layers=True, offloads=False),
}


class Point(NamedTuple):
    """Bytes per device, apart from the state, at a point of the step that may be its fullest."""

    name: str
    weights: float
    gradients: float
    activations: float
    workspace: float

    @property
    def rows(self) -> dict[str, int]:
        return dict(zip(("weights", "gradients", "activations", "working set"), map(int, self[1:]), strict=True))

    @property
    def total(self) -> float:
        return sum(self[1:])


FORWARD, HEAD = "forward through the last layer", "the head"
BLOCKS, EMBEDDING = "backward through the blocks", "the embedding's gradient"
UPDATE = "the update of offloaded state"


def table(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Bytes per device of each thing that a step holds at its fullest point."""
    return state(config, plan) | fullest_point(config, plan).rows


def state(config: RunConfig, plan: Plan) -> dict[str, int]:
    """The rows of `table` that outlive a step."""
    trained = plan.elements_per_device(trained=True) - _offloaded_elements(config, plan)
    moments = bytes_of_moments(config.optim, config.precision.params) * trained
    weights = sum(each.elements * dtype_bytes(stored_dtype(config, each)) for each in plan.parameters)
    return {"parameters": weights, config.optim.moments: moments}


def on_host(config: RunConfig, plan: Plan) -> int:
    """Bytes of a device in its host's memory."""
    return activations_on_host(config, plan) + state_on_host(config, plan)


def state_on_host(config: RunConfig, plan: Plan) -> int:
    """Bytes of a device's masters and moments in its host's memory: all, or with optim.offload=disk three groups.  With
    optim.offload_update=host, devices of a host that have the same shards share one copy."""
    state = _offloaded_state(config, plan)
    if config.optim.offload != "disk":
        return state
    return min(3 * _largest_group(config, plan) * _offloaded_bytes_per_element(config), state)


def state_on_disk(config: RunConfig, plan: Plan) -> int:
    """Bytes of a device's masters and moments in optim.offload_dir; twice as many while they are updated."""
    return _offloaded_state(config, plan) if config.optim.offload == "disk" else 0


def _offloaded_state(config: RunConfig, plan: Plan) -> int:
    return _offloaded_elements(config, plan) * _offloaded_bytes_per_element(config)


def _offloaded_bytes_per_element(config: RunConfig) -> int:
    """Bytes of masters and moments of an element whose optimizer state is offloaded."""
    p = config.precision
    has_masters = config.optim.offload_update == "host" or weight_dtype(p.compute, p.params) != p.params
    return bytes_of_moments(config.optim, p.params) + has_masters * dtype_bytes(p.params)


def copied_by_updates(config: RunConfig, plan: Plan) -> dict[str, int]:
    """Bytes that a device, its host and the host's disk send each other in one step's update of offloaded state, by
    name."""
    size = state_on_disk(config, plan)
    disk = {"masters and moments from disk": size, "masters and moments to disk": size} if size else {}
    return copied_by_hosts(config, plan) | disk


def copied_by_hosts(config: RunConfig, plan: Plan) -> dict[str, int]:
    """The rows of `copied_by_updates` between device and host."""
    if config.optim.offload == "none":
        return {}
    if config.optim.offload_update == "device":
        size = _offloaded_state(config, plan)
        return {"masters and moments to devices": size, "masters and moments to hosts": size}
    p, elements = config.precision, _offloaded_elements(config, plan)
    weights = elements * dtype_bytes(weight_dtype(p.compute, p.params))
    return {"gradients to hosts": elements * dtype_bytes(_gradient_dtype(config)), "weights to devices": weights}


def _gradient_dtype(config: RunConfig) -> str:
    """The dtype in which gradients of offloaded parameters leave the step."""
    p = config.precision
    return p.params if p.loss_scale == "dynamic" else p.reduce


def _offloaded_elements(config: RunConfig, plan: Plan) -> int:
    """Elements on a device of parameters whose optimizer state is offloaded."""
    return 0 if config.optim.offload == "none" else sum(each.elements for each in offloaded_parameters(plan))


def _largest_group(config: RunConfig, plan: Plan) -> int:
    """Elements on a device of the largest group."""
    groups = groups_of(offloaded_parameters(plan), plan.layout.pipe, split=config.optim.offload_update == "device")
    return max(group.elements for made in groups for group in made)


def stored_dtype(config: RunConfig, parameter: Parameter) -> str:
    """The dtype of a parameter on its devices between steps."""
    if config.optim.offload == "none" or not can_offload(parameter):
        return parameter.dtype
    return weight_dtype(config.precision.compute, parameter.dtype)


def fullest_point(config: RunConfig, plan: Plan) -> Point:
    step = _Step(config, plan)
    points = step.points(cross_entropy.CHUNK_BYTES)
    if tokens := _tokens_per_chunk(step, points):
        points = step.points(tokens * step.logit_bytes)
    return max(points, key=lambda point: point.total)


def activations_on_host(config: RunConfig, plan: Plan) -> int:
    """Bytes that a device saves for backward in its host's memory, of one microbatch."""
    return int(_Step(config, plan).saved_on_host)


def saved_activations(config: RunConfig, plan: Plan) -> float:
    """Bytes that a device saves for backward in its own memory, of one microbatch."""
    step = _Step(config, plan)
    return 0.0 if step.saved_on_host else step.saved * config.chunks


def tokens_per_chunk(config: RunConfig, plan: Plan) -> int | None:
    """Tokens per chunk of logits on a GPU; None for cross-entropy's default, CHUNK_BYTES."""
    if plan.platform != "gpu":
        return None
    step = _Step(config, plan)
    return _tokens_per_chunk(step, step.points(cross_entropy.CHUNK_BYTES))


def _tokens_per_chunk(step: "_Step", points: list[Point]) -> int | None:
    plan, hardware = step.plan, find_hardware(step.plan.device_kind)
    few = step.tokens * step.logit_bytes <= cross_entropy.CHUNK_BYTES  # or no logits
    if plan.platform != "gpu" or few or hardware is None or hardware.memory is None:
        return None
    peak = sum(state(step.config, plan).values()) + max(point.total for point in points)
    # XLA_PYTHON_CLIENT_MEM_FRACTION is ignored: processes that differ in it would run different programs.
    free = (ALLOCATED_BY_DEFAULT * hardware.memory.size - peak) / step.compiler.logits
    each = logit_chunks.tokens_per_chunk(step.tokens, step.logit_bytes, peak, free)
    return each if each and each * step.logit_bytes > cross_entropy.CHUNK_BYTES else None


class _Step:
    """Bytes on one device.  in_use, chunk, unscattered, layer_gradients, embedding, table: gathered over `data`, in the
    compute dtype."""

    def __init__(self, config: RunConfig, plan: Plan):
        self.config, self.plan, self.compiler = config, plan, COMPILERS[plan.platform]
        self.tokens, p = tokens_per_device(config, plan.layout), config.precision
        self.itemsize, self.float32 = dtype_bytes(p.compute), dtype_bytes(at_least_float32(p.compute))
        self.several = config.parallel.microbatches > 1 or plan.layout.pipe > 1
        shards = plan.layout.model
        vocab = padded_vocab(config.model.vocab, shards) // shards if config.objective.predicts_tokens else 0
        self.logit_bytes = vocab * self.float32  # per token
        self.layers_of_stage = config.model.unique_layers // plan.layout.pipe  # those with weights of their own
        self._activations()
        self._weights()
        self._gradients()

    def _activations(self) -> None:
        """Bytes that the layers of one loop save, and that forward and backward hold within one layer."""
        config, plan, compiler = self.config, self.plan, self.compiler
        dtype = at_least_float32(config.precision.compute) if compiler.computes_in_float32 else ""
        kinds = trace_layers(config, plan, dtype=dtype, lanes=compiler.lanes)
        traces = [traced for _, _, traced in kinds]
        rows, layers = rows_per_device(config, plan.layout), config.layers_per_chunk
        self.stream = stream_bytes(config, plan, dtype)
        saved = sum(share * (rows * traced.saved + traced.saved_once) for _, share, traced in kinds)
        block = config.remat_policy.layers_per_remat_block
        # Remat blocks save their inputs, and one of them at a time everything inside it.
        self.saved = layers / block * self.stream + block * saved if block > 1 else layers * saved
        self.trains_layers = layer_passes(config, plan)[1] > 0  # else they run forward alone, and save nothing
        self.saved *= self.trains_layers
        self.saved_on_host = 0.0  # bytes that rest on the host; two layers' are on the device, on their way
        if config.remat_policy.offloads_inputs and compiler.offloads:
            self.saved_on_host, self.saved = self.saved, min(self.saved, 2 * self.stream)
        beside = compiler.libraries + compiler.decoded * self._largest_decoded()
        forward = max(each.forward.peak for each in traces)
        backward = max(each.backward.peak for each in traces)
        self.forward, self.backward = (rows * peak + beside for peak in (forward, backward))

    def _largest_decoded(self) -> int:
        """Bytes of a layer's largest quantized matrix, in float32."""
        coded = [each for each in self.plan.parameters if each.coded]
        numbers = [each.gathered_elements * numbers_per_element(each.path[-1], each.dtype) for each in coded]
        return dtype_bytes("float32") * max(numbers, default=0) // self.layers_of_stage

    def _largest_exchanged(self) -> int:
        """Bytes of the largest matrix's gradient, in float32."""
        matrices = [each for each in self.plan.trained_parameters if self.plan.zero_axes(each.sharded_names)]
        layers = {each: self.layers_of_stage if each.path[0] == "blocks" else 1 for each in matrices}
        largest = max((self.plan.scattered_elements(each) // layers[each] for each in matrices), default=0)
        return dtype_bytes("float32") * largest

    def _weights(self) -> None:
        plan, p = self.plan, self.config.precision
        layer = plan.bytes_per_device(p.compute, "blocks", gathered=True) / self.layers_of_stage
        largest = self._largest_layer(functools.partial(plan.bytes_per_device, p.compute, gathered=True))
        ahead = sum(plan.bytes_per_device(p.compute, "blocks", key, gathered=True) for key in plan.prefetch)
        self.rest, self.resident, self.in_use = self._copies("embedding", "head"), self._copies("blocks"), 0.0
        self.chunk = layer * self.config.layers_per_chunk if plan.zero.scatter_per == "chunk" else 0
        if not plan.zero.gathers_on_use:
            return
        blocks = [each for each in plan.parameters if each.path[0] == "blocks"]
        stored = {each: dtype_bytes(stored_dtype(self.config, each)) for each in blocks}
        kept = sum(each.elements for each in blocks if stored[each] != dtype_bytes(each.dtype))  # in the compute dtype
        cast = plan.bytes_per_device(p.compute, "blocks") - kept * self.itemsize
        self.resident = 0 if self.compiler.casts_layers or p.compute == p.params else cast
        if plan.rings and plan.secondary:  # in place of what is cast
            self.resident = self._copies("blocks") // plan.rings.within
        if plan.zero.gather_per == "layer":
            # a layer, or with prefetch a period
            at_a_time = len(self.config.model.kinds) * layer if plan.prefetch else largest
            self.in_use = at_a_time + len(self.config.model.kinds) * ahead / self.layers_of_stage
        else:  # a chunk's, in the layout in which it is gathered and in the one that matmuls read
            self.chunk *= 2
            self.resident += self.compiler.casts_layers * sum(each.elements * stored[each] for each in blocks)

    def _largest_layer(self, bytes_below: Callable[..., int]) -> float:
        """Bytes of one layer's arrays, of the largest kind.  bytes_below: those of a stack, by its path."""
        config, stages = self.config, self.plan.layout.pipe
        sharing = config.model.layers / config.model.unique_layers
        layers = [config.model.layers_like(place) / sharing / stages for place in range(len(config.model.kinds))]
        return max(bytes_below(*config.stack_path(place)) / n for place, n in enumerate(layers))

    def _copies(self, *parts: str) -> float:
        """Bytes of these parts' weights that are gathered or cast; others are the parameters themselves."""
        compute = self.float32 if self.compiler.computes_in_float32 else self.itemsize

        def is_copied(each: Parameter) -> bool:
            cast = not each.coded and stored_dtype(self.config, each) != self.config.precision.compute
            return cast or each.gathered_elements != each.elements

        copied = [each for each in self.plan.parameters if each.path[0] in parts and is_copied(each)]
        return sum(each.gathered_elements * (dtype_bytes(each.dtype) if each.coded else compute) for each in copied)

    def _gradients(self) -> None:
        plan, p = self.plan, self.config.precision
        trained = plan.bytes_per_device(p.compute, gathered=True, trained=True)
        of_trained = functools.partial(plan.bytes_per_device, p.compute, gathered=True, trained=True)
        self.layer_gradients = of_trained("blocks") // self.layers_of_stage
        ahead = sum(plan.elements_per_device("blocks", key, gathered=True, trained=True) for key in plan.prefetch)
        ahead = ahead * self.itemsize // self.layers_of_stage  # these are scattered a layer later
        self.accumulated, self.complete, self.unscattered = trained * self.float32 // self.itemsize, trained, 0
        if plan.zero.scatters_in_backward:
            shards = plan.elements_per_device(trained=True)
            self.accumulated, self.complete = shards * dtype_bytes(p.params), shards * dtype_bytes(p.reduce)
            kinds, largest = len(self.config.model.kinds), int(self._largest_layer(of_trained))
            self.unscattered = kinds * (self.layer_gradients + ahead) if plan.prefetch else largest
        self.exchanged = self.compiler.exchanged * self._largest_exchanged() if plan.scatter_codec else 0
        self.unscattered += self.exchanged
        embedding = plan.bytes_per_device(p.compute, "embedding", gathered=True)
        self.embedding = embedding * plan.trains("embedding")
        self.table = embedding * trains_table(self.config, plan)
        wide = self.compiler.computes_in_float32 or dtype_bytes(p.reduce) > self.itemsize
        self.head_gradient = self.table * (self.float32 // self.itemsize if wide else 1)

    def points(self, chunk_bytes: int) -> list[Point]:
        """Points of a step that may be its fullest.  chunk_bytes: logits that cross-entropy computes at a time."""
        logits = self.compiler.logits * min(self.tokens * self.logit_bytes, chunk_bytes)
        scatters = self.plan.zero.scatters_in_backward and self.plan.layout.pipe == 1
        head = max(logits, (self.head_gradient + self.exchanged) if scatters else self.table)
        embedding = self.embedding * (self.float32 / self.itemsize)
        embedding += self.head_gradient if scatters else self.embedding if self.plan.layout.pipe > 1 else 0
        embedding += self.exchanged
        points = self._points_of_stages(head, embedding) if self.plan.layout.pipe > 1 else self._points(head, embedding)
        points += [self._update()] if self.config.optim.offload != "none" else []
        absent = [BLOCKS] * (not self.trains_layers) + [EMBEDDING] * (not self.plan.trains("embedding"))
        return [point for point in points if point.name not in absent]

    def _update(self) -> Point:
        """The update of offloaded state: all gradients, and masters and moments of two groups; if the host updates
        them, new weights of two groups."""
        config, p = self.config, self.config.precision
        largest, elements = _largest_group(config, self.plan), _offloaded_elements(config, self.plan)
        weight_bytes = dtype_bytes(weight_dtype(p.compute, p.params))
        on_host = config.optim.offload_update == "host"
        per_element = weight_bytes if on_host else _offloaded_bytes_per_element(config)
        gradients = elements * dtype_bytes(_gradient_dtype(config))
        return Point(UPDATE, 0, gradients, 0, min(2 * largest, elements) * per_element)

    def _points(self, head: float, embedding: float) -> list[Point]:
        added_up = self.accumulated if self.several else 0
        weights, kept = self.resident + self.rest, self.rest if self.several else 0
        gradients, zeros = self.complete + added_up, self.head_gradient + added_up
        last = first = gradients  # when backward runs the last layer, and the first
        unrolled = not (self.plan.scan or self.config.remat_policy.layers_per_remat_block > 1)
        unrolled = unrolled and not (self.plan.zero.scatters_in_backward or self.config.model.share_layers)
        saved_by_all = self.saved
        if self.compiler.adds_in_products and unrolled:
            last = added_up + self.table + (0 if self.several else self.layer_gradients)
            first = added_up or gradients
            if self.plan.sequence:  # XLA gathers each layer's sequence ahead of its backward
                saved_by_all += self.plan.layout.model * self.stream * self.config.layers_per_chunk
        in_use, saved_by_one = self.resident + self.in_use + kept, self.saved / self.config.layers_per_chunk
        saved_by_one = self.saved if self.saved_on_host else saved_by_one
        return [
            Point(FORWARD, weights + self.in_use, zeros, self.saved, self.forward),
            Point(HEAD, weights, zeros, self.saved, head),
            Point(BLOCKS, in_use, last + self.unscattered, saved_by_all, self.backward),
            Point(BLOCKS, in_use, first + self.unscattered, saved_by_one, self.backward),
            Point(EMBEDDING, (self.resident + self.rest) * self.several, gradients, 0, embedding),
        ]

    def _points_of_stages(self, head: float, embedding: float) -> list[Point]:
        """`points` with several stages, whose buffers of inputs and cotangents exist in every tick.  In a breadth-first
        schedule embedding and head run apart from the layers, for all microbatches."""
        p, plan, chunks = self.config.parallel, self.plan, self.config.chunks
        counts = schedule_counts(p.schedule, plan.layout.pipe, p.microbatches, chunks)
        breadth_first = p.schedule == "breadth_first"
        streams = counts.input_slots + counts.output_grad_slots + 2 + breadth_first * p.microbatches
        buffers, gradients, weights = streams * self.stream, self.accumulated, self.resident
        if chunks > 1 and not (plan.zero.gathers_on_use or self.chunk):
            weights += self.resident / chunks  # and a slice of them: the current task's chunk
        if self.chunk:
            weights += self.chunk * (2 if plan.prefetch_chunks and not plan.zero.gathers_on_use else 1)
            gradients += self.layer_gradients * self.config.layers_per_chunk * self.float32 // self.itemsize
        at_once = 0 if breadth_first else 1  # whether the head and the layers run together
        in_head = Point(HEAD, weights + self.rest, self.head_gradient, buffers + at_once * self.saved, head)
        in_blocks = weights + self.in_use + at_once * self.rest
        return [
            in_head._replace(gradients=self.head_gradient + at_once * gradients),
            Point(BLOCKS, in_blocks, gradients + self.unscattered, buffers + self.saved, self.backward),
            Point(EMBEDDING, at_once * weights + self.rest, self.accumulated, buffers, embedding),
        ]
