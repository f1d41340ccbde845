"""The resolution of `model.scan`: a loop over layers, or unrolled layers.

A loop compiles its body once.  On a GPU it also copies the outputs of a layer's library calls into the stacks saved for
backward, a sixth of a step of GPT-2 124M (docs/performance.md), so `auto` unrolls there."""

from typing import NamedTuple

from spmd_lm.config.schema import RunConfig

MOST_UNROLLED = 48  # layers that `auto` unrolls: each adds about a second of compilation


class LoopChoice(NamedTuple):
    scan: bool
    why: str


def choose_loop(config: RunConfig, platform: str, *, prefetch: bool = False, scatters: bool = False) -> LoopChoice:
    """The choice of lax.scan over layers on `platform`, and its reason.

    prefetch: a layer gathers the next one's weights, which needs a loop.
    scatters: ZeRO scatters each layer's gradients in backward."""
    m, policy = config.model, config.remat.policy
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
        f"it saves little, with remat.policy={policy}": policy in ("full", "offload", "block"),
        f"more than {MOST_UNROLLED} layers take minutes to compile": m.layers > MOST_UNROLLED,
    }
    why = next((why for why, holds in reasons.items() if holds), None)
    return LoopChoice(True, why) if why else LoopChoice(False, "a GPU would copy what a loop saves for backward")
