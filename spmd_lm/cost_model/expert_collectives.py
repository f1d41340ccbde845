"""Collectives of layers with experts (GShard, arXiv:2006.16668, section 3.2), in a train step.

Their MLP's own f and g, of the residual stream, are those of a dense one: see expected_collectives.py."""

from collections.abc import Iterator

from spmd_lm.axes import EXPERT
from spmd_lm.config.mlp import MoE
from spmd_lm.config.schema import Model
from spmd_lm.cost_model.counted_step import ExpectedCollective, Step
from spmd_lm.cost_model.wire import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER

LOSSES = 2
"""Auxiliary losses of a layer with experts: the balance of their load, and the router's z-loss."""


def experts(step: Step) -> Iterator[ExpectedCollective]:
    for share, model, moe in step.experts:
        yield from _exchanges(step, share, model, moe)
        if step.model_axes:
            yield from _into_the_region(step, share, moe)


def slots_per_device(step: Step, model: Model, moe: MoE) -> int:
    """Slots of one microbatch in a device's buffers for all experts: experts x groups x capacity."""
    group = moe.group or model.context // step.plan.layout.context
    return moe.experts * (step.tokens // group) * moe.slots(group)


def _exchanges(step: Step, share: float, model: Model, moe: MoE) -> Iterator[ExpectedCollective]:
    """All-to-alls of buffers, there and back, forward and backward; a layer that is recomputed sends them again,
    because the gradient of a token's gates reads what its experts return."""
    if not (axes := step.plan.active_axes(EXPERT)):
        return
    runs, again = step.runs, 2 * step.recomputes_layer
    slots = slots_per_device(step, model, moe)
    count = (4 + again) * runs.layer_passes + 2 * runs.forward_passes - again * step.unread_outputs
    ahead = ", and 2 ahead of it" if runs.forward_passes else ""
    formula = f"{4 + again}Lm: {slots} slots, 2 forward, 2 backward a layer{ahead}"
    repeated = share * again * runs.layer_passes * step.unrolled
    buffers = step.compute, slots * model.width
    yield step.row(ALL_TO_ALL, axes, "blocks", buffers, share * count, formula, repeated)


def _into_the_region(step: Step, share: float, moe: MoE) -> Iterator[ExpectedCollective]:
    """Probabilities of the experts, and the gate of a shared MLP, which enter the region between f and g beside x."""
    runs, again = step.runs, step.recomputes_layer
    passes = share * runs.layer_passes
    forward = share * ((1 + again) * runs.layer_passes + runs.forward_passes - again * step.unread_outputs)
    for name, columns in (("probabilities", moe.experts), ("gate of the shared MLP", moe.shared_gate)):
        array = step.accum_dtype, step.tokens * columns
        if not columns:
            continue
        if not step.plan.sequence:
            yield step.row(ALL_REDUCE, step.model_axes, "blocks", array, passes, f"Lm: {name}, backward")
            continue
        repeated = passes * again * step.unrolled
        yield step.row(ALL_GATHER, step.model_axes, "blocks", array, forward, f"Lm: {name}, forward", repeated)
        for axis, part in step.shares(step.model_axes):
            scattered = step.accum_dtype, array[1] * part
            yield step.row(REDUCE_SCATTER, (axis,), "blocks", scattered, passes, f"Lm: {name}, backward")
    if step.plan.sequence:
        formula = "Lm: a number, of each loss"
        yield step.row(ALL_REDUCE, step.model_axes, "blocks", (step.accum_dtype, 1), LOSSES * passes, formula)


def statistics(step: Step) -> tuple[int, ...]:
    """Sizes of what layers with experts count: tokens of each expert in each layer, and choices without a slot."""
    return (step.config.model.layers * step.experts[0].moe.experts, 1) if step.experts else ()
