"""What a block is called with besides x, what it returns, and which tokens of a batch it sees."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax

from spmd_lm.active_rules import active_axes
from spmd_lm.axes import TIME
from spmd_lm.batch import PER_ROW, Batch
from spmd_lm.models.layers import BlockLinears
from spmd_lm.ops.attention_spec import AttentionSpec
from spmd_lm.ops.dropout import DropoutKey
from spmd_lm.ops.shared_rows import on_first, own_tokens

LossDict = dict[str, jax.Array]  # losses by name, and STATISTICS

EXPERT_TOKENS, DROPPED_TOKENS = STATISTICS = ("expert_tokens", "dropped_tokens")
"""What blocks with experts count; summed over layers and devices as losses are, without being one.
expert_tokens: tokens that choose each expert, [layers, experts].
dropped_tokens: choices beyond an expert's capacity."""


def sum_losses(losses: LossDict) -> jax.Array:
    return functools.reduce(operator.add, [loss for name, loss in losses.items() if name not in STATISTICS])


AttentionCore = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of q [batch, time, heads x head width], k and v [batch, time, kv heads x head width]: over the row in
training, through a cache in generation."""


def local_batch(batch: Batch) -> Batch:
    """The tokens that this device has of a batch of whole rows; a row's label has its weight on the first device."""
    if not active_axes(TIME):
        return batch
    fields = {name: x for name, x in vars(batch).items() if x is not None}
    own = {name: own_tokens(x, -1) for name, x in fields.items() if name not in PER_ROW}
    labels = {} if batch.label_weights is None else {"label_weights": on_first(batch.label_weights)}
    return dataclasses.replace(batch, **own, **labels, row_segments=batch.segments)


class BlockContext(NamedTuple):
    """A block's arguments besides x, whatever its kind.
    make_attention: makes its attention from a spec.
    dropout_key: this layer's; None for no dropout.
    linears: the linears of its branches.
    checkpoint: jax.checkpoint, for what backward always recomputes.
    batch: the one whose tokens x represents.
    row_weight: weight of a row in auxiliary losses: in training, their sum over the global batch becomes a mean.
    training: whether auxiliary losses are asked for; experts then have a capacity.
    layer: index of the layer.
    expert_product: formulation of the experts' products: buffers, or a key of ops.experts.GROUPED."""

    make_attention: Callable[[AttentionSpec], AttentionCore]
    dropout_key: DropoutKey | None = None
    linears: BlockLinears = BlockLinears()
    checkpoint: Callable = jax.checkpoint
    batch: Batch | None = None
    row_weight: jax.Array | float = 1.0
    training: bool = False
    layer: jax.Array | int = 0
    expert_product: str = "buffers"
