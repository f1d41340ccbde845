"""Figures of what experts receive, from a step's counts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd_lm.models.context import DROPPED_TOKENS, EXPERT_TOKENS

UNUSED = 0.1  # an expert that receives less, in multiples of an even share
RECORDS = 3


def load_figures(counts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Figures of the counts that STATISTICS of models/context.py names: expert_load, the tokens that choose each
    expert, in multiples of an even share, [layers with experts, experts]; largest_load, the largest of these; and
    dropped_share, the share of choices that are dropped.  {} for a model without experts."""
    if EXPERT_TOKENS not in counts or not (tokens := counts[EXPERT_TOKENS].astype(np.float64)).any():
        return {}
    tokens = tokens[tokens.sum(1) > 0]
    load = tokens / tokens.mean(1, keepdims=True)
    dropped = float(counts[DROPPED_TOKENS] / tokens.sum())
    return {"expert_load": load.round(3).tolist(), "largest_load": float(load.max()), "dropped_share": dropped}


class CollapseWatch:
    """Finds, once, experts that are not used, in RECORDS records in a row after the warm-up."""

    def __init__(self, warmup: int):
        self.warmup, self.seen = warmup, 0

    def problem(self, step: int, load: list[list[float]]) -> str:
        """What to say of the load of a logged step; '' for nothing."""
        found = collapsed(load) if step > self.warmup else ""
        self.seen = self.seen + 1 if found or self.seen >= RECORDS else 0
        return f"step {step}: {found}" if self.seen == RECORDS else ""


def collapsed(load: list[list[float]]) -> str:
    """What to say of the layer with most unused experts, where these are half of its experts or more; '' for none."""
    unused = [sum(each < UNUSED for each in layer) for layer in load]
    layer = max(range(len(load)), key=unused.__getitem__)
    experts = len(load[layer])
    if unused[layer] < experts / 2:
        return ""
    where = f"in layer {layer + 1} of those with experts, {unused[layer]} of {experts} experts"
    return f"{where} receive less than {UNUSED:g} of an even share of the tokens. Raise model.mlp.balance_loss."
