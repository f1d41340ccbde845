"""Rematerialization: what each policy saves for backward, and what backward computes again.

The model wraps what this says, the memory model counts what is saved, and the expected collectives count what runs
again.

    none        everything is saved
    selective   the attention core is recomputed (arXiv:2205.05198, section 5)
    residual    both branches of a block are recomputed, but not the sums over `model` that end them
    full        the whole block is recomputed from its input
    block       blocks of several layers are recomputed; only a remat block's input is saved (arXiv:1604.06174)"""

import dataclasses
from typing import Literal

Policy = Literal["none", "selective", "residual", "block", "full"]


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """A policy, resolved for one model and layout.

    layers_per_remat_block: layers per remat block; 1 but for policy `block`.  needed_sums: how many of the sums that
    end a layer's two branches its backward needs: both where a norm follows them, else attention's, which the MLP
    reads, or none where the branches are parallel."""

    policy: Policy = "none"
    layers_per_remat_block: int = 1
    needed_sums: int = 1

    @property
    def recomputes_attention(self) -> bool:
        return self.policy == "selective"

    @property
    def recomputes_layer(self) -> bool:
        """Whether each layer runs again from its input, or from the sums that end its branches."""
        return self.policy in ("full", "residual")

    @property
    def saves_branch_sums(self) -> bool:
        return self.policy == "residual"

    @property
    def saved_streams(self) -> int:
        """Residual streams saved per layer where each layer runs again: its input, and the sums that end its branches
        and that backward needs."""
        return 1 + self.saves_branch_sums * self.needed_sums

    def repeated_reductions(self, *, scan: bool) -> float:
        """How many of a layer's forward reductions over `model` (Megatron's g) backward runs again.  scan: whether
        layers run in a loop."""
        if self.policy == "full":
            return self.needed_sums
        if self.policy == "block":
            # Unrolled, all but those that end the last layer of a remat block.
            return 2.0 if scan else 2 - (2 - self.needed_sums) / self.layers_per_remat_block
        return 0

    @property
    def repeated_gathers(self) -> int:
        """How many more all-gathers of the sequence per layer a remat block costs: its layers run forward twice."""
        return 2 if self.policy == "block" else 0

    @property
    def unneeded_gathers(self) -> int:
        """All-gathers of a chunk's last layer that an unrolled breadth-first pipeline drops: the head has used its
        result long before."""
        return {"full": 2, "residual": 1}.get(self.policy, 0)


def cheapest_block_size(layers: int, activations_per_layer: float) -> int:
    """The divisor of `layers` for which the inputs of all remat blocks and the activations of one of them are least
    (arXiv:2104.04473, section 3.5).  activations_per_layer: in units of a layer's input."""
    sizes = (n for n in range(1, layers + 1) if layers % n == 0)
    return min(sizes, key=lambda size: layers // size + size * activations_per_layer)
