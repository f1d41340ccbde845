"""Collectives of a step of Megatron-LM and DeepSpeed.  They differ from ours (expected_collectives.py) in pipelines,
whose stages save what backward needs: arXiv:1909.08053, section 3; arXiv:2104.04473, sections 3 and 4.1;
arXiv:2205.05198, section 4.2; and in how ZeRO is divided, arXiv:1910.02054, section 7."""

from collections.abc import Iterator

from spmd_lm.axes import BATCH_AXES, MODEL, PIPE
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.counted_step import ExpectedCollective
from spmd_lm.cost_model.sizes import dtype_bytes, tokens_per_device
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, COLLECTIVE_PERMUTE, REDUCE_SCATTER, wire_bytes
from spmd_lm.parallel.plan import Plan

MATRICES = 4  # per layer; ZeRO-3 gathers them one by one


def megatron_collectives(config: RunConfig, plan: Plan) -> list[ExpectedCollective]:
    """The collectives of the stage that sends most."""
    return [*_tensor_parallel(config, plan), *_messages(config, plan), *_data_parallel(config, plan)]


def _tensor_parallel(config: RunConfig, plan: Plan) -> Iterator[ExpectedCollective]:
    """Two all-reduces of A per layer forward, two backward, and two more if it is recomputed.  With the sequence
    sharded, each is a reduce-scatter and an all-gather, of the same bytes."""
    if plan.layout.model == 1:
        return
    compute, layers = config.precision.compute, config.model.layers // plan.layout.pipe
    each = 6 if config.remat.policy == "full" else 4
    count = each * layers * config.parallel.microbatches
    bytes_ = count * wire_bytes(ALL_REDUCE, _activations(config, plan), plan.layout.model)
    yield ExpectedCollective(ALL_REDUCE, (MODEL,), "blocks", compute, count, bytes_, f"{each}Lm: A")


def _messages(config: RunConfig, plan: Plan) -> Iterator[ExpectedCollective]:
    """A, sent for each microbatch to the next chunk and back, in slices that the receiver gathers."""
    if plan.layout.pipe == 1:
        return
    compute, n, sent = config.precision.compute, plan.layout.model, _activations(config, plan)
    count = 2 * config.chunks * config.parallel.microbatches
    yield ExpectedCollective(COLLECTIVE_PERMUTE, (PIPE,), "messages", compute, count, count * sent / n, "2vm: A/n")
    if n > 1 and not plan.sequence:
        bytes_ = count * wire_bytes(ALL_GATHER, sent, n)
        yield ExpectedCollective(ALL_GATHER, (MODEL,), "messages", compute, count, bytes_, "2vm: A")


def _data_parallel(config: RunConfig, plan: Plan) -> Iterator[ExpectedCollective]:
    """Gradients, all-reduced once per step.  ZeRO reduce-scatters them and gathers weights: once per step, or with
    ZeRO-3 for each matrix and microbatch, weights both forward and backward."""
    devices, axes = plan.layout.batch_shards, plan.active_axes(*BATCH_AXES)
    if devices == 1:
        return
    sizes = plan.elements_per_device(gathered=True)
    reduce, compute, stage = config.precision.reduce, config.precision.compute, plan.zero.stage
    times = config.parallel.microbatches if stage == 3 else 1
    collectives = MATRICES * config.model.layers // plan.layout.pipe if stage == 3 else 1
    rows = [(REDUCE_SCATTER if stage else ALL_REDUCE, "gradients", reduce, times)]
    if stage:
        rows.append((ALL_GATHER, "weights", compute, times * (2 if stage == 3 else 1)))
    for kind, part, dtype, repeats in rows:
        bytes_ = repeats * wire_bytes(kind, sizes * dtype_bytes(dtype), devices)
        yield ExpectedCollective(kind, axes, part, dtype, repeats * collectives, bytes_, f"{repeats}P")


def _activations(config: RunConfig, plan: Plan) -> int:
    """A: bytes of one microbatch's activations on a device, sequences x context x width."""
    return tokens_per_device(config, plan.layout) * config.model.width * dtype_bytes(config.precision.compute)
