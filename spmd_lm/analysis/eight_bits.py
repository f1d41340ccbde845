"""Matmuls in eight bits of a compiled step (precision.matmul), by the dtypes of their operands."""

from typing import NamedTuple

from spmd_lm.analysis.control_flow import Shares, kernels
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.instruction_costs import InstructionCosts
from spmd_lm.ops.eight_bits import SCOPE

CODES = {"fp8": ("f8e4m3fn", "f8e5m2"), "int8": ("s8",)}
"""HLO's dtypes by precision.matmul."""


class EightBitMatmuls(NamedTuple):
    """instructions: those whose operands are both codes.
    flops: theirs, of one device in one step, the mean over pipeline stages.
    others: FLOPs by operands of those that the program asked for, and the compiler made of another dtype."""

    instructions: int
    flops: float
    others: dict[str, float]


def eight_bit_matmuls(module: HloModule, kind: str, shares: Shares | None = None) -> EightBitMatmuls:
    """kind: precision.matmul.  Loops count every iteration in FLOPs, and once as instructions."""
    costs, count, flops, others = InstructionCosts(module), 0, 0.0, dict[str, float]()
    computation_of = {i: name for name, body in module.computations.items() for i in body}
    for _, kernel, counts in kernels(module, shares or {}):
        for i in costs.within(kernel.callee) if kernel.callee else [kernel]:
            if not (own := float(counts.mean() * costs.flops(computation_of[i], i))):
                continue
            operands = [each.arrays[0].dtype for each in module.operands(computation_of[i], i)[:2]]
            if all(dtype in CODES[kind] for dtype in operands):
                count, flops = count + 1, flops + own
            elif SCOPE in i.scope:
                key = " x ".join(operands)
                others[key] = others.get(key, 0.0) + own
    return EightBitMatmuls(count, flops, others)
