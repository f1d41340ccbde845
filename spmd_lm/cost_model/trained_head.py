"""What backward computes for the token logits, where parameters are frozen."""

from spmd_lm.config.schema import RunConfig
from spmd_lm.parallel.plan import Plan

BEFORE_LOGITS = ("norm", "transform", "transform_norm")
"""Parts of a head through which the stream goes before it is multiplied by the table."""


def trains_table(config: RunConfig, plan: Plan) -> bool:
    """Whether the table of the token logits has a gradient; of an objective without them, the embedding's."""
    own = config.objective.predicts_tokens and not config.objective.ties_embeddings(config.model)
    return plan.trains("head" if own else "embedding", "tokens")


def trains_before_logits(plan: Plan) -> bool:
    """Whether what the table is multiplied with has a gradient."""
    return plan.trains_below_head or any(plan.trains("head", key) for key in BEFORE_LOGITS)
