"""Matmuls in eight bits (precision.matmul): those of a compiled step beside those that its layers' traces have."""

from collections.abc import Iterator
from typing import Any

from spmd_lm.analysis.control_flow import Shares
from spmd_lm.analysis.eight_bits import eight_bit_matmuls
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.config.remat import RematPolicy
from spmd_lm.config.schema import RunConfig
from spmd_lm.cost_model.layer_trace import trace_layers
from spmd_lm.cost_model.sizes import rows_per_device
from spmd_lm.parallel.plan import Plan
from spmd_lm.resolve import lacks_eight_bits

TOLERANCE = 0.01  # share of the expected FLOPs that may be missing


def least_flops(config: RunConfig, plan: Plan) -> float:
    """FLOPs in eight bits of one device in one step, the mean over pipeline stages, without recomputation: three
    matmuls for a trained matrix of a layer, forward and backward.  Where the embedding is frozen, forward's alone: how
    far down backward goes depends on what is."""
    of_row = 0.0
    for _, share, traced in trace_layers(config, plan, remat=RematPolicy("none")):
        products = (*traced.forward.products, *(traced.backward.products if plan.trains("embedding") else ()))
        of_row += share * sum(each.times * each.product.flops for each in products if each.product.rate)
    layers = config.model.layers / plan.layout.pipe
    return layers * of_row * rows_per_device(config, plan.layout) * config.parallel.microbatches


def eight_bits(config: RunConfig, plan: Plan, module: HloModule, shares: Shares | None) -> dict[str, Any] | None:
    """None without precision.matmul.

    instructions, flops, others: see EightBitMatmuls.
    expected_flops: see `least_flops`.
    emulated: devices without such matmuls multiply them in another dtype, which is no failure.
    ok: nothing is missing, and nothing in another dtype."""
    p = config.precision
    if p.matmul == "none":
        return None
    found, expected = eight_bit_matmuls(module, p.matmul, shares), least_flops(config, plan)
    kept = not found.others and found.flops >= (1 - TOLERANCE) * expected
    emulated = p.emulate and bool(lacks_eight_bits(p.matmul, plan.platform, plan.device_kind))
    ok = kept or emulated
    return {"matmul": p.matmul, "ok": ok, "emulated": emulated, "expected_flops": expected} | found._asdict()


def render_eight_bits(found: dict[str, Any]) -> Iterator[str]:
    """Lines of text."""
    kind, expected = found["matmul"], found["expected_flops"]
    yield (
        f"{kind:7} {found['instructions']} matmuls in the program, a loop's once: "
        f"{found['flops']:.3g} FLOPs, of at least {expected:.3g} with blocks' matrices"
    )
    for operands, flops in found["others"].items():
        yield f"        the compiler made {operands} of {flops:.3g} FLOPs{', emulated' * found['emulated']}"
    if not found["ok"]:
        problem = f"these devices do not multiply in {kind}" if found["others"] else "fewer than expected"
        yield f"        {problem}: use precision.matmul=none"
