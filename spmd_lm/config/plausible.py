"""Warnings about values that the schema allows but nobody means, such as optim.lr=4e07, with likely corrections."""

import math
from collections.abc import Iterator

from spmd_lm.config.schema import RunConfig

RANGES = {  # wider than in any paper, test or odd optimizer; 0 means off, and passes
    "optim.lr": (1e-9, 10.0),
    "optim.min_lr": (1e-12, 10.0),
    "optim.weight_decay": (1e-8, 100.0),
    "optim.clip": (1e-4, 1e4),
    "optim.eps": (1e-20, 0.1),
    "optim.b1": (0.3, 0.99999),
    "optim.b2": (0.3, 0.9999999),
    "model.norm_eps": (1e-14, 0.1),
    "model.rope_theta": (10.0, 1e10),
    "model.dropout": (1e-4, 0.9),
    "model.attention_dropout": (1e-4, 0.9),
}


def doubts(config: RunConfig) -> Iterator[str]:
    """A sentence for each value far outside the usual range."""
    for path, (low, high) in RANGES.items():
        section, _, key = path.partition(".")
        value = getattr(getattr(config, section), key, 0)
        if value and not low <= value <= high:
            meant = likely(value, low, high)
            advice = f"Did you mean {path}={meant:.15g}?" if meant else "Look at it again."
            yield f"{path}={value:g} is far from what is in use, {low:g} to {high:g}. {advice}"
    if config.optim.warmup > config.train.steps:
        what = f"optim.warmup={config.optim.warmup} is longer than train.steps={config.train.steps}"
        yield f"{what}: optim.lr is never reached. Did you mean optim.warmup={config.train.steps // 10}?"


def likely(value: float, low: float, high: float) -> float | None:
    """`value` with the sign of its exponent flipped, or scaled by the fewest powers of ten that reach the range; else
    None."""
    exponent = math.floor(math.log10(value))
    digits = float(f"{value / 10.0**exponent:.12g}")
    powers = [-exponent, *sorted(range(-20, 12), key=lambda power: abs(power - exponent))]
    return next((meant for power in powers if low <= (meant := float(f"{digits:.12g}e{power}")) <= high), None)
