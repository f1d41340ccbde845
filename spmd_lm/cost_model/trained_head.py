"""Gradients of the token logits' table and input: those that backward computes when parameters are frozen."""

from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.plan import Plan

BEFORE_LOGITS = ("norm", "transform", "transform_norm")
"""Parts of a head between the stream and the table."""


def trains_table(config: RunConfig, plan: Plan) -> bool:
    """True if the table of the token logits has a gradient; without token logits, the embedding's."""
    own = config.objective.predicts_tokens and not config.objective.ties_embeddings(config.model)
    return plan.trains("head" if own else "embedding", "tokens")


def trains_before_logits(plan: Plan) -> bool:
    """True if the table's input has a gradient."""
    return plan.trains_below_head or any(plan.trains("head", key) for key in BEFORE_LOGITS)
