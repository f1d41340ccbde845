"""The papers' own formulas, as printed: for their tables, and for systems that are not ours.

Memory is in bytes, with activations of 16 bits and masks of one byte."""

from typing import Literal, NamedTuple

Recomputation = Literal["none", "selective", "full"]


class Sizes(NamedTuple):
    """Sizes of a GPT."""

    width: int
    layers: int
    heads: int
    context: int
    vocab: int

    @property
    def parameters(self) -> float:
        """Number of parameters: arXiv:2104.04473, equation 2."""
        h, l, s, v = self.width, self.layers, self.context, self.vocab  # noqa: E741
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))

    def step_flops(self, batch: int, *, recomputes: bool) -> float:
        """FLOPs of a step: arXiv:2104.04473, equation 3, if it recomputes, else arXiv:2205.05198, equation 7."""
        h, l, s, v = self.width, self.layers, self.context, self.vocab  # noqa: E741
        if recomputes:
            return 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
        return 72 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))

    def layer_activations(
        self, sequences: int, tensor: int, recomputation: Recomputation, *, shards_sequence: bool
    ) -> float:
        """Bytes that one layer saves for backward: arXiv:2205.05198, table 2."""
        stream = sequences * self.context * self.width
        if recomputation == "full":
            return 2 * stream
        outside = 34 / tensor if shards_sequence else 10 + 24 / tensor
        scores = 5 * self.heads * self.context / (self.width * tensor) if recomputation == "none" else 0
        return stream * (outside + scores)


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time as a fraction of the ideal: arXiv:2104.04473, sections 2.2.1 and 2.2.2."""
    return (stages - 1) / (chunks * microbatches)


def training_days(tokens: float, parameters: float, devices: int, flops: float) -> float:
    """Days: arXiv:2104.04473, equation 4.  flops: per second and device, with recomputation."""
    return 8 * tokens * parameters / (devices * flops) / 86_400


def microbatches_in_flight(stages: int, chunks: int) -> float:
    """Microbatches whose activations the first stage of 1F1B holds: arXiv:2205.05198, section 4.2.3."""
    return stages if chunks == 1 else stages + (stages - 1) / chunks


def state_bytes(parameters: float, stage: int, devices: int, optimizer: float = 12) -> float:
    """Weights, gradients and optimizer state of one device: arXiv:1910.02054, figure 1.

    optimizer: bytes per parameter; Adam's 12 are two moments and a copy of the weights, in float32."""
    weights, gradients = 2 / (devices if stage == 3 else 1), 2 / (devices if stage >= 2 else 1)
    return parameters * (weights + gradients + optimizer / (devices if stage else 1))
