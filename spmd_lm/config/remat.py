"""Rematerialization: what each policy saves for backward, and what backward computes again.

The model, the memory model and the expected collectives all read this.

    none        everything is saved
    selective   the attention core is recomputed (arXiv:2205.05198, section 5)
    residual    both branches of a block are recomputed, but not the sums over `model` that end them
    full        the whole block is recomputed from its input
    block       blocks of several layers are recomputed; only a remat block's input is saved (arXiv:1604.06174)
    offload     as full, and the inputs of the blocks wait for backward in the host's memory"""

import dataclasses
from typing import Literal

Policy = Literal["none", "selective", "residual", "block", "full", "offload"]


@dataclasses.dataclass(frozen=True)
class RematPolicy:
    """A policy, resolved for one model and layout.
    needed_sums: how many branch-ending sums backward needs: 2 if a norm follows each; else 1, attention's, which the
      MLP reads; 0 if the branches are parallel."""

    policy: Policy = "none"
    layers_per_remat_block: int = 1  # more than 1 for policy `block` only
    needed_sums: int = 1

    @property
    def recomputes_attention(self) -> bool:
        return self.policy == "selective"

    @property
    def recomputes_layer(self) -> bool:
        return self.saves_inputs_alone or self.policy == "residual"

    @property
    def saves_inputs_alone(self) -> bool:
        return self.policy in ("full", "offload")

    @property
    def offloads_inputs(self) -> bool:
        return self.policy == "offload"

    @property
    def saves_branch_sums(self) -> bool:
        return self.policy == "residual"

    def repeated_reductions(self, *, scan: bool) -> float:
        """Forward reductions over `model` (Megatron's g) that backward repeats, per layer.
        scan: layers run in a loop."""
        if self.saves_inputs_alone:
            return self.needed_sums
        if self.policy == "block":
            # Unrolled, the last layer of a remat block repeats only the needed ones.
            return 2.0 if scan else 2 - (2 - self.needed_sums) / self.layers_per_remat_block
        return 0

    @property
    def repeated_gathers(self) -> int:
        """Extra all-gathers of the sequence per layer of a remat block, which runs forward twice."""
        return 2 if self.policy == "block" else 0

    @property
    def unneeded_gathers(self) -> int:
        """All-gathers of a chunk's last layer that an unrolled breadth-first pipeline drops: the head has used the
        result."""
        return 2 if self.saves_inputs_alone else int(self.saves_branch_sums)


def cheapest_block_size(layers: int, activations_per_layer: float) -> int:
    """The divisor of `layers` that minimizes the inputs of all remat blocks plus the activations of one
    (arXiv:2104.04473, section 3.5).  activations_per_layer: in units of a layer's input."""
    sizes = (n for n in range(1, layers + 1) if layers % n == 0)
    return min(sizes, key=lambda size: layers // size + size * activations_per_layer)
