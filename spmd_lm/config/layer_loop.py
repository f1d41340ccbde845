"""Whether the layers of a train step run in a loop: `model.scan`, resolved.

A loop compiles once what all layers do.  On a GPU it also copies what a layer's library calls write into stacks that
hold it for backward, a sixth of a step of GPT-2 124M (docs/performance.md), so `auto` unrolls there."""

from typing import NamedTuple

from spmd_lm.config.schema import RunConfig

MOST_UNROLLED = 48
"""Layers that `auto` unrolls: each adds about a second of compilation."""


class LoopChoice(NamedTuple):
    scan: bool
    why: str


def choose_loop(config: RunConfig, platform: str, *, prefetch: bool = False, scatters: bool = False) -> LoopChoice:
    """Whether layers run in a lax.scan on `platform`, and why.  prefetch: whether one gathers the weights of the next,
    which takes a loop.  scatters: whether ZeRO scatters the gradients of each layer in backward."""
    m = config.model
    if config.layers_per_chunk // len(m.kinds) == 1:
        return LoopChoice(False, "a single layer" if len(m.kinds) == 1 else "a single period")
    if m.scan != "auto":
        return LoopChoice(m.scan, "as configured")
    reasons = {
        "it compiles faster": platform != "gpu",
        "in a pipeline it compiles faster": config.parallel.pipe > 1,
        "prefetch runs in it": prefetch,
        "unrolled, gradients of several layers wait to be scattered": scatters,
        "layers share their weights": m.share_layers,
        f"it saves little, with remat.policy={config.remat.policy}": config.remat.policy in ("full", "block"),
        f"more than {MOST_UNROLLED} layers take minutes to compile": m.layers > MOST_UNROLLED,
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    return LoopChoice(True, why) if why else LoopChoice(False, "a GPU would copy what a loop saves for backward")
