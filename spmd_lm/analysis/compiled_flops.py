"""FLOPs of the matrix products that a compiled step runs, with every iteration of its loops.

jax's own count, `compiled.cost_analysis()`, has the body of a loop once, which of a scan over layers is one layer."""

import numpy as np

from spmd_lm.analysis.control_flow import CallPath, Shares, calls, path_to_entry
from spmd_lm.analysis.hlo import HloModule
from spmd_lm.analysis.instruction_costs import InstructionCosts


def compiled_flops(module: HloModule, shares: Shares | None = None) -> float:
    """Of one device in one step, the mean over the stages of a pipeline; a branch whose share is not known counts as if
    it were always taken.  Kernels that are not HLO, such as cuDNN's attention, count none."""
    shares = shares or {}
    costs = InstructionCosts(module)

    def within(computation: str, path: CallPath) -> np.ndarray:
        """float [stages]."""
        total = np.zeros_like(path.counts)
        for i in module.computations[computation]:
            if i.opcode in ("while", "conditional", "call"):
                for callee, callee_path in calls(module, i, path, shares):
                    total += within(callee, callee_path)
            else:
                total += path.counts * costs.flops(computation, i)
        return total

    return float(within(module.entry, path_to_entry(shares)).mean())
