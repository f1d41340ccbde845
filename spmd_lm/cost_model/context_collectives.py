"""Collectives over `context` in a train step: exchanges of heads for tokens (DeepSpeed-Ulysses, arXiv:2309.14509), or
keys and values around a ring (arXiv:2310.01889), and what is gathered of whole rows.

Sums of losses and gradients, and ZeRO, take `context` as they take `data`: see expected_collectives.py."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from spmd_lm.axes import CONTEXT
from spmd_lm.config.schema import ExtractiveQA, Model
from spmd_lm.cost_model.counted_step import Axes, ExpectedCollective, Step
from spmd_lm.cost_model.sizes import shares_of_kinds
from spmd_lm.cost_model.wire import ALL_REDUCE, ALL_TO_ALL, COLLECTIVE_PERMUTE


class _Passes(NamedTuple):
    """Layers in which attention runs, in a step.  again: computed once more before their backward."""

    forward: float
    backward: float
    again: float


def over_context(step: Step) -> Iterator[ExpectedCollective]:
    if not (axes := step.plan.active_axes(CONTEXT)):
        return
    send = _around_the_ring if step.plan.ring else _exchanges_of_heads
    for place, (share, model) in enumerate(
        zip(shares_of_kinds(step.config), step.config.model.of_each_kind, strict=True)
    ):
        yield from send(step, axes, model, _passes(step, share, place))
    yield from _whole_rows(step, axes)


def _passes(step: Step, share: float, place: int) -> _Passes:
    """Passes through layers of the kind at `place` of a period."""
    runs, remat = step.runs, step.config.remat_policy
    below = step.unneeded.get("attention")  # in the first layer nothing before attention is trained
    unneeded = step.config.parallel.microbatches if place == 0 and below and "out" in below.weights else 0
    backward = share * runs.layer_passes - unneeded
    again = backward if step.recomputes_layer or remat.recomputes_attention else 0.0
    unread = share * step.unread_outputs * step.recomputes_layer
    return _Passes(share * (runs.layer_passes + runs.forward_passes) - unread, backward, again)


def _widths(step: Step, model: Model) -> tuple[int, int]:
    """Query heads, and key/value heads, of a device of `model`."""
    shards = step.plan.layout.model
    return model.heads // shards, max(1, (model.kv_heads or model.heads) // shards)


def _exchanges_of_heads(step: Step, axes: Axes, model: Model, passes: _Passes) -> Iterator[ExpectedCollective]:
    """All-to-alls of queries, keys, values and results.  Selective remat keeps the results that the device gets back,
    and sends only the first three again."""
    heads, kv_heads = _widths(step, model)
    kv_heads = math.lcm(kv_heads, step.plan.layout.context)
    runs, again = passes.forward + passes.backward, passes.again
    results_again = again * step.recomputes_layer
    for what, of_heads, count, repeated in (
        ("queries and results", heads, 2 * runs + again + results_again, again + results_again),
        ("keys and values", kv_heads, 2 * (runs + again), 2 * again),
    ):
        array = step.compute, step.tokens * of_heads * model.head_dim
        formula = f"{what} of {of_heads} heads, forward and backward"
        yield step.row(ALL_TO_ALL, axes, "blocks", array, count, formula, repeated * step.unrolled)


def _around_the_ring(step: Step, axes: Axes, model: Model, passes: _Passes) -> Iterator[ExpectedCollective]:
    """Permutes of keys and values, forward and backward, and of their gradients, which go all the way round, the last
    hop in the compute dtype."""
    _, kv_heads = _widths(step, model)
    n, elements = step.plan.layout.context, step.tokens * kv_heads * model.head_dim
    runs, again = passes.forward + passes.backward + passes.again, 2 * (n - 1) * passes.again * step.unrolled
    formula = f"keys and values, {n - 1} hops each time, and their gradients' last hop"
    count = 2 * (n - 1) * runs + 2 * passes.backward
    yield step.row(COLLECTIVE_PERMUTE, axes, "blocks", (step.compute, elements), count, formula, again)
    if not passes.backward:
        return
    gradients = step.accum_dtype, elements
    formula = f"their gradients, {n - 1} hops"
    yield step.row(COLLECTIVE_PERMUTE, axes, "blocks", gradients, 2 * (n - 1) * passes.backward, formula)


def _whole_rows(step: Step, axes: Axes) -> Iterator[ExpectedCollective]:
    """Sums of what is computed of whole rows: logits of answers' spans, and choices of experts."""
    runs, n = step.runs, step.plan.layout.context
    if isinstance(step.config.objective, ExtractiveQA):
        logits = step.accum_dtype, 2 * step.tokens * n
        yield step.row(ALL_REDUCE, axes, "head", logits, 2 * runs.head, "2m: two numbers of each token of a row")
    for share, _, moe in step.experts:
        passes = share * ((1 + step.recomputes_layer) * runs.layer_passes + runs.forward_passes)
        counts = step.accum_dtype, step.rows * moe.experts
        again = share * step.recomputes_layer * runs.layer_passes
        yield step.row(ALL_REDUCE, axes, "blocks", counts, passes, "choices of a row", again)
