"""Seconds that one device computes for one microbatch: a layer, from its trace, and the head."""

from typing import NamedTuple

from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.kernels import Kernels, Product
from spmd_lm.cost_model.layer_trace import Pass, trace_layers
from spmd_lm.cost_model.sizes import rows_per_device, tokens_per_device
from spmd_lm.cost_model.trained_head import trains_before_logits, trains_table
from spmd_lm.parallel.padding import padded_vocab
from spmd_lm.parallel.plan import Plan

HEAD_OPERATIONS = 12  # kernels of cross-entropy, forward and backward
LOGIT_BYTES = 24  # per logit, of our cross-entropy


class LayerSeconds(NamedTuple):
    """backward: includes recomputation."""

    forward: float
    backward: float


def layer_seconds(config: RunConfig, plan: Plan, kernels: Kernels, *, weight_copies: int = 0) -> LayerSeconds:
    """Seconds of one layer on one microbatch, the mean of the run's layers.

    weight_copies: copies of a layer's weights each time that it runs: out of their stack, and packed for matmuls."""
    weights = plan.elements_per_device("blocks", gathered=True) / (config.model.unique_layers / plan.layout.pipe)
    copies = kernels.traffic(2 * weight_copies * weights * kernels.size)
    rows = rows_per_device(config, plan.layout)
    forward = backward = 0.0
    for _, share, traced in trace_layers(config, plan):
        of_forward, of_backward = (_seconds(each, kernels, rows) for each in (traced.forward, traced.backward))
        if config.remat_policy.layers_per_remat_block > 1:
            of_backward += of_forward
        forward, backward = forward + share * of_forward, backward + share * of_backward
    return LayerSeconds(forward + copies, backward + copies)


def _seconds(traced: Pass, kernels: Kernels, rows: float) -> float:
    attention = kernels.attention(rows * traced.attention_flops) if traced.attention_flops else 0.0
    products = sum(each.times * kernels.product(each.of_rows(rows)) for each in traced.products)
    return products + attention + kernels.traffic(rows * traced.traffic) + traced.fusions * kernels.overhead


def head_seconds(config: RunConfig, plan: Plan, kernels: Kernels, *, logit_bytes: float = LOGIT_BYTES) -> float:
    """Logits and cross-entropy of one microbatch, forward and backward; 0 for an objective without a vocabulary.

    logit_bytes: bytes that cross-entropy reads and writes for each logit, forward and backward."""
    if not config.objective.predicts_tokens:
        return 0.0
    tokens, vocab = tokens_per_device(config, plan.layout), padded_vocab(config.model.vocab, plan.layout.model)
    logits = Product(tokens, config.model.width, vocab / plan.layout.model)
    of_input, of_table = logits.of_backward
    products = [logits, *[of_input] * trains_before_logits(plan), *[of_table] * trains_table(config, plan)]
    traffic = kernels.traffic(tokens * logits.columns * logit_bytes)
    return sum(map(kernels.product, products)) + traffic + HEAD_OPERATIONS * kernels.overhead
