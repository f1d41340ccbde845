"""FLOPs of the matmuls that a compiled step runs, with every iteration of its loops.

jax's own `compiled.cost_analysis()` counts the body of a loop once: of a scan over layers, one layer."""

from spmd_lm.analysis.control_flow import Shares, kernels
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.instruction_costs import InstructionCosts


def compiled_flops(module: HloModule, shares: Shares | None = None) -> float:
    """FLOPs of one device in one step, the mean over pipeline stages.  A branch without a share counts as always taken;
    kernels that are not HLO, such as cuDNN's attention, count none."""
    costs = InstructionCosts(module)
    return float(sum(counts.mean() * costs.flops(name, i) for name, i, counts in kernels(module, shares or {})))
